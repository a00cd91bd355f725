"""Every model of the zoo on Transformer Engine: to design section 9 in bf16, and in each FP8 recipe."""

from functools import cache

import pytest
import torch

import te_transform
from te_transform.backends.fp8.registry import state_of
from te_transform.execution.runner import runner_of
from tests.conversions import ALL, Pair, cast
from tests.zoo import Inputs, zero_dropout


def sample(name: str, batch: int = 2, seq: int = 16, **options: object) -> Inputs:
    inputs = cast(ALL[name].sample(batch, seq, **options), torch.bfloat16)
    moved = {id(tensor): tensor.cuda() for tensor in inputs.values()}
    return {key: moved[id(tensor)] for key, tensor in inputs.items()}


@cache
def converted(name: str, recipe: str | None = None) -> Pair:
    """Without dropout, in bf16, on the GPU."""
    model = zero_dropout(ALL[name].build()).to("cuda", torch.bfloat16)
    return Pair(ALL[name], model, te_transform.convert(model, sample(name), backend="te", recipe=recipe))


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
        if k.made is not None
    ]
    # of every graph: verify() has made calls that are captured whole, where those of the example are not
    sites = [site for graph in runner_of(pair.converted).graphs for site in graph.plan.sites]
    fused = {rule for site in sites for rule, _ in site.rules}
    assert bool(found) == bool(fused & {"layernorm_linear", "layernorm_mlp"}), f"{found}\n{pair.report}"
