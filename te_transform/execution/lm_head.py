"""The head of a language model and its loss, outside of CUDA graphs and of compiled pieces.

Outputs of CUDA graphs are copied, because the next replay overwrites them. A copy of large logits takes
longer than the CPU needs to launch the head and its loss while the GPU computes the layers. Under DDP, the
gradient of the head is reduced first.

Logits next to a loss are compiled without a gradient. A compiled backward needs a gradient of each output,
and zeros of the size of the logits would be written and added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.convert_frame import compile_lock

from te_transform.backends import plain
from te_transform.backends.fp8.products import ProductState
from te_transform.execution.partition import as_leaf
from te_transform.execution.rerun import autocast_now, call_on_views, gradients_of, trained_among
from te_transform.graph import edit
from te_transform.graph.effects import changes_tensors
from te_transform.graph.nodes import (
    bytes_of,
    changes_state,
    computed_from,
    is_model_tensor,
    is_random,
    numel_of,
    reached,
    returned,
    shape_of,
    storages,
    users_of,
    value,
)

MIN_COLUMNS = 4096  # a linear with fewer columns is not a head
# Logits of fewer bytes are copied, which takes at most 0.09 ms (H100). A separate launch of the head takes
# 0.05 to 0.2 ms of CPU time in a forward, and 0.4 to 0.9 ms in a backward. The GPU hides this time in a
# forward with more work than PACED (rows times weight elements, a third of a millisecond).
COPIED, PACED = 2**27, 10**11

CompileHead = Callable[[fx.GraphModule, list[Any]], Callable[..., Any] | None]


class Head:
    """The last operations of a graph: linears with many columns, and their readers.

    Attributes:
        rest: the graph without these operations.

    Args:
        graph: the whole graph.
        nodes: the operations of the head, in order.
        reads: the other nodes that the head reads.
        compile: compiles a graph for given arguments, or returns None on failure; None to run uncompiled.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        nodes: Sequence[fx.Node],
        reads: Sequence[fx.Node],
        compile: CompileHead | None,
    ):
        self.outputs, inside = returned(graph.graph), set(nodes)
        tensors = dict.fromkeys(node for node in self.outputs if isinstance(node, fx.Node))
        self.own = [node for node in tensors if node in inside]
        self.passed = [*dict.fromkeys([*reads, *(node for node in tensors if node not in inside)])]
        self.module, self.inputs = edit.cut_out(graph, nodes, self.own)
        self.rest = edit.without(graph, nodes, self.passed)
        placeholders = graph.graph.find_nodes(op="placeholder")
        self.arguments = {node: placeholders.index(node) for node in self.inputs if node.op == "placeholder"}
        self.compile = compile
        self.run: Callable[..., Sequence[Any]] | None = None if compile else self.module.forward
        self.logits = None if compile is None else _beside_a_loss(self.own, reads)

    def __call__(self, rest: Callable[..., Sequence[Any]], *arguments: Any) -> list[Any]:
        """Return the outputs of the whole graph. The function `rest` computes the other operations."""
        values = {node: arguments[index] for node, index in self.arguments.items()}
        values.update(zip(self.passed, rest(*arguments), strict=True))
        given = [values[node] for node in self.inputs]
        run = self.run or self._compiled([*map(as_leaf, given)])
        values.update(zip(self.own, run(*given), strict=True))
        return [values[node] if isinstance(node, fx.Node) else node for node in self.outputs]

    def compile_with_gradient(self) -> None:
        """Compile the logits with their gradient from the next call."""
        with compile_lock:
            if self.logits is not None:  # another backward may have
                self.run = self.logits = None

    def in_high_precision(self) -> fx.GraphModule:
        """Return the operations of the head without FP8. To repeat them in FP8 would change their scales."""
        return edit.with_keyword(self.module, "state", lambda _: None)

    def _compiled(self, given: list[Any]) -> Callable[..., Sequence[Any]]:
        with compile_lock:
            if self.run is None:  # another thread may have
                module, index = edit.with_keyword(self.module, "state", _without_transpose), self.logits
                if index is not None:
                    module = edit.passed_through(module, index, torch.detach)
                run = self.compile(module, given)
                if run is None:
                    self.run = self.module.forward
                else:
                    self.run = run if index is None else partial(self._run_without_gradient, run, index)
            return self.run

    def _run_without_gradient(self, run: Callable[..., Sequence[Any]], index: int, *given: Any) -> list[Any]:
        """Return the outputs of a function, with a lazy gradient for the output at `index`."""
        outputs, trained = [*run(*given)], trained_among(given)
        # nothing is written, so tensors that the function saved stay valid
        with torch.autograd._unsafe_preserve_version_counter(outputs[index]):
            tensors = [given[number] for number in trained]
            outputs[index] = _Logits.apply(outputs[index], self, index, given, trained, *tensors)
        return outputs


def _without_transpose(state: ProductState) -> ProductState:
    """Quantize the head's weight again in the backward: beside its logits, a step needs most memory."""
    return state._replace(weight_again=True)


def with_head(rest: Callable[..., Sequence[Any]], head: Head | None) -> Callable[..., Sequence[Any]]:
    """Return the function of the whole graph. The function `rest` computes all operations but the head's."""
    return rest if head is None else partial(head, rest)


class _Logits(torch.autograd.Function):
    """Logits without a gradient. If a gradient arrives, the head runs again to propagate it."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        head: Head,
        index: int,
        given: Sequence[Any],
        trained: Sequence[int],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.mark_dirty(logits)  # otherwise the logits would be a view, and in-place writes would raise
        ctx.save_for_backward(*(each for each in given if isinstance(each, Tensor)))
        ctx.others = [None if isinstance(each, Tensor) else each for each in given]
        ctx.head, ctx.index, ctx.trained = head, index, trained
        ctx.autocast = autocast_now(logits.device.type)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        saved, recorded = iter(ctx.saved_tensors), torch.is_grad_enabled()
        given = [next(saved) if each is None else each for each in ctx.others]
        ctx.head.compile_with_gradient()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            outputs, views = call_on_views(ctx.head.in_high_precision().forward, given, ctx.trained)
        gradients = gradients_of([outputs[ctx.index]], views, [grad], create_graph=recorded)
        return None, None, None, None, None, *gradients


def _beside_a_loss(outputs: Sequence[fx.Node], reads: Sequence[fx.Node]) -> int | None:
    """Return the index of logits next to a loss, or None.

    Logits are the only output that is larger than the inputs of the head, with memory of their own.
    """
    large = [index for index, node in enumerate(outputs) if numel_of(node) > max(map(numel_of, reads))]
    trained = [index for index, node in enumerate(outputs) if value(node).requires_grad]
    apart = len({*storages(outputs)}) == len(outputs)
    return large[0] if apart and len(large) == 1 and len(trained) > 1 and large[0] in trained else None


def head_of(graph: fx.GraphModule, compile: CompileHead | None, *, recorded: bool) -> Head | None:
    """Return the head of a graph in the current grad mode, or None if no head may run last.

    Args:
        graph: of operations and fused ops.
        compile: compiles the readers of the logits, see Head; None allows only heads without readers.
        recorded: True if the other operations run as a CUDA graph. Such a graph must not return memory of an
            argument. Its head is not trained in FP8, because TE updates its scales in the backward of the
            first module of a step, which would be the head.
    """
    heads = [node for node in graph.graph.nodes if _is_head(graph, node, recorded)]
    if not heads:
        return None
    reads = [*dict.fromkeys(head.args[0] for head in heads)]
    nodes = _head_operations(graph, heads, reads)
    if nodes is None or any(map(is_random, nodes)):
        return None
    given = set(storages(graph.graph.find_nodes(op="placeholder")))
    if recorded and given.intersection(storages(reads)):
        return None
    # The head runs last, so no later operation may write or change the mode.
    if any(node >= nodes[0] and (changes_tensors(node) or changes_state(node)) for node in graph.graph.nodes):
        return None
    if _are_copied(graph, heads):
        return None
    if nodes == heads:
        return Head(graph, nodes, reads, None)
    return None if compile is None else Head(graph, nodes, reads, compile)


def _are_copied(graph: fx.GraphModule, heads: Sequence[fx.Node]) -> bool:
    """Return True if the logits are small enough to stay in the graph and be copied."""
    few = sum(map(bytes_of, heads)) < COPIED
    return few and (torch.is_grad_enabled() or _work(graph, heads[0]) < PACED)


def _work(graph: fx.GraphModule, head: fx.Node) -> int:
    """Return the rows of the head's input times all weight elements, about half of the FLOPs."""
    weights, x = filter(is_model_tensor, graph.graph.find_nodes(op="placeholder")), head.args[0]
    return numel_of(x) // shape_of(x)[-1] * sum(map(numel_of, weights))


def _is_head(graph: fx.GraphModule, node: fx.Node, recorded: bool) -> bool:
    """Return True if the node is a linear with many columns, and the last reader of a parameter."""
    weight = _head_weight(graph, node, recorded)
    if weight is None or not is_model_tensor(weight):
        return False
    outs, ins = shape_of(weight)
    if outs < max(MIN_COLUMNS, 2 * ins):
        return False
    later = _all_readers([node]) - {node}
    return not any(is_model_tensor(read) for each in later for read in each.all_input_nodes)


def _head_weight(graph: fx.GraphModule, node: fx.Node, recorded: bool) -> fx.Node | None:
    """Return the weight of a linear, which may be fused with the norm before it; None for other nodes."""
    if node.op != "call_module":
        return node.args[1] if node.target is torch._C._nn.linear and not node.kwargs else None
    if recorded and torch.is_grad_enabled():
        return None
    module = graph.get_submodule(node.target)
    if isinstance(module, plain.Linear):
        return node.args[1]
    after_norm = isinstance(module, plain.LayerNormLinear) and not isinstance(module, plain.LayerNormMLP)
    return node.args[module.PRODUCTS[0]] if after_norm and not module.returns_norm else None


def _all_readers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and their transitive readers."""
    return {*reached(nodes, users_of, lambda node: node.op != "output")}


def _head_operations(
    graph: fx.GraphModule, heads: Sequence[fx.Node], reads: Sequence[fx.Node]
) -> list[fx.Node] | None:
    """Return the heads, their readers, and nodes with no other readers; None if other nodes read them too."""
    own = _all_readers(heads)
    outputs = {node for node in returned(graph.graph) if isinstance(node, fx.Node)}
    nodes = computed_from(own, lambda node: node in reads or node.op == "placeholder")
    shared = any(node in outputs or not {*node.users} <= nodes for node in nodes - own)
    fused = any(node.op == "call_module" for node in nodes - {*heads})
    return None if shared or fused or own & {*reads} else sorted(nodes)
