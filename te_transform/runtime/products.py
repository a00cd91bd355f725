"""See the matrix products of a model's parameters as they are computed, however the model spells them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_transform.runtime.modes import GraphMode

_LINEAR = {F.linear}
_MATMUL = {
    torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__,
}  # fmt: skip
_ADDMM = {torch.addmm, Tensor.addmm}
_TRANSPOSES = {
    torch.t, torch.transpose, torch.swapaxes, torch.permute, torch.adjoint, Tensor.t, Tensor.transpose,
    Tensor.swapaxes, Tensor.permute, Tensor.T.__get__, Tensor.mT.__get__,
}  # fmt: skip
_COPIES = {
    Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.type_as, Tensor.contiguous,
}  # fmt: skip
_OF_MODULES = {F.multi_head_attention_forward}  # which hides its products in one call


class Callback(Protocol):
    """What is done in the place of a product x W^T + b."""

    def __call__(
        self,
        parameter: Tensor,
        transposed: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: Callable[[], Tensor],
    ) -> Tensor:
        """What the product is; `compute` computes it as the model does.

        Args:
            parameter: what the product multiplies with; it holds the weight as [in, out] if `transposed`.
            x: [..., in].
            weight: [out, in], the parameter or a view or cast of it.
            bias: [out].
        """


class Products(GraphMode):
    """Hands each product with one of `parameters` to `callback`; parameters are known by identity."""

    def __init__(self, parameters: Iterable[Tensor], callback: Callback):
        super().__init__()
        self.callback = callback
        # a parameter, a transpose or a cast of one -> the parameter, and whether this is its transpose
        self.known = WeakTensorKeyDictionary()
        for parameter in parameters:
            self.known[parameter] = parameter, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_MODULES:
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        operands = _operands(func, args, kwargs)
        if operands is not None and (found := self._find(operands[1])) is not None:
            x, weight, bias, by_columns = operands
            parameter, turned = found
            weight = weight.t() if by_columns else weight
            return self.callback(
                parameter, turned != by_columns, x, weight, bias, lambda: func(*args, **kwargs)
            )
        out = func(*args, **kwargs)
        self._follow(func, args, out)
        return out

    def _find(self, weight: Any) -> tuple[Tensor, bool] | None:
        is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
        return self.known.get(weight) if is_matrix else None

    def _follow(self, func: Any, args: tuple, out: Any) -> None:
        """Know the transpose or the cast of a parameter too."""
        if (func in _TRANSPOSES or func in _COPIES) and args and (found := self._find(args[0])) is not None:
            parameter, turned = found
            if out is not args[0]:
                self.known[out] = parameter, turned != (func in _TRANSPOSES)


def _operands(func: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Any, Tensor | None, bool] | None:
    """x, the weight, the bias of a call that is a product, and whether the weight is [in, out] in it."""
    if func in _LINEAR:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return given["input"], given["weight"], given.get("bias"), False
    if func in _MATMUL and len(args) == 2 and not kwargs:
        return args[0], args[1], None, True
    if func in _ADDMM and len(args) == 3 and not kwargs and args[0].dim() == 1:
        return args[1], args[2], args[0], True
    return None


def _without_dispatch(func: Callable) -> Callable:
    """`func` with its own torch-function check switched off: its body runs, and the calls in it are seen."""
    namespace = {**func.__globals__, "has_torch_function": lambda *_: False}
    body = type(func)(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
