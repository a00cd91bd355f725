"""The reasons to refuse a match that apply to every rule."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends.fp8.fp8_only import FP8Only
from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    dtype_name,
    is_model_tensor,
    is_parameter,
    is_tensor_node,
    may_be_view,
    path_below,
    reached,
    same_shape,
    value,
)
from te_transform.graph.pattern import Match, Miss, Pattern, Siblings
from te_transform.plan.options import skipped_by
from te_transform.plan.rule import Operation, Rule, reshaped

_LAYER_NUMBER = r"_\d+(?=_|$)"  # the layer number in the name of an input, such as a cache
WEIGHTED = tuple(op.__name__ for op in (ops.linear, *ops.NORMS))


def refusals(
    match: Match, operations: list[Operation], skip: tuple[str, ...], modules: tuple[str, ...], rule: Rule
) -> Iterator[str]:
    """Yield every generic reason: what the model has, but what kernels need: what to change."""
    weighted = [operation for operation in operations if operation.op in WEIGHTED]
    for operation in operations:
        yield from _skipped(operation, skip, modules)
    for operation in weighted:
        for name in ("weight", "bias"):
            yield from _of_weight(operation, name)
    yield from _mixed(weighted)
    yield from _read_elsewhere(match, rule)
    yield from _written_later(match)
    yield from cut(match.nodes)


def _skipped(operation: Operation, skip: tuple[str, ...], modules: tuple[str, ...]) -> Iterator[str]:
    """Yield a reason if `skip` names one of the modules that share the graph: none of them is fused then."""
    globs = [skipped_by(path_below(module, operation.path), skip) for module in modules]
    if glob := next(filter(None, globs), None):
        what = "the module" if all(globs) else "a module that shares its captured graph"
        yield f"{what} is skipped by skip={glob!r}: leave it out of skip= to have it fused"


def _of_weight(operation: Operation, name: str) -> Iterator[str]:
    try:
        sources = operation.sources(name)
    except AttributeError:  # an RMSNorm has no bias
        return
    what = f"the {operation.op}'s {name}"
    is_matrix = operation.op == "linear" and name == "weight"  # kernels accept any vector, even computed
    if operation.op == "linear" and name == "bias" and sources:
        rows = operation.weight.shape[:1]
        if not same_shape(operation.bias.shape, rows):
            yield (
                f"{what} is {list(operation.bias.shape)}, but kernels need one element per row ({rows[0]}): "
                "add it after the product"
            )
    for source in sources:
        yield from _of_source(what, source, is_matrix)


def _of_source(what: str, source: Any, is_matrix: bool) -> Iterator[str]:
    """Yield the reason why a kernel cannot read a tensor as a weight or as a vector."""
    tensor = value(source)
    if is_matrix and (whole := _base_parameter(source)) is not None:
        yield (
            f"{what} {list(tensor.shape)} is a view of a parameter {list(value(whole).shape)}, but kernels "
            "need a whole parameter: store it as a parameter of its own"
        )
    elif is_matrix and _is_cast(source):
        dtype = dtype_name(tensor.dtype)
        yield f"{what} is cast to {dtype} at every call, but kernels need a parameter: store it in {dtype}"
    elif is_matrix and (not isinstance(source, fx.Node) or source.op != "placeholder"):
        yield (
            f"{what} is computed at every call, but kernels need a parameter: compute it once and store it, "
            "if you can retrain"
        )
    elif is_matrix and not is_parameter(source):
        kind = "a buffer" if is_model_tensor(source) else "an input or a constant"
        yield (
            f"{what} is {kind}, but kernels need a parameter: store it as an nn.Parameter, with "
            "requires_grad=False if it is not trained"
        )
    elif is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, FP8Only):
        yield (
            f"{what} is a {type(tensor).__name__}, but kernels need a plain tensor: load plain tensors "
            "instead"
        )
    elif not tensor.is_floating_point():
        yield (
            f"{what} is {dtype_name(tensor.dtype)}, but kernels need a floating-point parameter: no kernel "
            "supports another dtype"
        )


def _is_cast(weight: Any) -> bool:
    """Return True if a weight is a parameter cast to another dtype, reshaped or not."""
    while isinstance(weight, fx.Node) and weight.target in (torch.reshape, torch.t):
        weight = weight.args[0]
    return (
        isinstance(weight, fx.Node) and weight.target is ops.cast and is_parameter(reshaped(weight.args[0]))
    )


def _base_parameter(weight: Any) -> fx.Node | None:
    """Return the parameter that a weight is a view of; None if it is a whole parameter, or computed."""
    whole = weight
    while isinstance(whole, fx.Node) and may_be_view(whole) and len(whole.all_input_nodes) == 1:
        whole = whole.args[0]  # indexing by a tensor makes a copy, as does a cast
    is_whole = whole is weight or not is_parameter(whole)
    return None if is_whole or value(whole).dtype != value(weight).dtype else whole


def _mixed(operations: list[Operation]) -> Iterator[str]:
    weights = [(op.op, op.weight) for op in operations if isinstance(op.weight, Tensor)]
    if len({weight.dtype for _, weight in weights}) > 1:
        dtypes = ", ".join(dict.fromkeys(f"{op} {dtype_name(weight.dtype)}" for op, weight in weights))
        yield (
            f"the parameters have several dtypes ({dtypes}), but a fused module needs one dtype: store them "
            "in one, as model.to(torch.bfloat16) does"
        )


def shared(match: Match, rule: Rule) -> tuple[str, ...]:
    """Return the roles in the rule's `shares` whose values are also read outside the match."""
    own = set(match.nodes)
    nodes = {name: match.bound[name] for name in rule.shares if match.bound.get(name) in own}
    return tuple(name for name, node in nodes.items() if node.users.keys() - own)


def _read_elsewhere(match: Match, rule: Rule) -> Iterator[str]:
    own, bound = set(match.nodes), match.bound
    inputs = (read for node in own for read in node.all_input_nodes if read not in own)
    last = max(inputs, default=match.root)
    handed_out, sharing = ({bound.get(role) for role in names} for names in (rule.hands_out, rule.shares))
    for node in () if isinstance(rule.pattern, Siblings) else match.nodes[1:]:
        others = [user for user in node.users if user not in own]
        if node in handed_out:
            others = [user for user in others if user.op != "output"]
        read = readers(others)
        if node in sharing:
            yield from _of_shared(node, others, last)
        elif read and node.target is ops.linear and all(user.target is ops.columns for user in others):
            yield from _shared_columns(node)
        elif read:
            yield (
                f"the output of the {called(node)} is also read by {', '.join(read)}, but the fused module "
                "does not return it: let nothing else read it, if the math allows"
            )


def _of_shared(node: fx.Node, others: list[fx.Node], last: fx.Node) -> Iterator[str]:
    """Yield why the fused op cannot return a value to other readers, once its `last` input exists."""
    if node.meta.get("written") and others:
        yield (
            f"the output of the {called(node)} is written in place, but autograd cannot notice a write in "
            "the fused module: write to a new tensor instead"
        )
    elif any(called(user) == "register_hook" for user in others):
        yield (
            f"the output of the {called(node)} has a hook, but the fused module does not compute the whole "
            "gradient of this output: remove the hook"
        )
    elif read := readers(user for user in others if user <= last):
        yield (
            f"the output of the {called(node)} is also read by {', '.join(read)} before the other inputs "
            "exist, but the fused module needs them all: move that read after the linear"
        )


def _written_later(match: Match) -> Iterator[str]:
    """Yield the reason if an input is written in place after the match, and autograd records the match.

    The model may have saved a cast of the input for its backward. A fused op saves the input itself.
    """
    own = set(match.nodes)
    read = (node for inside in own for node in inside.all_input_nodes if node not in own)
    inputs = reached(read, lambda node: () if "origin" in node.meta else node.all_input_nodes)
    floats = [node for node in inputs if is_tensor_node(node) and value(node).is_floating_point()]
    is_recorded = any(value(node).requires_grad for node in floats)
    writes = [node.meta["written"] for node in floats if "written" in node.meta]
    last = max((abs(write.meta["region"]) for write in writes), default=0)
    if torch.is_grad_enabled() and is_recorded and last > abs(match.root.meta["region"]):
        yield (
            "an input of these operations is written in place after them, but the fused module keeps it for "
            "the backward: make a new tensor there, as h = h + y does"
        )


def readers(users: Iterable[fx.Node]) -> list[str]:
    """Return the names of the operations that read a value; views are replaced by their readers."""
    names: set[str] = set()
    for user in users:
        if may_be_view(user) and user.users:
            names.update(readers(user.users))
        else:
            names.add("the model's output" if user.op == "output" else user.meta.get("fused", called(user)))
    return sorted(names)


def missed(miss: Miss) -> Iterator[str]:
    """Yield why a near miss does not match the rule.

    Yield nothing if the miss is a linear that was merged with others, such as attention's output gate, which
    is merged with the queries. Yield nothing if no first linear exists, as after DynamicTanh: its scaled tanh
    is not an activation between two linears. Yield nothing for an activation in place of a norm: it belongs
    to the linear before, as in the embedding of a diffusion model's time.
    """
    if miss.wanted.roots == {ops.linear} and not _has_first_linear(miss):
        return
    if miss.wanted.roots == {*ops.NORMS} and getattr(miss.value, "target", None) in ops.ACTIVATION_OPS:
        return
    reading = [node for node in miss.nodes if any(arg is miss.value for arg in node.args)]
    reads = (reading or miss.nodes)[-1]
    if taken := _fused_with(miss.value):
        yield (
            f"the {called(reads)} reads a norm that {taken} computes, but the rule computes the norm itself: "
            "give the two their own norms, if you can retrain"
        )
    elif reads.target is not ops.columns:
        yield (
            f"the {called(reads)} reads {_described(miss.value)}, but the rule has {_wanted(miss.wanted)} "
            "there: write it like that, if the math allows"
        )
    elif _is_linear_of_its_own(reads):
        yield from _shared_columns(reads)


def _fused_with(node: Any) -> str:
    """Return the name of the rule whose op returns the value beside its result, such as a norm, or ""."""
    is_item = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] != 0
    return node.args[0].meta.get("fused", "") if is_item else ""


def _has_first_linear(miss: Miss) -> bool:
    """Return True if a second linear matched, or the value found is computed elementwise from a linear."""
    if sum(node.target is ops.linear for node in miss.nodes) > 1:
        return True
    value = miss.value
    while isinstance(value, fx.Node) and value.target is not ops.linear:
        sources = [read for read in value.all_input_nodes if not is_model_tensor(read)]
        value = sources[0] if len(sources) == 1 else None
    return value is not None


def _shared_columns(product: fx.Node) -> Iterator[str]:
    """Yield the reason for an MLP whose first linear has columns that another operation reads."""
    if "merged" in product.meta:
        yield (
            "the first linear is merged with others of the same norm, but LayerNormMLP needs its own linear: "
            "give the MLP its own norm, if you can retrain"
        )
    else:
        yield (
            "the linear has columns beside a gate and its product, but LayerNormMLP needs only these: give "
            "the MLP its own linear and norm, if you can retrain"
        )


def _is_linear_of_its_own(product: fx.Node) -> bool:
    """Return True if columns come from a linear that was not merged with others."""
    while product.target is ops.columns:
        product = product.args[0]
    return product.target is ops.linear and is_model_tensor(product.args[1])


def _wanted(pattern: Pattern) -> str:
    """Return the text of a pattern; ops.columns is not a PyTorch function, and is described in words."""
    return "a part of a linear's columns" if ops.columns in pattern.roots else str(pattern)


def _described(operand: Any) -> str:
    if not isinstance(operand, fx.Node):
        return repr(operand)
    if operand.target is ops.columns:
        return "a part of a linear's columns"
    if is_model_tensor(operand):
        return f"a tensor of the model {list(value(operand).shape)}"
    return (
        f"the input {re.sub(_LAYER_NUMBER, '_*', operand.name)}"
        if operand.op == "placeholder"
        else called(operand)
    )


def cut(operations: Collection[fx.Node]) -> Iterator[str]:
    """Yield the reason why operations with a write or a mode change between them cannot run as one."""
    regions = {node.meta.get("region", 0) for node in operations}
    if len(regions) > 1:
        numbers = {abs(region) for region in regions}
        barriers = {*range(-max(numbers), -min(numbers)), *(region for region in regions if region < 0)}
        graph = next(iter(operations)).graph
        calls = (called(node).lstrip("_") for node in graph.nodes if node.meta.get("region", 0) in barriers)
        names = dict.fromkeys(calls) or ["an in-place operation"]  # whose result nothing reads
        yield (
            f"the model calls {', '.join(names)} between these operations (a write, or a change of mode), "
            "but the fused module is one call: move it before or after them"
        )


def rolled_back(reason: str) -> Iterator[str]:
    """Yield the reason in the report for a site that was undone after its check."""
    yield (
        f"rolled back: {reason}: fix the rule if it is your own, else report a bug; these operations run as "
        "captured"
    )
