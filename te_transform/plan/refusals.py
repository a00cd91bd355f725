"""Why a match may not be rewritten, whatever the rule: said once, here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends.quantized import Quantized
from te_transform.graph.nodes import (
    called,
    dtype_name,
    is_parameter,
    may_be_view,
    name_in_model,
    same_shape,
    value,
)
from te_transform.graph.pattern import Match
from te_transform.plan.rule import Operation, Rule

WEIGHTED = ("linear", "layer_norm", "rms_norm")


def refusals(match: Match, operations: list[Operation], skip: tuple[str, ...], rule: Rule) -> Iterator[str]:
    """Every generic reason, as a clause of what the model has, a comma, and one of what is needed."""
    weighted = [operation for operation in operations if operation.op in WEIGHTED]
    for operation in operations:
        yield from _skipped(operation, skip)
    for operation in weighted:
        for name in ("weight", "bias"):
            yield from _of_weight(operation, name)
    yield from _mixed(weighted)
    yield from _read_elsewhere(match, rule)
    yield from cut(match.nodes)


def _skipped(operation: Operation, skip: tuple[str, ...]) -> Iterator[str]:
    for glob in skip:
        parts = operation.path.split(".")
        if any(fnmatchcase(".".join(parts[:depth]), glob) for depth in range(1, len(parts) + 1)):
            yield f"the module is skipped by skip={glob!r}, leave it out of skip= to have it fused"


def _of_weight(operation: Operation, name: str) -> Iterator[str]:
    try:
        sources = operation.sources(name)
    except AttributeError:  # an RMSNorm has no bias
        return
    what = f"the {operation.op}'s {name}"
    is_matrix = operation.op == "linear" and name == "weight"  # kernels take any vector, computed or not
    if operation.op == "linear" and name == "bias" and sources:
        rows = operation.weight.shape[:1]
        if not same_shape(operation.bias.shape, rows):
            yield f"{what} is {list(operation.bias.shape)}, one number for each of {rows[0]} rows is needed"
    for source in sources:
        held = value(source)
        if is_matrix and (whole := _viewed(source)) is not None:
            yield f"{what} is a view of the parameter {name_in_model(whole)}, one of its own is needed"
        elif is_matrix and (not isinstance(source, fx.Node) or source.op != "placeholder"):
            yield f"{what} is computed at every call, a parameter is needed"
        elif is_matrix and not is_parameter(source):
            yield f"{what} is a buffer, a constant or an input, a parameter is needed"
        elif is_traceable_wrapper_subclass(held) and not isinstance(held, Quantized):
            yield f"{what} is a {type(held).__name__}, a plain tensor is needed"
        elif not held.is_floating_point():
            yield f"{what} is {dtype_name(held.dtype)}, a floating point parameter is needed"


def _viewed(weight: Any) -> fx.Node | None:
    """The parameter that a weight is rows or another shape of; None where it is one itself, or computed."""
    whole = weight
    while isinstance(whole, fx.Node) and may_be_view(whole) and len(whole.all_input_nodes) == 1:
        whole = whole.args[0]  # an index that is a tensor makes a copy, and so does a cast
    is_whole = whole is weight or not is_parameter(whole)
    return None if is_whole or value(whole).dtype != value(weight).dtype else whole


def _mixed(operations: list[Operation]) -> Iterator[str]:
    weights = [(op.op, op.weight) for op in operations if isinstance(op.weight, Tensor)]
    if len({weight.dtype for _, weight in weights}) > 1:
        found = ", ".join(dict.fromkeys(f"{op} {dtype_name(weight.dtype)}" for op, weight in weights))
        yield f"the parameters are of several dtypes ({found}), a fused module has one"


def shared(match: Match, rule: Rule) -> tuple[str, ...]:
    """Those of the operations that the rule shares which somebody else reads."""
    own = set(match.nodes)
    found = {name: match.bound[name] for name in rule.shares if match.bound.get(name) in own}
    return tuple(name for name, node in found.items() if node.users.keys() - own)


def _read_elsewhere(match: Match, rule: Rule) -> Iterator[str]:
    own, bound = set(match.nodes), match.bound
    handed_out, sharing = ({bound.get(role) for role in names} for names in (rule.hands_out, rule.shares))
    for node in () if any(isinstance(found, tuple) for found in bound.values()) else match.nodes[1:]:
        others = [user for user in node.users if user not in own]
        if node in handed_out:
            others = [user for user in others if user.op != "output"]
        if node in sharing:  # what the fused op returns is there when all of the match has been computed
            others = [user for user in others if user < match.root]
        readers = sorted(map(reader, others))
        if readers:
            yield (
                f"the output of the {called(node)} is also read by {', '.join(readers)}, the fused module "
                "does not hand it out"
            )


def reader(user: fx.Node) -> str:
    """What reads a value, in words."""
    return "the model's output" if user.op == "output" else called(user)


def cut(operations: Iterable[fx.Node]) -> Iterator[str]:
    """The reason why operations that lie in several regions may not run as one."""
    if len({node.meta.get("region") for node in operations}) > 1:
        yield (
            "the model writes to a tensor, or changes the gradient mode or autocast, between these "
            "operations, the fused module runs all of them at once"
        )
