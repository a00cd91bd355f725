"""Compare state dicts: the same names in the same order, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from te_transform.backends.fp8.fp8_only import exact, is_fp8_only
from te_transform.graph.nodes import dtype_name
from te_transform.graph.state_snapshot import same_bits
from te_transform.verify.compare import Row

STATE_DICT = "state_dict"
_NAMES = 5  # the most differing names to list
_E4M3 = 2**-4  # the largest relative error of rounding to it


def compare_states(model: nn.Module, converted: nn.Module) -> Iterator[Row]:
    """Yield a row for each difference, and one with the number of entries."""
    own, theirs, buffers = (
        model.state_dict(),
        converted.state_dict(),
        _fp8_only_names(converted) - _fp8_only_names(model),
    )
    if list(own) != list(theirs):
        changed = sorted(own.keys() ^ theirs.keys())
        more = f" and {len(changed) - _NAMES} more" if len(changed) > _NAMES else ""
        yield Row(STATE_DICT, "names", False, reason=f"differ, {changed[:_NAMES] or 'in order'}{more}")
    for name in [name for name in own if name in theirs]:
        if name in buffers:
            yield _compare_rounded(name, own[name], exact(theirs[name]))
        elif not _same(own[name], theirs[name]):
            yield Row(STATE_DICT, name, False, reason=_why_different(own[name], theirs[name]))
    yield Row(STATE_DICT, f"{len(own)} entries", True)


def compare_weights(weights: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each weight of the second model with other values than `weights` from the first's.

    Weights of other dtypes and quantized weights are not compared: outputs show whether they are right.
    """
    pairs = [
        (n, t, state[n])
        for n, t in weights.items()
        if _is_plain_tensor(state.get(n)) and t.dtype is state[n].dtype
    ]
    for name, own, theirs in pairs:
        if same_bits(own, theirs):
            continue
        if own.dim() == 2 and own.shape == theirs.mT.shape and same_bits(own.mT, theirs):
            reason = "is the original's transpose: transpose it, or pass weights if it is stored so"
        else:
            reason = "has other values than the original's: load the original's weights first"
        yield Row(STATE_DICT, name, False, reason=reason)
    yield Row(STATE_DICT, f"{len(pairs)} weights", True)


def _is_plain_tensor(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and not value.is_quantized and not value.is_meta


def _fp8_only_names(model: nn.Module) -> set[str]:
    """Return the names of FP8-only parameters, which a state dict holds as plain tensors."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if is_fp8_only(p)}


def _compare_rounded(name: str, own: Tensor, theirs: Tensor) -> Row:
    """Compare an FP8-only weight; the rounding of E4M3 (3 bits of mantissa) is allowed."""
    error = float((theirs.double() - own.double()).norm() / own.double().norm().clamp(min=1e-300))
    return Row(STATE_DICT, name, error <= _E4M3, error, allowed=_E4M3, dtype="FP8")


def _why_different(own: Any, theirs: Any) -> str:
    """Return why two entries differ; the text distinguishes a cast of the same weights from other weights."""
    are_tensors = isinstance(own, Tensor) and isinstance(theirs, Tensor)
    if are_tensors and own.shape != theirs.shape:
        return f"is {list(theirs.shape)}, but the original's is {list(own.shape)}: compare models of one size"
    if are_tensors and own.dtype != theirs.dtype:
        is_cast = same_bits(own.to(theirs.dtype), theirs) or same_bits(own, theirs.to(own.dtype))
        dtypes = f"is {dtype_name(theirs.dtype)}, but the original's is {dtype_name(own.dtype)}"
        return f"{dtypes}{'' if is_cast else ', with other values'}: cast both models to one dtype"
    return "has other values than the original's: load it into the original if it was trained since"


def _same(one: Any, other: Any) -> bool:
    """Return True if two entries of state dicts are equal; some modules store objects other than tensors."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return one is other or bool(one == other)
