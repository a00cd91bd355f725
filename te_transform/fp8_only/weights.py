"""Tensors that are stored only in FP8: one byte per element and one scale per tensor.

PyTorch's operations see a tensor of the original shape and dtype with the rounded values. Only fused ops read
the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.backends import few_rows
from te_transform.backends.fp8.fp8_only import FORMAT, FP8Only, addresses, exact, is_fp8_only, scale_for

_FORMAT_MAX = torch.finfo(FORMAT).max
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}


class _WithoutMemory(Tensor):
    """A tensor without memory for its values; readers that bypass PyTorch's operations get a copy."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dequantize(self) -> Tensor:
        """Return the values as a plain tensor."""
        raise NotImplementedError

    def numpy(self, **options: Any) -> Any:
        """Return a copy of the values."""
        return self.dequantize().numpy(**options)

    def tolist(self) -> Any:
        """Return a copy of the values."""
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)


class FP8Weight(_WithoutMemory, FP8Only):
    """A tensor of `dtype` whose values are `quantized * inverse`."""

    @staticmethod
    def __new__(
        cls, quantized: Tensor, inverse: Tensor, dtype: torch.dtype, whole: FP8Weight | None = None
    ) -> FP8Weight:
        like = {"strides": quantized.stride(), "dtype": dtype, "device": quantized.device}
        tensor = Tensor._make_wrapper_subclass(cls, quantized.shape, **like)
        tensor.quantized, tensor.inverse, tensor.whole, tensor.by_rows = quantized, inverse, whole, None
        return tensor

    def __init__(self, *_: Any): ...

    def dequantize(self) -> Tensor:
        return (self.quantized.view(FORMAT).float() * self.inverse).to(self.dtype)

    def share_memory_(self) -> FP8Weight:
        """Share the memory with other processes."""
        self.quantized.share_memory_()
        self.inverse.share_memory_()
        return self

    def apply_(self, function: Any) -> FP8Weight:
        """Apply a Python function to each value."""
        return self.quantize_(self.dequantize().apply_(function))

    def quantize_(self, values: Tensor) -> FP8Weight:
        """Store other values. Weights that are joined with this one are rounded again, to one scale."""
        if self.by_rows is not None:
            self.by_rows.quantize_(values.t())
            return self
        if self.whole is not None:
            all_values = self.whole.dequantize()
            start = (self.quantized.data_ptr() - self.whole.quantized.data_ptr()) // self.quantized.stride(0)
            all_values[start : start + len(self)] = values
            self.whole.quantize_(all_values)
            return self
        rounded, inverse = _rounded_to_fp8(values.to(self.device))
        for own, new in ((self.quantized, rounded), (self.inverse, inverse)):
            own.copy_(new)
            increment_version(own)  # __torch_dispatch__ runs below autograd, which counts versions
        return self

    @property
    def data(self) -> Tensor:
        """The tensor without its history. Assigned values are quantized."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        if not (is_fp8_only(values) and addresses([values]) == addresses([self])):
            self.quantize_(exact(values.detach()))

    @property
    def requires_grad(self) -> bool:
        """Always False: 8 bits would lose the small steps of an optimizer."""
        return Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self.requires_grad_(trained)

    def requires_grad_(self, trained: bool = True) -> FP8Weight:
        """Raise RuntimeError if `trained`, as an integer tensor does."""
        if trained:
            raise RuntimeError(_FROZEN)
        return self

    @torch.no_grad()
    def __setitem__(self, index: Any, values: Any) -> None:
        written = self.dequantize()
        written[index] = exact(values) if isinstance(values, Tensor) else values
        self.quantize_(written)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with _mode_for(func, args):
            return cls._dispatched(func, args, kwargs or {})

    @classmethod
    def _dispatched(cls, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if func in _SAME:
            return FP8Weight(first.quantized, first.inverse, first.dtype, first.whole)
        if func is _aten.t.default and first.quantized.is_contiguous():
            transposed = FP8Weight(first.quantized.t(), first.inverse, first.dtype)
            transposed.by_rows = first
            return transposed
        if (product := _few_rows_product(func, args)) is not None:
            return product
        if func is _aten.copy_.default and isinstance(first, FP8Weight):
            return first.quantize_(exact(args[1]))
        if func is _aten._to_copy.default and kwargs.get("layout") is None:
            device, dtype = kwargs.get("device", first.device), kwargs.get("dtype") or first.dtype
            return FP8Weight(
                first.quantized.to(device, copy=True), first.inverse.to(device, copy=True), dtype
            )
        if func is _aten.clone.default:
            return FP8Weight(first.quantized.clone(), first.inverse.clone(), first.dtype)
        plain, named = tree_map_only(FP8Weight, FP8Weight.dequantize, (args, kwargs))
        out = func(*plain, **named)
        if func._schema.is_mutable:
            written = zip(_written(func, args, kwargs), _written(func, plain, named), strict=True)
            requantized = {id(new): own.quantize_(new) for own, new in written if isinstance(own, FP8Weight)}
            out = tree_map_only(Tensor, lambda tensor: requantized.get(id(tensor), tensor), out)
        return _to_read(out) if func.is_view else out

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["quantized", "inverse"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> FP8Weight:
        return FP8Weight(inner["quantized"], inner["inverse"], dtype)

    def __deepcopy__(self, memo: dict) -> Tensor:
        twin = _new_weight(
            self.quantized.clone(), self.inverse.clone(), self.dtype, isinstance(self, nn.Parameter)
        )
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _new_weight, (self.quantized.clone(), self.inverse, self.dtype, isinstance(self, nn.Parameter))

    def __repr__(self, **_: Any) -> str:
        return f"{self.dequantize()!r}, held in FP8"


class View(_WithoutMemory):
    """A view of a tensor that is stored only in FP8. It is a copy, so writes to it raise."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> View:
        view = values.as_subclass(cls)
        view.values = values
        return view

    def __init__(self, *_: Any): ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(isinstance(own, View) for own in _written(func, args, kwargs)):
            raise RuntimeError(_LOST.format(func._schema.name.removeprefix("aten::")))
        plain, named = tree_map_only(View, lambda view: view.values, (args, kwargs))
        with _mode_for(func, args):
            out = func(*plain, **named)
            return _to_read(out) if func.is_view else out

    def dequantize(self) -> Tensor:
        return self.values

    def __deepcopy__(self, memo: dict) -> Tensor:
        memo[id(self)] = twin = self.values.clone()
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return self.values.__reduce_ex__(protocol)


_LOST = (
    "expected a write to the weight, got {} on a view of an FP8-only weight, which is a copy; use "
    "weight[index] = values, weight.copy_(values) or te_transform.revert()"
)

_FROZEN = (
    "expected a frozen FP8-only weight, got requires_grad=True, and an optimizer needs the original values; "
    "te_transform.revert() the model first, or train other parameters"
)


def _mode_for(func: Any, args: tuple) -> AbstractContextManager[None]:
    """Return the mode to create a view in; in inference mode, a view counts versions if its base does."""
    counts = func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference()
    return torch.inference_mode(False) if counts else nullcontext()


def _to_read(out: Any) -> Any:
    """Wrap views of dequantized values; traced tensors need no wrapper."""
    return tree_map_only(Tensor, lambda tensor: View(tensor) if type(tensor) is Tensor else tensor, out)


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments that an operation writes to."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tree_leaves([given.get(name) for name in writes])


def _few_rows_product(func: Any, args: tuple) -> Tensor | None:
    """Compute a product of few rows with an FP8-only weight, or return None for any other operation."""
    bias = None
    if func is _aten.mm.default:
        x, transposed = args
    elif func is _aten.addmm.default and len(args) == 3:
        bias, x, transposed = args
    elif func is _aten.linear.default:  # inference mode does not decompose it
        x, weight, bias = (*args, None)[:3]
        transposed = weight.t() if isinstance(weight, FP8Weight) else weight
    else:
        return None
    weight = transposed.by_rows if isinstance(transposed, FP8Weight) else None
    if weight is None or isinstance(x, FP8Weight) or not few_rows.takes(x, weight):
        return None
    if bias is not None and bias.dim() != 1:
        return None
    out = few_rows.op(x.reshape(-1, x.shape[-1]), weight.quantized, weight.inverse, bias)
    return out.reshape(*x.shape[:-1], -1)


def _new_weight(quantized: Tensor, inverse: Tensor, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    tensor = FP8Weight(quantized, inverse, dtype)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _rounded_to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values in E4M3, viewed as bytes, and the number to multiply them by."""
    wide = values.float()
    scale = scale_for(wide.abs().amax(), _FORMAT_MAX)
    return (wide * scale).clamp(-_FORMAT_MAX, _FORMAT_MAX).to(FORMAT).view(torch.uint8), 1 / scale


@torch.inference_mode(False)
@torch.no_grad()
def quantize_together(weights: Sequence[Tensor]) -> list[nn.Parameter]:
    """Return parameters with the weights in FP8; several weights become rows of one tensor.

    They are never inference tensors, because later loads write to them.
    """
    whole = FP8Weight(*_rounded_to_fp8(torch.cat([weight.detach() for weight in weights])), weights[0].dtype)
    if len(weights) == 1:
        return [nn.Parameter(whole, requires_grad=False)]
    parts = whole.quantized.split([len(weight) for weight in weights])
    return [
        nn.Parameter(FP8Weight(part, whole.inverse, whole.dtype, whole), requires_grad=False)
        for part in parts
    ]
