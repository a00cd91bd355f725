"""Compare state dicts: the same names in the same order, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_transform.backends.quantized import exact, is_quantized
from te_transform.graph.nodes import dtype_name
from te_transform.graph.state_snapshot import same_bits
from te_transform.verify.compare import Row

STATE = "state_dict"
_NAMES = 5  # listed of those that differ
_E4M3 = 2**-4  # the largest relative error of rounding to it


def compare_states(model: nn.Module, converted: nn.Module) -> Iterator[Row]:
    """A row for each difference, and one that counts."""
    own, theirs, held = model.state_dict(), converted.state_dict(), _held(converted) - _held(model)
    if list(own) != list(theirs):
        changed = sorted(own.keys() ^ theirs.keys())
        more = f" and {len(changed) - _NAMES} more" if len(changed) > _NAMES else ""
        yield Row(STATE, "names", False, reason=f"differ, {changed[:_NAMES] or 'in order'}{more}")
    for name in [name for name in own if name in theirs]:
        if name in held:
            yield _rounded(name, own[name], exact(theirs[name]))
        elif not _same(own[name], theirs[name]):
            yield Row(STATE, name, False, reason=_difference(own[name], theirs[name]))
    yield Row(STATE, f"{len(own)} entries", True)


def _held(model: nn.Module) -> set[str]:
    """The names of the parameters that are held in FP8 alone, which a state dict has as plain tensors."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if is_quantized(p)}


def _rounded(name: str, own: Tensor, theirs: Tensor) -> Row:
    """A weight that is held in FP8 alone may be off by the rounding of E4M3, 3 bits of mantissa."""
    error = float((theirs.double() - own.double()).norm() / own.double().norm().clamp(min=1e-300))
    return Row(STATE, name, error <= _E4M3, error, allowed=_E4M3, dtype="FP8")


def _difference(own: Any, theirs: Any) -> str:
    """Return why two entries are not the same; another dtype of the same weights is no other weight."""
    are_tensors = isinstance(own, Tensor) and isinstance(theirs, Tensor)
    if are_tensors and own.shape != theirs.shape:
        return f"is {list(theirs.shape)}, the original's is {list(own.shape)}: compare models of one size"
    if are_tensors and own.dtype != theirs.dtype:
        is_cast = same_bits(own.to(theirs.dtype), theirs) or same_bits(own, theirs.to(own.dtype))
        dtypes = f"is {dtype_name(theirs.dtype)}, the original's is {dtype_name(own.dtype)}"
        return f"{dtypes}{'' if is_cast else ', of other numbers'}: cast both models to one dtype"
    return "holds other values than the original's: load it there if it was trained since"


def _same(one: Any, other: Any) -> bool:
    """Whether two entries of state dicts are the same; some modules put other things than tensors there."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return one is other or bool(one == other)
