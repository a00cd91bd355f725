"""Intercept the matrix products of the user's own code by their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_transform.execution.modes import GraphMode

# callback(parameter, transposed, x, weight, bias, compute) -> the tensor to use instead of compute()
Callback = Callable[[Tensor, bool, Tensor, Tensor, Tensor | None, Callable[[], Tensor]], Tensor]

_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_ADDED = {torch.addmm, Tensor.addmm}
_HIDING = {F.multi_head_attention_forward}  # one call contains its products


class Products(GraphMode):
    """A mode that replaces each product with one of the parameters by the result of a callback.

    The mode recognizes F.linear, matmul and addmm with the weight itself, or with a view of the whole weight.

    Args:
        parameters: the weights of interest.
        callback: receives the parameter, and True if it is stored as [in, out]. It also receives the input
            [..., in], the weight [out, in], the bias [out] or None, and a function that computes the original
            product.
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

        tensors = _product_tensors(func, args, kwargs or {})
        if tensors is None:
            return compute()
        x, weight, bias = tensors
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


def _product_tensors(
    func: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return input, weight and bias of a matrix product, or None for other calls."""
    if func is F.linear:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return named["input"], named["weight"], named.get("bias")
    if func in _MATMULS and len(args) == 2 and not kwargs and args[1].dim() == 2:
        return *args, None
    if func in _ADDED and len(args) == 3 and not kwargs and args[0].dim() == 1:
        return args[1], args[2], args[0]
    return None


def _without_dispatch(func: Callable) -> Callable:
    """Return `func` without its torch-function check, so that the mode sees the calls in its body."""
    namespace = {**func.__globals__, "has_torch_function": lambda *_: False}
    body = type(func)(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
