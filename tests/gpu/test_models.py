"""Every model of the zoo on Transformer Engine: to design section 9 in bf16, and in each FP8 recipe."""

import pytest

import te_transform
from te_transform.backends.fp8.registry import state_of
from te_transform.execution.attach import runner_of
from tests.conversions import ALL
from tests.gpu.zoo import converted, sample


@pytest.mark.parametrize("name", ALL)
def test_bf16_is_as_exact_as_the_original(name: str) -> None:
    pair = converted(name)
    result = te_transform.verify(pair.original, pair.converted, sample(name))
    assert result, str(result)


@pytest.mark.parametrize("name", ALL)
def test_nothing_was_rolled_back(name: str) -> None:
    report = converted(name).report
    assert not [site for site in report.refused if "rolled back" in " ".join(site.reasons)], str(report)


@pytest.mark.parametrize("name", ALL)
def test_kernels_of_te_run(name: str) -> None:
    pair = converted(name)
    pair.run(sample(name), training=True)
    found = [
        (name, k)
        for name, p in pair.converted.named_parameters()
        for k in state_of(p).kernels.values()
        if k.built is not None
    ]
    # of every graph: verify() has made calls that are captured whole, where those of the example are not
    sites = [site for graph in runner_of(pair.converted).graphs for site in graph.plan.sites]
    fused = {rule for site in sites for rule, _ in site.rules}
    assert bool(found) == bool(fused & {"layernorm_linear", "layernorm_mlp"}), f"{found}\n{pair.report}"
