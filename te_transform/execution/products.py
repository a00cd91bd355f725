"""The matrix products of a forward, as the user's own code computes them, recognized by their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_transform.execution.modes import GraphMode

# callback(parameter, transposed, x, weight, bias, compute) -> what takes the place of compute()
Callback = Callable[[Tensor, bool, Tensor, Tensor, Tensor | None, Callable[[], Tensor]], Tensor]

_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_ADDED = {torch.addmm, Tensor.addmm}
_HIDING = {F.multi_head_attention_forward}  # its products are in one call


class Products(GraphMode):
    """Hands each product with one of these parameters to a callback, and goes on with what that returns.

    F.linear, matmul and addmm are known, the weight as it is stored, or a view of it that has all its
    numbers.

    Args:
        parameters: those whose products are wanted.
        callback: is called with the parameter, whether it is stored as [in, out], the input [..., in], the
            weight [out, in], the bias [out] or None, and a function that computes the product as it was
            written.
    """

    def __init__(self, parameters: Iterable[Tensor], callback: Callback):
        super().__init__()
        self.wanted, self.callback = {id(parameter): parameter for parameter in parameters}, callback

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _HIDING:
            with self:
                return _without_dispatch(func)(*args, **(kwargs or {}))

        def compute() -> Any:
            return func(*args, **(kwargs or {}))

        found = _operands(func, args, kwargs or {})
        if found is None:
            return compute()
        x, weight, bias = found
        parameter = self._wanted(weight)
        if parameter is None:
            return compute()
        as_stored = weight.stride() == parameter.stride() or (parameter.dim() != 2 and weight.is_contiguous())
        transposed = as_stored == (func is not F.linear)
        by_rows = weight if func is F.linear else weight.t()
        return self.callback(parameter, transposed, x, by_rows, bias, compute)

    def _wanted(self, weight: Tensor) -> Tensor | None:
        base = weight._base
        whole = base is not None and base.numel() == weight.numel()
        return self.wanted.get(id(base if whole else weight))


def _operands(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Input, weight as it was given, and bias of a product; None of any other call."""
    if func is F.linear:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return named["input"], named["weight"], named.get("bias")
    if func in _PRODUCTS and len(args) == 2 and not kwargs and args[1].dim() == 2:
        return *args, None
    if func in _ADDED and len(args) == 3 and not kwargs and args[0].dim() == 1:
        return args[1], args[2], args[0]
    return None


def _without_dispatch(func: Callable) -> Callable:
    """`func` with its own torch-function check switched off: its body runs, and the calls in it are seen."""
    namespace = {**func.__globals__, "has_torch_function": lambda *_: False}
    body = type(func)(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
