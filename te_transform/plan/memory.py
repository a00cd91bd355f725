"""Predict from the plan how much memory a training step needs beside the weights.

A simulated forward over the canonical graph records what each operation saves for its backward. A simulated
backward frees the saved tensors, adds up gradients, and counts the temporaries of each operation.

The tensors that TE's modules save are taken from their autograd functions (TE 2.20). They are the norm's
output, both halves of a gated fc1, and the activation. FP8 tensors take one byte per element; an FP8 weight
is saved twice, as it is and transposed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import fx, nn

from te_transform.backends import plain
from te_transform.backends.chunked_loss import NUMBERS, ChunkedLoss
from te_transform.graph import ops
from te_transform.graph.nodes import (
    bytes_of,
    dtype_of,
    has_gradient,
    is_model_tensor,
    is_parameter,
    is_tensor_node,
    may_be_view,
    numel_of,
    shape_of,
    value,
)
from te_transform.plan.assign import product_paths, runs_in_recipe
from te_transform.plan.match import Plan, Site
from te_transform.plan.precision_plan import PrecisionPlan
from te_transform.plan.rule import stored_in

_EIGHTY_GIB = 80 * 2**30
_OPS_BY_CLASS = {
    "products": (plain.Linear, plain.LayerNormLinear),
    "attention": (plain.DotProductAttention,),
    "loss": (plain.CrossEntropy, ChunkedLoss),
}
_CALLED = {
    "products": {ops.linear, torch.matmul, torch.bmm},
    "attention": {ops.sdpa},
    "norms": {*ops.NORMS},
    "loss": {ops.cross_entropy},
}
_KEEP_NOTHING = {torch.add, torch.sub, torch.neg, torch.cat, ops.cast, ops.rope}


@dataclass(frozen=True)
class Memory:
    """The bytes of one forward and backward, in training mode, at the sizes of the example inputs.

    `kept` is the memory that autograd holds at the end of the forward. `peak` is the maximum at any time,
    including gradients and excluding weights. `optimizer` is the state of AdamW, two numbers per trained
    parameter element. `classes` divides `peak` by what the bytes hold: gradients, temporary tensors, and
    saved tensors by class of operations. Allocators need a little more.
    """

    inputs: str
    weights: int
    gradients: int
    kept: int
    peak: int
    classes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def optimizer(self) -> int:
        return 2 * self.gradients

    @property
    def total(self) -> int:
        return self.weights + self.peak + self.optimizer

    def __str__(self) -> str:
        weights, gradients, kept, peak = map(size_text, (self.weights, self.gradients, self.kept, self.peak))
        others, optimizer, total = map(size_text, (self.peak - self.gradients, self.optimizer, self.total))
        return (
            f"{peak} at the most beside {weights} of weights: {gradients} of gradients and {others} of "
            f"activations and buffers; {kept} are kept for the backward, before there are gradients; {total} "
            f"in all with weights and {optimizer} of AdamW's state ({self.inputs})"
        )


def size_text(size: float) -> str:
    """Format bytes in MiB, in GiB from 10 GiB on, the unit of GPU memory, and in KiB below 1 MiB."""
    if size < 2**20:
        return f"{size / 2**10:,.0f} KiB"
    if size < 10 * 2**20:
        return f"{size / 2**20:.1f} MiB"
    if size < 10 * 2**30:
        return f"{size / 2**20:,.0f} MiB"
    return f"{size / 2**30:,.1f} GiB"


def room(model: nn.Module, step: Memory | None) -> Iterator[str]:
    """Yield a sentence if the model does not fit one GPU: the machine's, or one of 80 GiB."""
    size, name = _EIGHTY_GIB, "a GPU of 80 GiB"
    if torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory
        name = f"this machine's GPU of {size_text(size)}"
    divide = "divide it among several, by te_transform.parallelize() or fully_shard()"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if weights > size:
        yield f"the model does not fit {name}, because its weights take {size_text(weights)}: {divide}"
    elif step is not None and model.training and step.total > size:
        taken = size_text(step.total)
        yield f"a training step with AdamW does not fit {name}, because it takes {taken}: {divide}"


@dataclass(eq=False)
class _Step:
    """One operation: the storages it saves, its own saved bytes, and the temporaries of its backward."""

    node: fx.Node
    storages: list[fx.Node] = field(default_factory=list)
    own: int = 0
    transient: int = 0
    gradients: int = 0  # of its weights
    in_place: bool = False  # True if the backward writes into the saved tensors
    released: int = 0  # bytes that can be freed after its backward
    kind: str = "elementwise"  # its class

    @property
    def flowing(self) -> int:
        """The bytes of the gradients of its result and inputs."""
        return (
            0
            if self.in_place
            else bytes_of(self.node) + sum(map(bytes_of, set(_floating_storages(self.node))))
        )


def predict(
    plans: Iterable[tuple[str, Plan]],
    parameters: Iterable[nn.Parameter],
    inputs: str,
    precision: PrecisionPlan | None,
) -> Memory:
    """Predict the memory of a training step.

    Args:
        plans: The plans of the captured graphs in call order, each with the path of the captured module.
        parameters: The parameters of the model; they may be fake tensors.
        inputs: A text that describes the example inputs.
        precision: The products that run in FP8, or None without a recipe.
    """
    parameters, pieces = list(parameters), list(plans)
    steps = [step for piece in pieces for step in _steps(*piece, precision, is_last=piece is pieces[-1])]
    outputs = sum(bytes_of(storage) for _, plan in pieces[-1:] for storage in _output_storages(plan))
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    weights = sum(parameter.nbytes for parameter in parameters)
    kept, classes = _simulated(steps, outputs, gradients)
    return Memory(inputs, weights, gradients, kept, classes.total(), dict(classes))


def kept_by_site(prefix: str, plan: Plan, precision: PrecisionPlan | None) -> dict[Site, int]:
    """Return the bytes that each site saves for its backward and that are freed after it; see predict()."""
    steps = {step.node: step for step in _steps(prefix, plan, precision, is_last=False)}
    return {site: steps[site.node].released for site in plan.sites if site.node in steps}


def _simulated(steps: list[_Step], outputs: int, gradients: int) -> tuple[int, Counter[str]]:
    """Return the bytes saved after the forward, and the peak by class; the caller keeps the outputs."""
    memory = Counter({"outputs": outputs})
    for step in steps:
        memory[step.kind] += step.released
    kept, grown, peak = memory.total(), 0, memory.copy()
    for step in reversed(steps):
        grown += step.gradients
        more = step.transient + step.flowing
        if memory.total() + grown + more > peak.total():
            peak = memory.copy()
            # fewer bytes than before: the backward has freed some of its own
            peak.update({"gradients": grown, "temporary" if more > 0 else step.kind: more})
        memory[step.kind] -= step.released
    if memory.total() + gradients > peak.total():
        peak = memory.copy()
        peak["gradients"] += gradients
    return kept, peak


def _steps(prefix: str, plan: Plan, precision: PrecisionPlan | None, is_last: bool) -> list[_Step]:
    """Return the operations that a gradient flows through, each with the bytes that its backward frees."""
    sites, paths = {site.node: site for site in plan.sites}, product_paths(plan)
    steps = []
    for node in _operations_with_gradient(plan.canonical):
        site = sites.get(node)
        in_fp8 = site in paths and runs_in_recipe(precision, prefix, paths[site])
        is_delayed = precision is not None and precision.is_delayed
        step = _of_operation(node) if site is None else _of_site(site, in_fp8, is_delayed)
        step.kind = _class(node, site)
        steps.append(step)
    needed: dict[fx.Node, int] = {}  # storage -> the operation whose backward needs it last
    for index, step in enumerate(steps):
        step.released = step.own
        for storage in step.storages:
            needed.setdefault(storage, index)
    # the next graph may need these for its backward
    outputs = dict.fromkeys(_output_storages(plan), len(steps) - 1) if steps else {}
    needed = {s: i for s, i in needed.items() if s not in outputs} if is_last else outputs | needed
    for storage, index in needed.items():
        if storage.op != "placeholder":  # the caller allocated the inputs
            steps[index].released += bytes_of(storage)
    return steps


def _class(node: fx.Node, site: Site | None) -> str:
    """Return the class of an operation, or of the fused op that replaces it."""
    fused = (
        kind for kind, ops_of in _OPS_BY_CLASS.items() if site is not None and isinstance(site.fused, ops_of)
    )
    named = (kind for kind, targets in _CALLED.items() if node.target in targets)
    return next(chain(fused, named), "elementwise")


def _output_storages(plan: Plan) -> set[fx.Node]:
    """Return the storages that the graph outputs."""
    (output,) = plan.canonical.find_nodes(op="output")
    return {storage for storage in _floating_storages(output) if storage.op != "placeholder"}


def _operations_with_gradient(graph: fx.Graph) -> list[fx.Node]:
    """Return the operations that a gradient flows through."""
    operations: dict[fx.Node, None] = {}
    for node in graph.nodes:
        starts = node.op == "placeholder" and has_gradient(node)
        if starts or any(source in operations for source in node.all_input_nodes):
            operations[node] = None
    return [node for node in operations if node.op not in ("placeholder", "output") and not _is_weight(node)]


def _of_operation(node: fx.Node) -> _Step:
    data = _floating_storages(node)
    if node.target is ops.cross_entropy:  # log-probabilities, their gradient, the gradient of the logits
        cast = numel_of(node.args[0]) * dtype_of(node).itemsize
        return _Step(node, own=cast, transient=2 * cast - bytes_of(node.args[0]))
    if _is_view(node):
        return _Step(node, in_place=True)
    if node.target in _KEEP_NOTHING:
        return _Step(node)
    if node.target in ops.NORMS:
        if len(node.meta.get("spelled", ())) > 1:  # a manual norm saves x in fp32 and the unscaled result
            return _Step(node, own=numel_of(node) * 4 + bytes_of(node), transient=2 * numel_of(node) * 4)
        return _Step(node, data)
    if node.target is ops.dropout:
        return _Step(node, own=numel_of(node))
    if node.target is ops.sdpa and "softmax" in node.meta.get("spelled", ()):
        query, key = node.args[:2]  # written out: saves the softmax, and its backward has two such gradients
        scores = numel_of(query) // shape_of(query)[-1] * shape_of(key)[-2] * dtype_of(node).itemsize
        return _Step(node, data, own=scores, transient=2 * scores)
    return _Step(node, data)


def _of_site(site: Site, in_fp8: bool, delayed: bool) -> _Step:
    """Return the memory of a fused op. Its input is counted as shared storage, except in FP8."""
    node, data = site.node, _floating_storages(site.node)
    if isinstance(site.fused, plain.DotProductAttention):
        return _of_attention(node, data)
    if isinstance(site.fused, plain.CrossEntropy):
        return _Step(node, data)
    if isinstance(site.fused, ChunkedLoss):
        return _of_chunked_loss(node, data)
    if (memory := site.fused.step_memory(*node.args)) is not None:
        return _Step(node, data, *memory)
    return _of_products(site, data, in_fp8, delayed) if site.weights else _Step(node)  # a rotation


def _of_products(site: Site, data: list[fx.Node], in_fp8: bool, delayed: bool) -> _Step:
    """Return the memory of a linear, or of an MLP, with or without a norm."""
    node, result = site.node, site.result
    weights = [value(node.args[position]) for position in site.fused.PRODUCTS]
    parameters = {p for argument in node.args for p in stored_in(argument) if is_parameter(p)}
    outs, ins = weights[0].shape
    rows, each = numel_of(result) // (shape_of(result)[-1] or 1), 1 if in_fp8 else weights[0].element_size()
    step = _Step(node, data, gradients=sum(bytes_of(p) for p in parameters if value(p).requires_grad))
    if isinstance(site.fused, plain.LayerNormLinear):
        step.own = rows * (ins * each + 8)
    elif in_fp8:
        step.own, step.storages = rows * ins, []
    if in_fp8:
        step.own += 2 * sum(weight.numel() for weight in weights)
        step.transient = 2 * rows * outs  # the gradient of the output, plain and transposed
    if len(weights) == 2:
        _add_mlp(step, rows, outs, weights[1].shape[1], each, delayed)
    return step


def _of_chunked_loss(node: fx.Node, data: list[fx.Node]) -> _Step:
    """Return the memory of a chunked loss.

    It needs one chunk of the logits, overwritten by their gradient, and the input's gradient in fp32.
    """
    x, weight = node.args[:2]
    part = min(NUMBERS, numel_of(x) // shape_of(x)[-1] * shape_of(weight)[0])
    transient = part * dtype_of(x).itemsize + 4 * numel_of(x)
    return _Step(node, data, transient=transient, gradients=bytes_of(weight))


def _of_attention(node: fx.Node, data: list[fx.Node]) -> _Step:
    """Return the memory of attention.

    It saves inputs, output, and one number per row. The gradient of the queries is accumulated in fp32.
    """
    query, key, values = node.args[:3]
    own, product = numel_of(node) // 32, _storage(values)
    # if rotations copied queries and keys, only the values of the joined product are saved, as a copy
    if product not in (_storage(query), _storage(key)) and bytes_of(product) > bytes_of(values):
        own, data = own + bytes_of(values), [storage for storage in data if storage is not product]
    return _Step(node, [*data, node], own, transient=numel_of(node) * 4)


def _add_mlp(step: _Step, rows: int, outs: int, inner: int, each: int, delayed: bool) -> None:
    """Add the second half of an MLP: fc1's output and the activation.

    Memory peaks while the gradient of the activation is computed. The gradient of fc2 exists by then; the
    activation is freed already, and the first product has allocated nothing yet.
    """
    x = step.node.args[0]  # as many elements as the result
    size = dtype_of(x).itemsize
    casts = 0 if delayed else step.transient
    step.own += rows * (outs * size + inner * each)
    step.transient = rows * (outs + inner) * size - rows * inner * each + casts
    step.transient += 2 * numel_of(x) if each == 1 else 0
    step.transient -= shape_of(x)[-1] * outs * size + sum(map(bytes_of, step.storages))


def _floating_storages(node: fx.Node) -> list[fx.Node]:
    """Return the storages of the floating-point inputs of the node, without parameters and buffers."""
    read = [n for n in node.all_input_nodes if is_tensor_node(n) and dtype_of(n).is_floating_point]
    return [_storage(n) for n in read if not _is_weight(n)]


def _is_weight(node: fx.Node) -> bool:
    """Return True if the node is a parameter or buffer, or several joined."""
    return all(map(is_model_tensor, stored_in(node)))


def _storage(node: fx.Node) -> fx.Node:
    """Return the node that allocated the memory of this node."""
    while _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    """Return True for a view of another tensor; items of a fused op's tuple are not views."""
    return may_be_view(node) and isinstance(node.args[0], fx.Node) and is_tensor_node(node.args[0])
