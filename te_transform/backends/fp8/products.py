"""FP8 products of compiled graphs: quantize both operands, and multiply them.

The operations that do so are in ops.py. The caller passes scales and amax histories as tensors, and
updates them between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import traceback
from torch.utils._pytree import tree_map

from te_transform.backends import plain
from te_transform.backends.fp8.fp8_only import scale_for
from te_transform.backends.fp8.ops import InFP8, multiply
from te_transform.backends.library import registered_ops
from te_transform.backends.limits import as_autocast

FP8_ROW_MULTIPLE = 16  # must divide the rows of a product, and its other sizes

_VIEWS = {
    f"{name}Backward0" for name in ("Alias", "Permute", "ReshapeAlias", "Transpose", "UnsafeView", "View")
}


class ProductState(NamedTuple):
    """The state of the products of a call.

    Attributes:
        forward: the scales of delayed scaling, [3 per product: input, weight, output], and the amax history
            [length, the same]. () if each tensor gets a scale from its own values.
        backward: the same for gradients, [2 per product: of the output, of the input].
        weights: the quantized weights, if they are cached from call to call.
        weight_again: True to quantize the weight of a single product again in its backward. Otherwise its
            transpose is saved.
    """

    forward: tuple[Tensor, ...] = ()
    backward: tuple[Tensor, ...] = ()
    weights: tuple[InFP8, ...] = ()
    weight_again: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Return all tensors."""
        return chain(self.forward, self.backward, *self.weights)


@dataclass(frozen=True)
class Scaling:
    """The settings of a recipe with one scale per tensor.

    Attributes:
        forward: the dtype of inputs and weights.
        backward: the dtype of gradients.
        fast: one flag each for the forward product, the gradient of the input and the gradient of the weight.
            True if the product accumulates in the tensor cores, with fewer than 32 bits.
        delayed: True if scales come from earlier steps, False if from the tensor itself.
    """

    forward: torch.dtype
    backward: torch.dtype
    fast: tuple[bool, bool, bool]
    delayed: bool

    def product(self, state: ProductState) -> plain.Product:
        """Return a function that computes the products of one call, in order."""
        numbers = count()

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            number = next(numbers)
            x, bias = as_autocast(x, bias)
            return _as_matrix(lambda rows: _FP8Product.apply(self, state, number, rows, weight, bias), x)

        return product

    def mlp(
        self,
        state: ProductState,
        activation: str,
        x: Tensor,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
    ) -> Tensor:
        """Compute two products with an activation between them, x [..., in] -> [..., out].

        `activation` is TE's name. The kernels that compute it and its gradient also quantize. Delayed scaling
        only.
        """
        x, fc1_bias, fc2_bias = as_autocast(x, fc1_bias, fc2_bias)
        rest = fc1_weight, fc1_bias, fc2_weight, fc2_bias
        return _as_matrix(lambda rows: _Mlp.apply(self, state, activation, rows, *rest), x)

    def weight(
        self, state: ProductState, number: int, weight: Tensor, with_transpose: bool
    ) -> Sequence[Tensor]:
        """Return the result of quantized() for the weight of a product, cached if there is a cache."""
        if state.weights:
            return state.weights[number]
        return self.quantized(weight, self.forward, state.forward, 3 * number + 1, with_transpose)

    def multiplied(self, number: int, *operands: Any) -> Tensor:
        """Return the result of ops.multiply().

        A recipe that is fast in all products uses the fastest algorithm, too.

        Args:
            number: 0 for the forward, 1 for the gradient of the input, 2 for the gradient of the weight.
            operands: the arguments of ops.multiply() but the last.
        """
        compute = registered_ops.multiply if all(self.fast) else multiply
        return compute(*operands, self.fast[number])

    def quantized(
        self, x: Tensor, dtype: torch.dtype, scales: Sequence[Tensor], index: int, with_transpose: bool
    ) -> InFP8:
        """Return x [rows, columns] in `dtype`, its transpose if requested, and the inverse of the scale.

        Args:
            x: the tensor.
            dtype: float8_e4m3fn or float8_e5m2.
            scales: the scales of several tensors and their history; () if x gets a scale from its values.
            index: the index of x among these tensors.
            with_transpose: True to return the transpose too.
        """
        if self.delayed:
            return registered_ops.quantize(x.contiguous(), *scales, index, dtype, with_transpose)
        scale = scale_for(x.detach().abs().amax().float(), torch.finfo(dtype).max)
        return registered_ops.quantize(x.contiguous(), scale.reshape(1), None, 0, dtype, with_transpose)

    def transposed_again(self, x: Tensor, inverse: Tensor) -> Tensor:
        """Return the transpose of x [rows, columns] in the forward's dtype, computed in the backward.

        `inverse` is 1 / scale [1]. A compiler would otherwise compute it in the forward.
        """
        with _in_backward_graph():
            rows = x.contiguous()
            return registered_ops.quantize(rows, inverse.reciprocal(), None, 0, self.forward, True)[1]


@contextmanager
def _in_backward_graph() -> Iterator[None]:
    """Mark operations for AOTAutograd's partitioner, which leaves them in the backward."""
    name, meta = "partitioner_tag", traceback.current_meta
    before = meta.get(name)
    meta[name] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[name] = before


def with_full_rows(compute: Callable[[Tensor], Any], x: Tensor, multiple: int) -> Any:
    """Return compute(x), x [..., in] -> [..., out] or a tuple, with the rows padded to a multiple."""
    rows = x.shape[:-1].numel()
    missing = -rows % multiple
    if not missing:
        return compute(x)
    # padding repeats the last row, so amax does not change; the gradient of the padding is zero
    flat = x.reshape(rows, -1)
    padded = compute(torch.cat([flat, flat[-1:].expand(missing, -1)]))
    return tree_map(lambda out: out[:rows].reshape(*x.shape[:-1], -1), padded)


def _as_matrix(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return compute() of x [..., in] as a matrix [rows, in]; the result is [..., out]."""
    return with_full_rows(compute, x.reshape(-1, x.shape[-1]), FP8_ROW_MULTIPLE).reshape(*x.shape[:-1], -1)


def _is_saved(x: Tensor) -> bool:
    """Return True if the operation that computed x saves it for its own backward, as attention does.

    A product that saves x too needs no more memory, unlike one that saves the transpose in FP8.
    """
    node = x.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return hasattr(node, "_saved_output") or hasattr(node, "_saved_result")


class _FP8Product(torch.autograd.Function):
    """A product y = x W^T + b of x [rows, in] and W [out, in]; dx = g W, dW = g^T x; all operands in FP8.

    The tensor cores of Hopper sum over the last dimension of both operands. So operands that are summed over
    their first dimension are stored transposed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        how: Scaling,
        state: ProductState,
        number: int,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[3:5]
        x_again, weight_again = of_weight and _is_saved(x), of_x and state.weight_again
        with_transpose = of_weight and not x_again
        x8, x8_t, x_inverse = how.quantized(x, how.forward, state.forward, 3 * number, with_transpose)
        w8, w8_t, w_inverse = how.weight(state, number, weight, of_x and not weight_again)
        kept = x if x_again else x8_t, weight if weight_again else w8_t
        ctx.save_for_backward(*kept, x_inverse, w_inverse)
        # save_for_backward() would refuse the backward of another product that shares the history, because
        # each backward writes to it.
        ctx.how, ctx.scales, ctx.number = how, state.backward, number
        ctx.x_again, ctx.weight_again = x_again, weight_again
        return how.multiplied(0, x8, w8, x_inverse, w_inverse, bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_inverse, w_inverse = ctx.saved_tensors  # as given, or transposed in FP8
        of_x, of_weight, of_bias = ctx.needs_input_grad[3:]
        how, dtype = ctx.how, grad.dtype
        dx = dw = None
        if of_x or of_weight:
            g8, g8_t, g_inverse = how.quantized(grad, how.backward, ctx.scales, 2 * ctx.number, of_weight)
        if of_x:
            w8_t = how.transposed_again(weight, w_inverse) if ctx.weight_again else weight
            dx = how.multiplied(1, g8, w8_t, g_inverse, w_inverse, None, dtype)
        if of_weight:
            x8_t = how.transposed_again(x, x_inverse) if ctx.x_again else x
            dw = how.multiplied(2, g8_t, x8_t, g_inverse, x_inverse, None, dtype)
        return None, None, None, dx, dw, grad.sum(0) if of_bias else None


class _Mlp(torch.autograd.Function):
    """Two products y = a(x W1^T + b1) W2^T + b2; see _FP8Product."""

    @staticmethod
    def forward(
        ctx: Any,
        how: Scaling,
        state: ProductState,
        activation: str,
        x: Tensor,
        fc1: Tensor,
        fc1_bias: Tensor | None,
        fc2: Tensor,
        fc2_bias: Tensor | None,
    ) -> Tensor:
        of_x, of_fc1, of_fc1_bias, of_fc2, _ = ctx.needs_input_grad[3:]
        x8, x8_t, x_inverse = how.quantized(x, how.forward, state.forward, 0, of_fc1)
        fc1_8, fc1_8_t, fc1_inverse = how.weight(state, 0, fc1, of_x)
        hidden = how.multiplied(0, x8, fc1_8, x_inverse, fc1_inverse, fc1_bias, x.dtype)
        a8, a8_t, a_inverse = registered_ops.activate(
            hidden, activation, *state.forward, 3, how.forward, of_fc2
        )
        fc2_8, fc2_8_t, fc2_inverse = how.weight(state, 1, fc2, of_x or of_fc1 or of_fc1_bias)
        ctx.save_for_backward(
            x8_t, x_inverse, fc1_8_t, fc1_inverse, hidden, a8_t, a_inverse, fc2_8_t, fc2_inverse
        )
        ctx.how, ctx.scales, ctx.activation = how, state.backward, activation
        return how.multiplied(0, a8, fc2_8, a_inverse, fc2_inverse, fc2_bias, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x8_t, x_inverse, fc1_8_t, fc1_inverse, hidden, a8_t, a_inverse, fc2_8_t, fc2_inverse = (
            ctx.saved_tensors
        )
        of_x, of_fc1, of_fc1_bias, of_fc2, of_fc2_bias = ctx.needs_input_grad[3:]
        how, dtype = ctx.how, grad.dtype
        dx = dfc1 = dfc1_bias = dfc2 = None
        g8, g8_t, g_inverse = how.quantized(grad, how.backward, ctx.scales, 2, of_fc2)
        if of_fc2:
            dfc2 = how.multiplied(2, g8_t, a8_t, g_inverse, a_inverse, None, dtype)
        if of_x or of_fc1 or of_fc1_bias:
            da = how.multiplied(1, g8, fc2_8_t, g_inverse, fc2_inverse, None, dtype)
            h8, h8_t, h_inverse, total = registered_ops.activate_backward(
                da, hidden, ctx.activation, of_fc1_bias, *ctx.scales, 0, how.backward, of_fc1
            )
            dfc1_bias = total if of_fc1_bias else None
        if of_x:
            dx = how.multiplied(1, h8, fc1_8_t, h_inverse, fc1_inverse, None, dtype)
        if of_fc1:
            dfc1 = how.multiplied(2, h8_t, x8_t, h_inverse, x_inverse, None, dtype)
        return None, None, None, dx, dfc1, dfc1_bias, dfc2, grad.sum(0) if of_fc2_bias else None
