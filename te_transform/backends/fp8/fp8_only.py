"""The interface of weights that are stored only in FP8, for fused ops; te_transform/fp8_only/ makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fn


class FP8Only(Tensor):
    """The base class of tensors whose values are `quantized * inverse`.

    Subclasses decide how PyTorch's operations see them. They are constructed by (quantized, inverse, dtype).

    Attributes:
        quantized: the values in E4M3, viewed as bytes.
        inverse: the 0-dim fp32 number to multiply them by.
        whole: the tensor that joined weights are the rows of, with one scale, or None.
        by_rows: the tensor that a transposed one was made from, or None.
        rows: the parameters that its rows belong to; () before they are joined.
    """

    quantized: Tensor
    inverse: Tensor
    whole: FP8Only | None
    by_rows: FP8Only | None
    rows: tuple[Tensor, ...] = ()

    def dequantize(self) -> Tensor:
        """Return the values as a plain tensor of this dtype."""
        raise NotImplementedError


def is_fp8_only(tensor: Any) -> bool:
    """Return True if the tensor is stored only in FP8."""
    return isinstance(tensor, FP8Only)


def has_bytes(tensor: Tensor) -> bool:
    """Return True if the tensor is stored only in FP8 and has memory, so is not on meta and not fake."""
    return isinstance(tensor, FP8Only) and type(tensor.quantized) is Tensor and not tensor.quantized.is_meta


def exact(tensor: Tensor) -> Tensor:
    """Return a plain tensor: the dequantized values of an FP8-only tensor, any other tensor itself."""
    return tensor.dequantize() if isinstance(tensor, FP8Only) else tensor


def addresses(tensors: Sequence[Tensor]) -> list[Any]:
    """Return the address of each tensor; every call of a graph asks."""
    address = Tensor.data_ptr
    stored = {kind for kind in {*map(type, tensors)} if issubclass(kind, FP8Only)}
    if not stored:
        return [*map(address, tensors)]
    return [(address(t.quantized), address(t.inverse)) if type(t) in stored else address(t) for t in tensors]


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """Return largest / amax, or 1 if that is not a scale, on the device of `amax` and without a sync."""
    # `number / tensor` would multiply by the reciprocal and round twice, which differs from TE's scale
    return torch.where((amax > 0) & amax.isfinite(), amax.new_full((), largest) / amax, 1.0)


def joined(parameters: Sequence[Tensor]) -> FP8Only | None:
    """Return the tensor that consists of exactly these rows in this order, or None."""
    first = parameters[0]
    whole = first.whole if isinstance(first, FP8Only) else None
    if whole is None or any(not isinstance(p, FP8Only) or p.whole is not whole for p in parameters):
        return None
    address = whole.quantized.data_ptr()
    for parameter in parameters:
        if parameter.quantized.data_ptr() != address:
            return None
        address += parameter.quantized.numel()
    return whole if address == whole.quantized.data_ptr() + whole.quantized.numel() else None


def join_copies(parameters: Sequence[FP8Only]) -> FP8Only | None:
    """Join copies of weights that were the rows of one tensor, or return None if their scales differ."""
    first = parameters[0]
    if any(p.whole is not None or not p.inverse.equal(first.inverse) for p in parameters):
        return None
    with torch.inference_mode(False), torch.no_grad():
        whole = type(first)(torch.cat([p.quantized for p in parameters]), first.inverse.clone(), first.dtype)
        rows = whole.quantized.split([len(p) for p in parameters])
        for parameter, part in zip(parameters, rows, strict=True):
            parameter.quantized, parameter.inverse, parameter.whole = part, whole.inverse, whole
    return whole


StoredForms = dict[int, tuple[type[FP8Only], torch.dtype]]


def forms_of(arguments: Sequence[Any]) -> StoredForms:
    """Return the class and dtype of each FP8-only argument, by its position."""
    return {
        index: (type(each), each.dtype) for index, each in enumerate(arguments) if isinstance(each, FP8Only)
    }


def opened(arguments: Sequence[Any], forms: StoredForms) -> list[Any]:
    """Replace FP8-only arguments by their bytes, and append their scales."""
    plain = [argument.quantized if index in forms else argument for index, argument in enumerate(arguments)]
    return [*plain, *(arguments[index].inverse for index in forms)]


def closed(arguments: Sequence[Any], forms: StoredForms) -> list[Any]:
    """Undo opened()."""
    restored = list(arguments[: len(arguments) - len(forms)])
    for (index, (kind, dtype)), inverse in zip(forms.items(), arguments[len(restored) :], strict=True):
        restored[index] = kind(restored[index], inverse, dtype)
    return restored
