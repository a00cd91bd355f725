"""Weights that are held in FP8 alone: one byte a number and one scale for all of them.

To everybody else they are what they were: a tensor of that shape and dtype, whose values are the rounded
ones. Only fused ops look inside.
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

_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}


class _WithoutMemory(Tensor):
    """A tensor whose values are not in memory of its own: whoever goes there past PyTorch's operations gets
    a copy of them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def dequantize(self) -> Tensor:
        """The values, as a plain tensor."""
        raise NotImplementedError

    def numpy(self, **options: Any) -> Any:
        """Its values, as any tensor's."""
        return self.dequantize().numpy(**options)

    def tolist(self) -> Any:
        """Its values, as any tensor's."""
        return self.dequantize().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)


class Quantized(_WithoutMemory):
    """A tensor of `dtype` whose values are `held * inverse`.

    `held` is E4M3, as bytes. Those of joined weights are rows of one tensor with one scale, `whole`. Of a
    transposed one, `by_rows` is what it was made of.
    """

    held: Tensor
    inverse: Tensor
    whole: Quantized | None
    by_rows: Quantized | None

    @staticmethod
    def __new__(
        cls, held: Tensor, inverse: Tensor, dtype: torch.dtype, whole: Quantized | None = None
    ) -> Quantized:
        like = {"strides": held.stride(), "dtype": dtype, "device": held.device}
        made = Tensor._make_wrapper_subclass(cls, held.shape, **like)
        made.held, made.inverse, made.whole, made.by_rows = held, inverse, whole, None
        return made

    def __init__(self, *_: Any): ...

    def dequantize(self) -> Tensor:
        return (self.held.view(_FORMAT).float() * self.inverse).to(self.dtype)

    def share_memory_(self) -> Quantized:
        """Let other processes have the same memory."""
        self.held.share_memory_()
        self.inverse.share_memory_()
        return self

    def apply_(self, function: Any) -> Quantized:
        """Each value by a function of Python's, as any tensor on the CPU."""
        return self.quantize_(self.dequantize().apply_(function))

    def quantize_(self, values: Tensor) -> Quantized:
        """Hold other values; weights that are joined with this one are rounded again, to a scale for all."""
        if self.by_rows is not None:
            self.by_rows.quantize_(values.t())
            return self
        if self.whole is not None:
            all_values = self.whole.dequantize()
            start = (self.held.data_ptr() - self.whole.held.data_ptr()) // self.held.stride(0)
            all_values[start : start + len(self)] = values
            self.whole.quantize_(all_values)
            return self
        held, inverse = _rounded(values.to(self.device))
        for own, new in ((self.held, held), (self.inverse, inverse)):
            own.copy_(new)
            increment_version(own)  # below autograd, as within __torch_dispatch__, nobody counts
        return self

    @property
    def data(self) -> Tensor:
        """The tensor without its history, as any tensor's; other values are quantized."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, values: Tensor) -> None:
        if not (is_quantized(values) and addresses([values]) == addresses([self])):
            self.quantize_(exact(values.detach()))

    @property
    def requires_grad(self) -> bool:
        """Always false: in numbers of 8 bits the small steps of an optimizer would be lost."""
        return Tensor.requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, trained: bool) -> None:
        self.requires_grad_(trained)

    def requires_grad_(self, trained: bool = True) -> Quantized:
        """Is refused, as of a tensor of whole numbers."""
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
            return Quantized(first.held, first.inverse, first.dtype, first.whole)
        if func is _aten.t.default and first.held.is_contiguous():
            made = Quantized(first.held.t(), first.inverse, first.dtype)
            made.by_rows = first
            return made
        if (made := _few_rows(func, args)) is not None:
            return made
        if func is _aten.copy_.default and isinstance(first, Quantized):
            return first.quantize_(exact(args[1]))
        if func is _aten._to_copy.default and kwargs.get("layout") is None:
            device, dtype = kwargs.get("device", first.device), kwargs.get("dtype") or first.dtype
            return Quantized(first.held.to(device, copy=True), first.inverse.to(device, copy=True), dtype)
        if func is _aten.clone.default:
            return Quantized(first.held.clone(), first.inverse.clone(), first.dtype)
        plain, named = tree_map_only(Quantized, Quantized.dequantize, (args, kwargs))
        out = func(*plain, **named)
        if func._schema.is_mutable:
            written = zip(_written(func, args, kwargs), _written(func, plain, named), strict=True)
            held = {id(new): own.quantize_(new) for own, new in written if isinstance(own, Quantized)}
            out = tree_map_only(Tensor, lambda tensor: held.get(id(tensor), tensor), out)
        return _to_read(out) if func.is_view else out

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["held", "inverse"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> Quantized:
        return Quantized(inner["held"], inner["inverse"], dtype)

    def __deepcopy__(self, memo: dict) -> Tensor:
        made = _made(self.held.clone(), self.inverse.clone(), self.dtype, isinstance(self, nn.Parameter))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _made, (self.held.clone(), self.inverse, self.dtype, isinstance(self, nn.Parameter))

    def __repr__(self, **_: Any) -> str:
        return f"{self.dequantize()!r}, held in FP8"


class View(_WithoutMemory):
    """A part of a tensor that is held in FP8, or another shape of it: values of its own, which are for
    reading, as a write to them would be lost."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> View:
        made = values.as_subclass(cls)
        made.values = values
        return made

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
        memo[id(self)] = made = self.values.clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return self.values.__reduce_ex__(protocol)


_LOST = (
    "{} writes to a view of a weight that is held in FP8 alone, which is a copy, a write to the weight is "
    "needed: weight[index] = values, weight.copy_(values), or te_transform.revert() the model first"
)

_FROZEN = (
    "a weight that is held in FP8 alone cannot be trained, an optimizer needs it as it was: "
    "te_transform.revert() the model first, or train what stands beside it"
)


def _mode_for(func: Any, args: tuple) -> AbstractContextManager[None]:
    """In inference mode, what a view is made in: one of a tensor that counts its versions counts them too."""
    counts = func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference()
    return torch.inference_mode(False) if counts else nullcontext()


def _to_read(out: Any) -> Any:
    """Views of what was dequantized; those that are traced have nothing to lose."""
    return tree_map_only(Tensor, lambda tensor: View(tensor) if type(tensor) is Tensor else tensor, out)


def _written(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The tensors that an operation is given to write to."""
    given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tree_leaves([given.get(name) for name in writes])


def _few_rows(func: Any, args: tuple) -> Tensor | None:
    """A product with a weight that is held in FP8, of few rows, if it is x, weight and bias alone."""
    bias = None
    if func is _aten.mm.default:
        x, transposed = args
    elif func is _aten.addmm.default and len(args) == 3:
        bias, x, transposed = args
    elif func is _aten.linear.default:  # in inference mode, which takes nothing apart
        x, weight, bias = (*args, None)[:3]
        transposed = weight.t() if isinstance(weight, Quantized) else weight
    else:
        return None
    weight = transposed.by_rows if isinstance(transposed, Quantized) else None
    if weight is None or isinstance(x, Quantized) or not few_rows.takes(x, weight):
        return None
    if bias is not None and bias.dim() != 1:
        return None
    out = few_rows.op(x.reshape(-1, x.shape[-1]), weight.held, weight.inverse, bias)
    return out.reshape(*x.shape[:-1], -1)


def _made(held: Tensor, inverse: Tensor, dtype: torch.dtype, is_parameter: bool) -> Tensor:
    tensor = Quantized(held, inverse, dtype)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def scale_for(amax: Tensor, largest: float) -> Tensor:
    """largest / amax, 1 where that is no scale; on the device of `amax`, which nobody waits for."""
    # a number over a tensor would be a product with its reciprocal, rounded twice: not TE's scale
    return torch.where((amax > 0) & amax.isfinite(), amax.new_full((), largest) / amax, 1.0)


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values in E4M3, as bytes, and what they have to be multiplied with."""
    wide = values.float()
    scale = scale_for(wide.abs().amax(), _LARGEST)
    return (wide * scale).clamp(-_LARGEST, _LARGEST).to(_FORMAT).view(torch.uint8), 1 / scale


def quantize(weights: Sequence[Tensor]) -> list[nn.Parameter]:
    """Parameters that hold the weights in FP8; several, which are joined, in rows of one tensor.

    None of them is an inference tensor, which nothing could be loaded into later.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _quantized(weights)


def _quantized(weights: Sequence[Tensor]) -> list[nn.Parameter]:
    whole = Quantized(*_rounded(torch.cat([weight.detach() for weight in weights])), weights[0].dtype)
    if len(weights) == 1:
        return [nn.Parameter(whole, requires_grad=False)]
    parts = whole.held.split([len(weight) for weight in weights])
    return [
        nn.Parameter(Quantized(part, whole.inverse, whole.dtype, whole), requires_grad=False)
        for part in parts
    ]


def joined(parameters: Sequence[Tensor]) -> Quantized | None:
    """The tensor that these are all the rows of, in their order; None where they are not."""
    whole = parameters[0].whole if is_quantized(parameters[0]) else None
    if whole is None or any(not is_quantized(p) or p.whole is not whole for p in parameters):
        return None
    place = whole.held.data_ptr()
    for parameter in parameters:
        if parameter.held.data_ptr() != place:
            return None
        place += parameter.held.numel()
    return whole if place == whole.held.data_ptr() + whole.held.numel() else None


def make_quantized_adjacent(parameters: Sequence[Tensor]) -> Quantized | None:
    """Copies of weights that were the rows of one tensor, made the rows of one again; None where they have
    several scales, as what was quantized by itself."""
    first = parameters[0]
    if any(p.whole is not None or not p.inverse.equal(first.inverse) for p in parameters):
        return None
    with torch.inference_mode(False), torch.no_grad():
        whole = Quantized(torch.cat([p.held for p in parameters]), first.inverse.clone(), first.dtype)
        rows = whole.held.split([len(p) for p in parameters])
        for parameter, held in zip(parameters, rows, strict=True):
            parameter.held, parameter.inverse, parameter.whole = held, whole.inverse, whole
    return whole


def is_quantized(tensor: Tensor) -> bool:
    """Whether it holds its values in FP8 alone."""
    return isinstance(tensor, Quantized)


def has_bytes(tensor: Tensor) -> bool:
    """Whether it holds its values in FP8 alone, and there are any: none on the meta device, or fake ones."""
    return is_quantized(tensor) and type(tensor.held) is Tensor and not tensor.held.is_meta


def exact(tensor: Tensor) -> Tensor:
    """The tensor as a plain one: dequantized where it is held in FP8."""
    return tensor.dequantize() if is_quantized(tensor) else tensor


def addresses(tensors: Sequence[Tensor]) -> list[Any]:
    """Where the numbers of each lie, of many at once: each call of a graph asks."""
    if Quantized not in {*map(type, tensors)}:
        return [*map(Tensor.data_ptr, tensors)]
    return [(t.held.data_ptr(), t.inverse.data_ptr()) if is_quantized(t) else t.data_ptr() for t in tensors]


def forms_of(arguments: Sequence[Any]) -> dict[int, torch.dtype]:
    """The places of the arguments that are held in FP8, with their dtypes."""
    return {place: held.dtype for place, held in enumerate(arguments) if is_quantized(held)}


def opened(arguments: Sequence[Any], forms: dict[int, torch.dtype]) -> list[Any]:
    """The arguments with the bytes in the places of those that are held in FP8, whose scales follow."""
    found = [argument.held if place in forms else argument for place, argument in enumerate(arguments)]
    return [*found, *(arguments[place].inverse for place in forms)]


def closed(arguments: Sequence[Any], forms: dict[int, torch.dtype]) -> list[Any]:
    """What was opened, as it was."""
    found = list(arguments[: len(arguments) - len(forms)])
    for (place, dtype), inverse in zip(forms.items(), arguments[len(found) :], strict=True):
        found[place] = Quantized(found[place], inverse, dtype)
    return found
