"""Faults of torch.compile, in PyTorch 2.11 to 2.13, that change numbers without an error, and their remedies.

- AOTAutograd lets the backward compute values again from the arguments. If the forward changes an argument,
  such as a codebook or running statistics, the backward reads the changed one. Such graphs are not compiled.
- inductor loses keywords: `alpha` of `torch.add(x, a @ b, alpha=c)`, and `dtype` of a cumulative sum
  of ones. These sums are decomposed.
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

_ADD, _CUMSUM = torch.ops.aten.add.Tensor, torch.ops.aten.cumsum.default
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
    """Return inductor's decompositions, and those of sums whose keywords it loses."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    own = {_ADD: _add, _CUMSUM: _cumsum}
    return {**table, **{target: functools.partial(ours, table.get(target)) for target, ours in own.items()}}


def _add(own: Callable[..., Any], x: Any, y: Any, *, alpha: Any = None) -> Any:
    """Return x + alpha * y, without `alpha`; inductor computes it in one kernel."""
    return own(x, y, alpha=alpha) if alpha is None else torch.add(x, torch.mul(y, alpha))


def _cumsum(own: Callable[..., Any] | None, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Return a cumulative sum in `dtype`, without the keyword; PyTorch sums integers in int64."""
    if dtype is not None:
        return torch.cumsum(x.to(dtype), dim).to(dtype)
    return NotImplemented if own is None else own(x, dim)
