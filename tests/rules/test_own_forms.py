"""A rule of another package, with an op, canonical forms and a fused op of its own."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import te_transform
from te_transform.backends.op import StepMemory
from te_transform.graph import edit
from te_transform.graph.nodes import called
from te_transform.rules import Call, Forms, FusedOp, Linear, Operation, Rule, Spelling, Var, ops
from tests.captures import targets
from tests.rules import tables
from tests.rules.tables import Make, Written, X, fused, reasons, sites, written


@ops.register
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def spelled(graph: fx.Graph, match: Any) -> tuple:
    return soft_cap, (match.bound["x"], match.bound["cap"])


def spell_ones(graph: fx.Graph) -> None:
    """A tanh is a cap of one."""
    for node in graph.nodes:
        if node.target is torch.tanh and not any(user.target is torch.mul for user in node.users):
            edit.set_target(node, soft_cap, (*node.args, 1.0))


def drop_clamps(graph: fx.Graph) -> None:
    """A clamp of a tanh's argument to a number whose tanh is 1 changes nothing."""
    for node in graph.nodes:
        if called(node) == "clamp" and node.kwargs == {"max": 1e9}:
            edit.replace_uses(node, node.args[0])
            edit.erase_cascade(graph, [node], {node.name})


class CappedLinear(FusedOp):
    PRODUCTS = (1,)
    OUTSIDE_RECIPE = "capped linears stay out of the recipe"

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, cap: float) -> Tensor:
        return torch.tanh(F.linear(x, weight, bias).div_(cap)) * cap


def refuse(capped: Operation) -> Iterator[str]:
    if capped.cap > 9:
        yield f"the cap is {capped.cap}, but CappedLinear supports caps up to 9: lower it"


def is_number(value: Any) -> bool:
    return isinstance(value, float)


TANH = Call(torch.tanh, Call(torch.div, Var("x"), Var("cap", is_number)))
PRODUCT = Call(torch.mul, TANH, Var("cap", is_number), commute=True)
RULE = Rule(
    name="capped_linear",
    pattern=Call(soft_cap, Linear(Var("x")), role="capped"),
    refuse=refuse,
    build=CappedLinear,
    reads=("x", "linear.weight", "linear.bias", "capped.cap"),
    forms=Forms(
        (Spelling(PRODUCT, spelled),),
        spell=spell_ones,
        prepare=drop_clamps,
    ),
)
RULES = (RULE, *te_transform.PIPELINE)


def capping(cap: float) -> Make:
    return written(lambda m, x: torch.tanh(m.inner(x) / cap) * cap, inner=tables.linear())


def in_place(model: Written, x: Tensor) -> Tensor:
    return (3.0 * (model.inner(x) / 3.0).tanh_()).add_(x)


def clamped(model: Written, x: Tensor) -> Tensor:
    return torch.tanh(model.inner(x).clamp(max=1e9) / 2.0) * 2.0


SPELLED = {
    "as a product": capping(3.0),
    "as a product with the cap in front, in place": written(in_place, inner=tables.linear()),
    "as a tanh": written(lambda m, x: torch.tanh(m.inner(x)), inner=tables.linear()),
    "behind a clamp": written(clamped, inner=tables.linear()),
}


@pytest.mark.parametrize("name", SPELLED)
def test_each_of_its_forms_is_fused(name: str) -> None:
    assert fused(SPELLED[name], passes=RULES).counts == {"capped_linear": 1}


def test_a_rule_refuses_by_the_arguments_of_its_own_op() -> None:
    report = fused(capping(10.0), passes=RULES)
    assert report.counts == {"linear": 1}
    assert reasons(report, "capped_linear") == {
        "the cap is 10.0, but CappedLinear supports caps up to 9: lower it"
    }


def test_without_the_rule_nothing_has_its_forms() -> None:
    left_out = replace(RULE, needs_kernels=True)  # of the plain backend
    for rules, is_there in ((RULES, True), (te_transform.PIPELINE, False), ((left_out,), False)):
        graph = sites(SPELLED["behind a clamp"], passes=rules).before
        assert (soft_cap in targets(graph), torch.clamp in targets(graph)) == (is_there, not is_there)


def test_the_report_has_its_note_and_its_memory() -> None:
    class Keeping(CappedLinear):
        def step_memory(self, x: fx.Node, weight: fx.Node, *_: Any) -> StepMemory:
            return StepMemory(kept=2**20, transient=0, gradients=0)

    asked: dict[str, Any] = {"backend": "te", "x": X.bfloat16()}
    for op, recipe in ((CappedLinear, None), (Keeping, "fp8-delayed")):
        rule = replace(RULE, build=op)
        report = sites(lambda: capping(3.0)().bfloat16(), passes=(rule,), recipe=recipe, **asked)
        report.expect(capped_linear=1)
        assert (CappedLinear.OUTSIDE_RECIPE in report.notes) is (recipe is not None)
        assert (report.memory.kept >= 2**20) is (op is Keeping)


def test_a_model_with_it_is_pickled_by_the_rules_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    converted = te_transform.convert(model, X, passes=(RULE,))
    te_transform.report(converted).expect(capped_linear=1)
    again = pickle.loads(pickle.dumps(converted))
    assert torch.equal(again(X), converted(X))
    converted = te_transform.convert(model, X, passes=(replace(RULE),))
    with pytest.raises(TypeError, match=r"expected the rule 'capped_linear' to be a global of .*; assign"):
        pickle.dumps(converted)


def test_forms_that_fail_leave_the_model_as_it_was_and_are_noted() -> None:
    def fails(graph: fx.Graph) -> None:
        raise ArithmeticError("a mistake in a form")

    for forms in (Forms(spell=fails), Forms(prepare=fails)):
        report = fused(capping(3.0), passes=(replace(RULE, forms=forms),))
        assert report.counts == {}
        assert "ArithmeticError: a mistake in a form" in report.notes


def test_a_form_that_is_wrong_is_taken_back() -> None:
    twice = Spelling(PRODUCT, lambda graph, match: (soft_cap, (match.bound["x"], 2 * match.bound["cap"])))
    report = fused(capping(3.0), passes=(replace(RULE, forms=Forms((twice,))),))
    (reason,) = reasons(report, "capped_linear")
    assert reason.startswith("rolled back: ")


def test_forms_are_forms() -> None:
    with pytest.raises(
        te_transform.OptionError, match="expected Forms or None for forms of the rule 'capped"
    ):
        te_transform.inspect(capping(3.0)(), X, passes=(replace(RULE, forms=(spelled,)),))
