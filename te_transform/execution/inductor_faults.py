"""Faults of torch.compile, in PyTorch 2.11 to 2.13, that change numbers without an error, and their remedies.

- AOTAutograd lets the backward compute values again from the arguments. If the forward changes an argument,
  such as a codebook or running statistics, the backward reads the changed one. Such graphs are not compiled.
- inductor makes `addmm` of `torch.add(x, a @ b, alpha=c)`, and loses `alpha`. It is multiplied before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)

_ADD = torch.ops.aten.add.Tensor
_WRITES_TO_ARGUMENT = (torch.ops.aten.copy_.default, torch.ops.aten.set_.source_Tensor)
_SAVED = (SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput)
_CHANGED = (
    "its backward needs an argument as it was before the forward changed it, and compiled code would read it "
    "after the change"
)


def checked(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles a graph of AOTAutograd unless its backward would read changed values.

    Args:
        compile: compiles a graph, as inductor's compile_fx_inner().

    Raises:
        RuntimeError: the returned function raises it for the graph of such a forward.
    """

    @functools.wraps(compile)
    def compile_checked(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if any(_changed_before_backward(graph.graph)):
            raise RuntimeError(_CHANGED)
        return compile(graph, inputs, **options)

    return compile_checked


def _changed_before_backward(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the values that a forward saves for its backward, and that a write to an argument changes.

    At the end of a functional graph, copy_() or set_() gives an argument its new values. All other nodes in
    its memory stand for the old values.
    """
    writes = [
        node for target in _WRITES_TO_ARGUMENT for node in graph.find_nodes(op="call_function", target=target)
    ]
    if not writes:
        return
    written, output = {_memory_in_aot(write.args[0]) for write in writes} - {None}, graph.output_node()
    for result, kind in zip(*output.args, output.meta["desc"], strict=True):
        if isinstance(kind, _SAVED) and result not in writes and _memory_in_aot(result) in written:
            yield result


def _memory_in_aot(saved: Any) -> int | None:
    """Return a number for the memory of a node's fake tensor, or None."""
    tensor = saved.meta.get("val") if isinstance(saved, fx.Node) else None
    has_storage = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if has_storage else None


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return inductor's decompositions, and one of sums with `alpha`."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    return {**table, _ADD: functools.partial(_add, table[_ADD])}


def _add(own: Callable[..., Any], x: Any, y: Any, *, alpha: Any = None) -> Any:
    """Return x + alpha * y, without `alpha`, as inductor computes it in one kernel."""
    if alpha is None or alpha == 1:
        return own(x, y, alpha=alpha)
    return torch.add(x, torch.mul(y, alpha))
