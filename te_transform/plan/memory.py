"""What a training step of a converted model takes beside its weights, predicted from the plan.

The plan's graph is gone through once forward, noting what each operation keeps for its backward, and once
back, letting go of that, adding up gradients, and counting what each backward needs for itself. What TE's
modules keep is read off their autograd functions (TE 2.20): the norm's output, both halves of a gated
fc1, the activation, in FP8 at one byte a number, and an FP8 weight twice, as it is and transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from te_transform import vocabulary
from te_transform.plan import Plan, Site
from te_transform.precision import PrecisionPlan

_VIEWS = {
    torch.reshape, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.chunk, torch.split,
    torch.unbind, vocabulary.columns,
}  # fmt: skip
_LINEAR = {torch.add, torch.sub, torch.neg, torch.cat, vocabulary.cast, vocabulary.rope}  # keep no operand


@dataclass(frozen=True)
class Memory:
    """Bytes of a step forward and backward, in training mode, at the sizes of the example inputs.

    `kept` is what autograd holds at the end of the forward, `peak` the most there is at any time beside
    the weights, gradients with it. Allocators take a little more.
    """

    inputs: str
    weights: int
    gradients: int
    kept: int
    peak: int

    def __str__(self) -> str:
        weights, gradients, kept, peak = (
            f"{size / 2**20:,.0f} MiB" for size in (self.weights, self.gradients, self.kept, self.peak)
        )
        return (
            f"{peak} at the most beside {weights} of weights: {kept} kept for the backward, {gradients} of "
            f"gradients ({self.inputs})"
        )


@dataclass(eq=False)
class _Step:
    """One operation: what it keeps, by storage or as its own, and what its backward takes for itself."""

    node: fx.Node
    storages: list[fx.Node] = field(default_factory=list)
    own: int = 0
    transient: int = 0
    gradients: int = 0  # of its weights
    in_place: bool = False  # whether its backward writes into what it kept


def predict(made: Plan, precision: PrecisionPlan | None, fused_loss: bool) -> Memory:
    """The memory of a step.

    Args:
        made: the plan; its recording may be of fake tensors.
        precision: what runs in FP8, None where nothing does.
        fused_loss: whether the loss is computed by TE, from the logits as they are.
    """
    inside = set() if precision is None else {path for path, why in precision.sites.items() if why is None}
    trained = _trained(made)
    recipe = None if precision is None else precision.recipe
    delayed = recipe == "fp8-delayed" or type(recipe).__name__ == "DelayedScaling"
    nodes = [node for node in made.recording.graph.nodes if node in trained]
    steps = [_step(node, made, inside, delayed, fused_loss) for node in nodes]
    parameters = {id(p): p for p in made.recording.root.parameters()}.values()
    weights = sum(map(_size, parameters))
    gradients = sum(_size(p) for p in parameters if p.requires_grad)
    outputs = {_storage(n) for n in made.recording.graph.output_node().all_input_nodes}
    kept, peak = _simulated(steps, outputs, gradients)
    return Memory(str(made.recording.inputs), weights, gradients, kept, peak)


def _simulated(steps: list[_Step], outputs: set[fx.Node], gradients: int) -> tuple[int, int]:
    """What is kept after the forward, and the most there is at once."""
    first: dict[fx.Node, int] = {}  # the operation whose backward is the last to need a storage
    for index, step in enumerate(steps):
        for storage in step.storages:
            first.setdefault(storage, index)
    storages = {s for s in first.keys() | outputs if s.op != "placeholder"}  # the inputs were there before
    held = sum(map(_bytes, storages)) + sum(step.own for step in steps)
    kept = peak = held
    owed = gradients - sum(step.gradients for step in steps)  # of parameters outside of fused modules
    grown = 0
    for index, step in reversed(list(enumerate(steps))):
        grown += step.gradients
        inputs = {_storage(n) for n in step.node.all_input_nodes if _is_data(n)}
        flowing = 0 if step.in_place else _bytes(step.node) + sum(map(_bytes, inputs))
        peak = max(peak, held + grown + step.transient + flowing)
        released = [s for s in storages - outputs if first[s] == index]
        held -= step.own + sum(map(_bytes, released))
    return kept, max(peak, grown + owed + held)


def _step(node: fx.Node, made: Plan, inside: set[str], delayed: bool, fused_loss: bool) -> _Step:
    data = [_storage(n) for n in node.all_input_nodes if _is_data(n)]
    if node.op == "call_module" and node.target in made.sites:
        site = made.sites[node.target]
        return _of_site(node, site, data, site.host in inside, delayed)
    if node.target is F.cross_entropy:
        return _of_loss(node, fused_loss)
    if fused_loss and any(user.target is F.cross_entropy for user in _readers(node)):
        return _Step(node, in_place=True)  # the cast of the logits, which is not made
    if _is_view(node):
        return _Step(node, in_place=True)
    if node.target in _LINEAR or node.op == "placeholder":
        return _Step(node)
    if node.target in (vocabulary.rms_norm, vocabulary.layer_norm):
        written_out = len(node.meta.get("spelled", ())) > 1
        if written_out:  # x in fp32, and the result before the scale
            return _Step(node, own=_numel(node) * 4 + _bytes(node), transient=2 * _numel(node) * 4)
        return _Step(node, data)
    if node.target is vocabulary.dropout:
        return _Step(node, own=_numel(node))
    return _Step(node, data)


def _of_site(node: fx.Node, site: Site, data: list[fx.Node], in_fp8: bool, delayed: bool) -> _Step:
    """What a fused module keeps and takes; its input is kept by whoever made it, but for one in FP8."""
    parameters = dict(site.fused.named_parameters())
    weights = [p for p in parameters.values() if p.dim() == 2]
    if not weights:
        return _of_attention(node, data, site.rotary is not None)
    outs, ins = weights[0].shape
    rows, size = _numel(node) // node.meta["tensor_meta"].shape[-1], weights[0].element_size()
    step = _Step(node, data, gradients=sum(_size(p) for p in parameters.values() if p.requires_grad))
    step.own = 2 * sum(p.numel() for p in weights) if in_fp8 else 0
    step.transient = 2 * rows * outs if in_fp8 else 0  # the output's gradient, as it is and transposed
    each = 1 if in_fp8 else size
    if "layer_norm_weight" in parameters:
        step.own += rows * (ins * each + 8)
    elif in_fp8:
        step.own, step.storages = step.own + rows * ins, []
    if len(weights) == 2:
        _add_mlp(step, rows, outs, weights[1].shape[1], each, delayed)
    return step


def _of_attention(node: fx.Node, data: list[fx.Node], rotated: bool) -> _Step:
    """What it got and gave, a number a row; the queries' gradients are summed up in fp32."""
    query, key, value = node.args[:3]
    own, product = _numel(node) // 32, _storage(value)
    # where rotations leave nothing but the values of a joined product, dispatch.py keeps them alone
    if rotated and product not in (_storage(query), _storage(key)) and _bytes(product) > _bytes(value):
        own, data = own + _bytes(value), [storage for storage in data if storage is not product]
    return _Step(node, [*data, node], own, transient=_numel(node) * 4)


def _add_mlp(step: _Step, rows: int, outs: int, inner: int, each: int, delayed: bool) -> None:
    """An MLP's second half: fc1's output and the activation.

    The most is where the activation's gradient is computed: fc2's own is there; the activation itself,
    and what the first product will make, are not.
    """
    node, size = step.node, step.node.meta["tensor_meta"].dtype.itemsize
    width = node.meta["tensor_meta"].shape[-1]
    casts = 0 if delayed else step.transient
    step.own += rows * (outs * size + inner * each)
    step.transient = rows * (outs + inner) * size - rows * inner * each + casts
    step.transient += 2 * _numel(node) if each == 1 else 0
    step.transient -= width * outs * size + sum(map(_bytes, step.storages))


def _of_loss(node: fx.Node, fused_loss: bool) -> _Step:
    logits = node.args[0]
    if fused_loss:
        return _Step(node, own=_numel(logits) * 2, in_place=True)  # a copy, which becomes the gradient
    return _Step(node, own=_numel(logits) * 4, transient=_numel(logits) * 4)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if user.target in _VIEWS:
            yield from _readers(user)


def _storage(node: fx.Node) -> fx.Node:
    """The node that allocated what this one is a view of."""
    while _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    views = node.target in _VIEWS or getattr(node.target, "__name__", "") == "getitem"
    return views and bool(node.args) and isinstance(node.args[0], fx.Node)


def _trained(made: Plan) -> set[fx.Node]:
    """The nodes that a gradient flows through, and not views of others."""
    found: set[fx.Node] = set()
    for node in made.recording.graph.nodes:
        tensor = made.recording.attributes.get(node.target) if node.op == "get_attr" else None
        starts = (tensor is not None and tensor.requires_grad) or node.op == "call_module"
        if starts or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return {node for node in found if node.op not in ("get_attr", "output")}


def _is_data(node: fx.Node) -> bool:
    meta = node.meta.get("tensor_meta")
    floating = meta is not None and hasattr(meta, "dtype") and meta.dtype.is_floating_point
    return floating and node.op != "get_attr"


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numel(node: fx.Node) -> int:
    return torch.Size(node.meta["tensor_meta"].shape).numel() if _is_tensor(node) else 0


def _bytes(node: fx.Node) -> int:
    return _numel(node) * node.meta["tensor_meta"].dtype.itemsize if _is_tensor(node) else 0


def _is_tensor(node: Any) -> bool:
    return hasattr(node.meta.get("tensor_meta"), "shape")
