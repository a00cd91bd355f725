"""The catalogue and its order, rules of one's own, and what every rule refuses for the same reasons."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import te_transform
from te_transform import Rule
from te_transform.backends.op import FusedOp
from te_transform.command_line.sentences import refused, yielded
from te_transform.graph import ops
from te_transform.graph.pattern import AnyOrder, Call, Linear, Var
from te_transform.passes import layernorm_linear, layernorm_mlp, linear, merge_siblings
from te_transform.pipeline import PIPELINE
from te_transform.plan import refusals
from tests.attacks import Pair
from tests.models.tiny import Tiny
from tests.rules import tables
from tests.rules.tables import FFN, H, Make, Written, X, fused, reasons, sites, written

# The catalogue


def test_a_rule_is_a_file_of_its_name_that_says_what_it_saves() -> None:
    names = [rule.name for rule in PIPELINE]
    assert len(set(names)) == len(names)
    for rule in PIPELINE:
        module = import_module(rule.refuse.__module__)
        assert module.RULE is rule
        assert rule.name in module.__name__.split(".")
        assert module.__doc__


def llama(model: Written, x: Tensor) -> Tensor:
    x = model.norm(x)
    return model.down(F.silu(model.gate(x)) * model.up(x))


GATED = written(
    llama,
    norm=lambda: nn.RMSNorm(H),
    gate=tables.linear(H, FFN, bias=False),
    up=tables.linear(H, FFN, bias=False),
    down=tables.linear(FFN, H, bias=False),
)


def counts(*modules: Any) -> dict[str, int]:
    return dict(sites(GATED, passes=[module.RULE for module in modules]).counts)


def test_the_order_matters() -> None:
    assert counts(merge_siblings, layernorm_mlp, layernorm_linear, linear) == {
        "merge_siblings": 1,
        "layernorm_mlp": 1,
    }
    # layernorm_linear takes the norm and the first linear away from layernorm_mlp
    early = counts(merge_siblings, layernorm_linear, layernorm_mlp, linear)
    assert early == {"merge_siblings": 1, "layernorm_linear": 1, "linear": 1}
    # two linears of one norm are in no pattern of an MLP, unless they are merged before
    late = counts(layernorm_mlp, layernorm_linear, merge_siblings, linear)
    assert late == {"layernorm_linear": 1, "linear": 2}
    # what linear takes is gone
    assert counts(linear, merge_siblings, layernorm_mlp, layernorm_linear) == {"linear": 3}


@pytest.mark.parametrize("rules", [(), (linear,), (merge_siblings,), (layernorm_linear, linear)])
def test_rules_that_are_left_out_leave_the_model_right(rules: tuple) -> None:
    fused(GATED, passes=tuple(module.RULE for module in rules))


# A rule of one's own


class ScaledLinear(FusedOp):
    """(a x) W^T + b with the scale where it costs least: in front, or behind."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        return F.linear(x, weight) * scale + (0 if bias is None else bias)


def refuse(linear: Any, scale: float) -> Iterator[str]:
    if scale <= 0:
        yield f"the input is scaled by {scale}, a positive number is needed"


OWN = Rule(
    name="scaled_linear",
    pattern=Linear(Call(torch.mul, Var("x"), Var("scale", lambda value: isinstance(value, float)))),
    refuse=refuse,
    build=lambda: ScaledLinear(),
    reads=("x", "linear.weight", "linear.bias", "scale"),
)


def scaling(by: float) -> Make:
    return written(lambda m, x: torch.tanh(m.inner(x * by)), inner=tables.linear())


def test_a_rule_of_ones_own_is_run() -> None:
    report = fused(scaling(2.0), passes=(OWN, *PIPELINE))
    assert report.counts == {"scaled_linear": 1}
    (call,) = (node for node in report.after.nodes if node.op == "call_module")
    assert call.target == "inner.scaled_linear"


def test_a_role_may_have_any_name() -> None:
    """`shared` is what build() may ask for of others, unless the rule has a role of that name."""
    scaled = Call(torch.mul, Var("x"), Var("shared", lambda value: isinstance(value, float)))
    reads = ("x", "linear.weight", "linear.bias", "shared")
    rule = replace(OWN, pattern=Linear(scaled), refuse=lambda shared: iter(()), reads=reads)
    assert fused(scaling(2.0), passes=(rule, *PIPELINE)).counts == {"scaled_linear": 1}


class Counted(ScaledLinear):
    """With a product, as the catalogue's ops have them; counts its calls."""

    PRODUCTS = (1,)
    calls = 0

    def forward(self, *arguments: Any) -> Tensor:
        Counted.calls += 1
        return super().forward(*arguments)


@pytest.mark.usefixtures("by_size", "compilations", "te")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "options", [{"backend": "torch"}, {"backend": "te"}, {"backend": "te", "recipe": "fp8-current"}]
)
def test_an_op_of_the_user_runs_at_any_size(options: dict[str, str], compile: bool) -> None:
    x, rules = X.bfloat16(), (replace(OWN, build=lambda: Counted()), *PIPELINE)
    original = scaling(2.0)().bfloat16()
    model = te_transform.convert(original, x, passes=rules, verify=False, compile=compile, **options)
    Counted.calls = 0
    for _ in range(2):
        torch.testing.assert_close(model(x), original(x), rtol=0.05, atol=0.05)
    assert Counted.calls > 0 if compile else Counted.calls == 2  # a compiler traces it


def test_a_rule_of_ones_own_refuses() -> None:
    report = fused(scaling(-2.0), passes=(OWN, *PIPELINE))
    assert report.counts == {"linear": 1}
    assert reasons(report, "scaled_linear") == {"the input is scaled by -2.0, a positive number is needed"}


class Wrong(ScaledLinear):
    """Forgets the bias."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        return super().forward(x, weight, None, scale)


class Failing(ScaledLinear):
    """Raises."""

    def forward(self, *_: Any) -> Tensor:
        raise ArithmeticError("no")


@pytest.mark.parametrize("op", [Wrong, Failing])
def test_a_rule_of_ones_own_that_is_wrong_is_taken_back(op: type[FusedOp]) -> None:
    report = fused(scaling(2.0), passes=(replace(OWN, build=lambda: op()), *PIPELINE))
    assert not report.fused
    (reason,) = reasons(report, "scaled_linear")
    assert reason.startswith("rolled back: ")


def test_a_rule_that_fails_leaves_the_model_as_it_was_and_is_noted() -> None:
    def fails(linear: Any) -> Iterator[str]:
        raise ArithmeticError("a mistake in a rule")

    report = fused(scaling(2.0), passes=(replace(OWN, refuse=fails), *PIPELINE))
    assert report.counts == {}
    said = (
        "expected reasons from refuse() of the rule 'scaled_linear', got ArithmeticError: a mistake in a rule"
    )
    assert f"RuleError: {said}" in report.notes


# Reasons that all rules share


def test_skip_leaves_modules_alone_with_a_reason() -> None:
    pair = Pair.of(Tiny, skip=["blocks.0.attention", "head*"])
    report = te_transform.report(pair.converted)
    sentence = "the module is skipped by skip={!r}: leave it out of skip= to have it fused"
    assert reasons(report, "merge_siblings") == {sentence.format("blocks.0.attention")}
    assert reasons(report, "layernorm_linear") >= {sentence.format("head*")}
    assert report.counts == {"layernorm_mlp": 1}
    pair.agree()


def test_several_dtypes() -> None:
    make = written(
        lambda m, x: m.inner(m.norm(x)),
        norm=lambda: nn.LayerNorm(H),
        inner=lambda: nn.Linear(H, H, dtype=torch.bfloat16),
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = reasons(sites(make), "layernorm_linear")
    assert found == {
        "the parameters have several dtypes (linear bfloat16, layer_norm float32), but a fused module needs "
        "one dtype: store them in one, as model.to(torch.bfloat16) does"
    }


def test_a_weight_that_is_no_plain_tensor() -> None:
    model = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))
    weight = model[1].weight.detach()
    model[1].weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    for report in (te_transform.inspect(model, X), te_transform.report(te_transform.convert(model, X))):
        sentence = (
            "the linear's weight is a TwoTensor, but kernels need a plain tensor: load plain tensors instead"
        )
        assert reasons(report, "layernorm_linear") == reasons(report, "linear") == {sentence}
        assert report.counts == {"linear": 1}


def test_each_sentence_says_what_to_change() -> None:
    """Behind a colon: that, or that no kernel has it."""
    found = [*yielded(refusals), *(sentence for rule in PIPELINE for sentence in refused(rule))]
    assert len(found) > 40
    assert not [sentence for sentence in found if ": " not in sentence]


def read_in_between(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    with torch.no_grad():
        scale = model.scale * 2
    return model.inner(y) * scale


def read_before(model: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.scale * 2
    return model.inner(model.norm(x)) * scale


@pytest.mark.parametrize(("forward", "count"), [(read_in_between, 0), (read_before, 1)])
def test_a_change_of_the_mode_is_moved_out_of_the_way(forward: Any, count: int) -> None:
    parts = {
        "norm": lambda: nn.LayerNorm(H),
        "inner": tables.linear(),
        "scale": lambda: nn.Buffer(torch.ones(H)),
    }
    fused(written(forward, **parts)).expect(layernorm_linear=count)


# Near misses


def test_most_of_a_pattern_says_what_stood_in_its_way() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        gate, _ = model.fc1(model.norm(x)).split([FFN, FFN], -1)
        return model.fc2(F.silu(gate) * torch.tanh(model.other(x)))

    make = written(
        forward,
        norm=lambda: nn.LayerNorm(H),
        fc1=tables.linear(H, 2 * FFN),
        other=tables.linear(H, FFN),
        fc2=tables.linear(FFN, H),
    )
    assert reasons(sites(make), "layernorm_mlp") == {
        "the mul reads tanh, but the rule has a part of a linear's columns there: write it like that, if the "
        "math allows"
    }


def test_less_than_half_of_a_pattern_in_any_order_is_no_near_miss() -> None:
    inner = Linear(Call(ops.relu, Linear(Var("y"), role="up"), role="act"), role="down")
    pattern = AnyOrder(torch.add, Var("x"), inner)
    assert pattern.depth == Call(torch.add, Var("x"), inner).depth
    make = written(lambda model, x: x + torch.sin(x) + model.fc(x), fc=tables.linear(H, H))
    rule = replace(linear.RULE, name="any_order", pattern=pattern, refuse=lambda: (), reads=("x",))
    assert not sites(make, passes=[rule]).sites


def test_other_readers_of_a_linears_columns_are_a_reason() -> None:
    """PaLM's first linear also makes queries, keys, values and gate."""

    def parallel(m: Any, x: Tensor) -> Tensor:
        other, both = m.fused(m.norm(x)).split((H, 2 * FFN), -1)
        gate, up = both.chunk(2, -1)
        return torch.tanh(other) + m.down(F.silu(gate) * up)

    linears = {"fused": tables.linear(H, H + 2 * FFN), "down": tables.linear(FFN, H)}
    why = (
        "the linear has columns beside a gate and its product, but LayerNormMLP needs only these: give the "
        "MLP its own linear and norm, if you can retrain"
    )
    found = reasons(sites(written(parallel, norm=lambda: nn.LayerNorm(H), **linears)), "layernorm_mlp")
    assert why in found

    def apart(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(m.mlp_norm(x)).chunk(2, -1)
        return torch.tanh(m.other(m.norm(x))) + m.down(F.silu(gate) * up)

    linears |= {"other": tables.linear(), "both": tables.linear(H, 2 * FFN)}
    norms = {name: lambda: nn.LayerNorm(H) for name in ("norm", "mlp_norm")}
    fused(written(apart, **norms, **linears)).expect(layernorm_mlp=1, layernorm_linear=1)


def test_a_value_that_differs_from_its_first_binding_is_named() -> None:
    """Cosines and sines are taken of angles that were computed twice."""
    twice = Call(torch.add, Call(torch.tanh, Call(torch.abs, Var("x"))), Call(torch.tanh, Var("x")))
    rule = replace(linear.RULE, name="twice", pattern=twice, refuse=lambda: (), reads=("x",))
    make = written(
        lambda m, x: m.linear(torch.add(torch.tanh(torch.abs(x)), torch.tanh(torch.neg(x)))),
        linear=tables.linear(),
    )
    (why,) = reasons(sites(make, passes=[rule]), "twice")
    assert why == (
        "the tanh reads neg, but the rule has one value for the x there: write it like that, if the math "
        "allows"
    )
