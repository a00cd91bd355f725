"""Faults of torch.compile, in PyTorch 2.11 to 2.13, that change numbers without an error, and their remedies.

- AOTAutograd lets the backward compute values again from the arguments. If the forward changes an argument,
  such as a codebook or running statistics, the backward reads the changed one. Such graphs are not compiled.
- AOTAutograd copies where a dropout does nothing. In PyTorch, such a dropout returns its argument, so a later
  write in place to its result changes the argument. These dropouts are left out of the graph.
- inductor loses keywords: `alpha` of `torch.add(x, a @ b, alpha=c)`, and `dtype` of a cumulative sum
  of ones. These sums are decomposed.
- inductor rounds a quotient twice: `1.0 // 0.1` is 10 there, and 9 in Python and PyTorch. This division is
  decomposed.
- inductor writes `x[mask] = number` in place of x, and views of x that are read later see the new numbers.
  This write is decomposed.
- inductor writes `x[index] = values` in place of x, too, while values may be a view of x. Such values are
  copied first.
- inductor folds constants: `x * 0` is 0 where x is NaN, and `x + zeros` is x itself, so an output shares
  memory with an argument or another output. This pass is off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_transform.graph import edit, ops
from te_transform.graph.dynamo_patches import around, patched

EXACT_SETTINGS = {"joint_graph_constant_folding": False}  # of inductor

_ADD, _CUMSUM = torch.ops.aten.add.Tensor, torch.ops.aten.cumsum.default
_INDEX_PUT, _DIVIDE = torch.ops.aten.index_put.default, torch.ops.aten.div.Tensor_mode
_DROPOUTS = (F.dropout, torch.dropout, ops.dropout)
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
        from torch._inductor import lowering  # takes seconds at the first graph

        if any(_changed_before_backward(graph.graph)):
            raise RuntimeError(_CHANGED)
        with patched([(lowering, "index_put_impl_", around(_put_copies))]):
            return compile(graph, inputs, **options)

    return compile_checked


def _put_copies(own: Callable[..., Any], x: Any, indices: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """Write values at indices of `x`, for inductor. Values in the memory of `x` are copied first."""
    from torch._inductor import ir, lowering

    x.realize()
    viewed = values.data.unwrap_view() if isinstance(values.data, ir.BaseView) else values
    if ir.try_get_name(x) in (ir.try_get_name(viewed), *values.get_read_names()):
        values = lowering.clone(values)
        values.realize()
    return own(x, indices, values, *args, **kwargs)


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
    """Return inductor's decompositions, and those of the operations that it computes wrongly."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    own = {_ADD: _add, _CUMSUM: _cumsum, _DIVIDE: _divide, _INDEX_PUT: _index_put}
    return {**table, **{target: functools.partial(ours, table.get(target)) for target, ours in own.items()}}


def _add(own: Callable[..., Any], x: Any, y: Any, *, alpha: Any = None) -> Any:
    """Return x + alpha * y, without `alpha`; inductor computes it in one kernel."""
    return own(x, y, alpha=alpha) if alpha is None else torch.add(x, torch.mul(y, alpha))


def _cumsum(own: Callable[..., Any] | None, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """Return a cumulative sum in `dtype`, without the keyword; PyTorch sums integers in int64."""
    if dtype is not None:
        return torch.cumsum(x.to(dtype), dim).to(dtype)
    return NotImplemented if own is None else own(x, dim)


def _divide(own: Callable[..., Any] | None, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Return the quotient. If floats are rounded down, the remainder is subtracted first, as in Python."""
    if rounding_mode != "floor" or not torch.result_type(x, y).is_floating_point:
        return NotImplemented if own is None else own(x, y, rounding_mode=rounding_mode)
    once = ((x - torch.remainder(x, y)) / y).round()
    twice = torch.floor(x / y)  # for a divisor of 0 or infinity, by which there is no remainder
    if isinstance(y, Tensor):
        return torch.where((y == 0) | torch.isinf(y), twice, once)
    return once if y and math.isfinite(y) else twice


def _index_put(
    own: Callable[..., Any] | None, x: Tensor, indices: Any, values: Tensor, accumulate: bool = False
) -> Any:
    """Return `x` with the number `values` where a mask is True, as a new tensor; leave other indices."""
    first, is_number = indices[0], statically_known_true(values.numel() == 1)
    if len(indices) == 1 and is_number and first is not None and first.dtype in (torch.bool, torch.uint8):
        mask, number = first.bool(), values.reshape(())
        mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        return torch.where(mask, x + number if accumulate else number, x)
    return NotImplemented if own is None else own(x, indices, values, accumulate)


def leave_out_idle_dropouts(graph: fx.Graph) -> None:
    """Make readers of a dropout that is off, or that drops nothing, read its argument."""
    for node in graph.nodes:
        if node.target in _DROPOUTS and _is_idle(*node.args, **node.kwargs):
            edit.bypass(node, node.kwargs.get("input", *node.args[:1]))


def _is_idle(
    input: Any, p: Any = 0.5, training: Any = True, inplace: bool = False, *, train: Any = None
) -> bool:
    """Return True if a dropout with these arguments returns its input."""
    return p == 0 or (training if train is None else train) is False
