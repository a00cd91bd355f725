"""Fuse norm, linear, activation (gated or not) and linear into LayerNormMLP."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import fx, nn

from te_transform.backends.plain import SLOPES, clamped
from te_transform.graph import ops
from te_transform.graph.nodes import is_number, is_tensor_node, numel_of
from te_transform.graph.pattern import Call, Linear, Norm, OneOf, Pattern, Var
from te_transform.graph.pointwise import Between, leads_elsewhere
from te_transform.passes import layernorm_linear
from te_transform.plan.rule import Operation, Rule

_RELU_SPELLINGS = {"clamp", "clamp_min", "ge", "gt", "max", "maximum", "mul", "threshold", "where"}
_SLOPED = tuple(getattr(ops, op) for op in SLOPES)


def halves(fc1: Pattern) -> tuple[Call, Call]:
    """Return the patterns of the two column ranges of a gated MLP's first product."""
    return Call(ops.columns, fc1, 0, Var("half")), Call(ops.columns, fc1, Var("half"), Var("end"))


def clamped_gate(gate: Pattern, beside: Pattern) -> Call:
    """Return the pattern of a gated product whose two factors are clamped to a limit (GPT-OSS)."""
    limit = Var("limit", is_number)
    within = Call(torch.clamp, beside, Var("least", is_number), limit)
    return Call(
        torch.mul,
        Call(_SLOPED, Call(torch.clamp, gate, None, limit), role="activation"),
        OneOf(offset={"one": Call(torch.add, within, 1, commute=True), "none": within}),
    )


def activation_pattern(fc1: Pattern) -> OneOf:
    """Return the pattern of the activation after the first product `fc1`; `gated` is the activated part."""
    first, second = halves(fc1)
    act = partial(Call, ops.ACTIVATION_OPS, role="activation")
    gates = {"first half": (first, second), "second half": (second, first)}
    patterns = {
        part: OneOf(Call(torch.mul, act(gate), beside), clamped_gate(gate, beside))
        for part, (gate, beside) in gates.items()
    }
    return OneOf(gated={"no": act(fc1)} | patterns)


_NORM_FC1 = Linear(Norm(Var("x")), role="fc1")
_HIDDEN = activation_pattern(_NORM_FC1)
_OTHER = Between(_NORM_FC1, "functions", passes=lambda node: node.target not in ops.NORMS)


def _with_dropout(hidden: Pattern) -> Call:
    return Call(ops.dropout, hidden, role="dropout")


_DROPPED_HIDDEN = OneOf(_HIDDEN, _with_dropout(_HIDDEN), _with_dropout(_OTHER), _OTHER)


def refuse(
    backend,
    approximate: bool,
    fc1: Operation,
    fc2: Operation,
    activation: Operation | None = None,
    gated: str = "no",
    half: int = 0,
    end: int = 0,
    limit: float | None = None,
    least: float | None = None,
    functions: tuple[str, ...] = (),
    dropout: Operation | None = None,
) -> Iterator[str]:
    """Yield every reason why LayerNormMLP does not compute this MLP."""
    yield from refuse_limits(limit, least)
    if activation is None:
        yield from _of_functions(backend, fc1, fc2, functions)
    else:
        yield from _of_activation(backend, approximate, activation, gated)
    if gated not in backend.GATES:
        yield (
            f"the activation is applied to the {gated} of the first linear's outputs, but LayerNormMLP "
            f"activates the {' or the '.join(backend.GATES[1:])}: split the linear into two, one per half"
        )
    # equal widths are required: a single column next to the gate would be broadcast
    if gated != "no" and not 2 * half == end == fc1.width:
        yield (
            f"the gate has {half} of the first linear's {fc1.width} outputs, but LayerNormMLP needs exactly "
            "half: no kernel supports other splits"
        )
    yield from _of_shapes(fc1, fc2, dropout)


def refuse_limits(limit: float | None, least: float | None) -> Iterator[str]:
    """Yield why fused ops do not support the limits of a clamped gate."""
    if limit is not None and not 0 < limit == -least:
        yield (
            f"the product beside the gate is clamped to {least} and {limit}, but the fused op has one limit "
            "for both signs: no kernel supports two"
        )


def _of_activation(backend, approximate: bool, activation: Operation, gated: str) -> Iterator[str]:
    known = _activations(backend, gated)
    if activation.op == "gelu" and gated != "no" and not approximate:
        yield (
            "the activation is the exact (erf) GELU, but a gated LayerNormMLP has only the tanh "
            "approximation: set approximate=True, in float32 also verify=False"
        )
    elif activation.op != "gelu" and activation.op not in known:
        yield from _unknown(activation.op, known)


def _of_functions(backend, fc1: Operation, fc2: Operation, functions: tuple[str, ...]) -> Iterator[str]:
    """Yield why LayerNormMLP cannot compute functions that are not one of its activations."""
    inner = fc2.weight.shape[1]
    known = _activations(backend, "no" if "mul" not in functions or fc1.width == inner else "first half")
    is_one = len({*functions} & {*known}) == 1 and {*functions} <= {"mul", "div", *known}
    if is_one and (factors := [*_of_factors(fc1.node, fc2.node)]):
        yield from factors
        return
    others = [name for name in functions if name not in ("cast", "mul", *known)]
    if others:
        alone = {*functions} <= {others[0], "mul"}
        may_be_relu = {*functions} <= _RELU_SPELLINGS
        yield from _unknown(others[0] if alone else f"made of {', '.join(functions)}", known, may_be_relu)
    if "cast" in functions:
        yield (
            "the activation is computed in another dtype than the first linear, but LayerNormMLP uses one "
            "dtype for both: remove the casts"
        )
    elif not others and not leads_elsewhere(fc1.node, fc2.node):
        yield (
            f"the first linear's outputs go through {', '.join(functions)} before the second linear, but "
            "LayerNormMLP has one activation, of all or half of them: no kernel supports others"
        )


def _of_factors(fc1: fx.Node, fc2: fx.Node) -> Iterator[str]:
    """Yield a remedy for each constant factor before or after the activation."""
    if len(fc1.users) == 1 and _is_multiple(next(iter(fc1.users))):
        yield (
            "the first linear's outputs are multiplied by a number before the activation, but LayerNormMLP "
            "has no factor: multiply the linear's stored weight and bias"
        )
    if _is_multiple(fc2.args[0]):
        yield (
            "the activation is multiplied by a number before the second linear, but LayerNormMLP has no "
            "factor: multiply the linear's stored weight"
        )


def _is_multiple(node: fx.Node) -> bool:
    """Return True if a node multiplies or divides a tensor by one number."""
    return node.target in (torch.mul, torch.div) and any(
        not is_tensor_node(factor) or numel_of(factor) == 1 for factor in node.args
    )


def _unknown(activation: str, known: Iterable[str], may_be_relu: bool = False) -> Iterator[str]:
    names = ", ".join(sorted(known))
    if may_be_relu:
        yield (
            f"the activation is {activation}, but LayerNormMLP has only {names}: call F.relu if it computes "
            "max(x, 0)"
        )
    else:
        yield f"the activation is {activation}, but LayerNormMLP has only {names}: no kernel supports others"


def _of_shapes(fc1: Operation, fc2: Operation, dropout: Operation | None) -> Iterator[str]:
    if dropout is not None:
        yield (
            f"a dropout of {dropout.p} precedes the second linear, but LayerNormMLP has no dropout there: "
            "set it to 0"
        )
    if (fc1.bias is None) != (fc2.bias is None):
        yield (
            "only one of the two linears has a bias, but LayerNormMLP has two biases or none: give the other "
            "linear a bias of zeros"
        )
    if fc1.weight.shape[1] != fc2.weight.shape[0]:
        yield (
            f"the MLP maps {fc1.weight.shape[1]} features to {fc2.weight.shape[0]}, but LayerNormMLP keeps "
            "the number of features: no kernel changes it"
        )


def build(
    backend,
    approximate: bool,
    norm: Operation,
    activation: Operation,
    gated: str,
    shared: tuple[str, ...],
    limit: float | None = None,
    offset: str = "none",
) -> nn.Module:
    """Return the fused op."""
    op = "gelu_tanh" if approximate and activation.op == "gelu" else activation.op
    name = _activations(backend, gated)[op] if limit is None else clamped(op, limit, offset == "one")
    return backend.LayerNormMLP(
        eps=norm.eps,
        normalization=layernorm_linear.NORMALIZATION[norm.op],
        activation=name,
        zero_centered_gamma=norm.zero_centered_gamma,
        gated=gated,
        returns_norm="norm" in shared,
    )


def _activations(backend, gated: str) -> dict[str, str]:
    return backend.ACTIVATIONS if gated == "no" else backend.GATED_ACTIVATIONS


def example() -> tuple[nn.Module, torch.Tensor]:
    """Return the MLP of a GPT-2 and its input."""
    mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU("tanh"), nn.Linear(64, 16))
    return mlp, torch.zeros(4, 16)


RULE = Rule(
    name="layernorm_mlp",
    pattern=Linear(_DROPPED_HIDDEN, role="fc2"),
    refuse=refuse,
    build=build,
    reads=("x", "norm.weight", "norm.bias", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"),
    shares=("norm",),
    example=example,
)
"""Saves the normalized tensor's round trip to memory and, in FP8, the activation's: the kernel that computes
the activation also quantizes it.

With approximate=True an exact GELU becomes the tanh GELU. The two differ by at most 4.8e-4 (at |x| = 2.7).
"""
