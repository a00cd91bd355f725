"""Linear layers, linear layers after a norm, and MLPs, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.backends.joined import note_reads, watched
from te_transform.backends.op import FusedOp
from te_transform.graph import ops
from te_transform.graph.bound import F

EXACT_GELU = "gelu_erf"  # not a name of TE, which has no kernel for the exact GELU
# TE's names: gelu is the tanh approximation, and the -glu activations activate the first half of fc1's output
_ACTIVATION_FUNCTIONS = {
    "gelu": ops.gelu_tanh,
    "qgelu": ops.quick_gelu,
    "silu": ops.silu,
    "relu": ops.relu,
    "srelu": ops.squared_relu,
    EXACT_GELU: ops.gelu,
}
_GATE_FUNCTIONS = {
    "geglu": ops.gelu_tanh,
    "qgeglu": ops.quick_gelu,
    "swiglu": ops.silu,
    "reglu": ops.relu,
    "sreglu": ops.squared_relu,
    "glu": ops.sigmoid,
}
ACTIVATIONS = {op.__name__: name for name, op in _ACTIVATION_FUNCTIONS.items()}
GATED_ACTIVATIONS = {op.__name__: name for name, op in _GATE_FUNCTIONS.items()}
GATES = ("no", "first half", "second half")


CLAMPED = "clamped_swiglu"  # TE's name
SLOPES = {"silu": 1.0, "quick_gelu": 1.702}  # of x * sigmoid(slope * x), by names of ops of graph/ops.py


class Clamp(NamedTuple):
    """The parameters of x * sigmoid(alpha * x) * (y + offset), by TE's names.

    The gate x is clamped to at most `limit`, and y to [-limit, limit].
    """

    limit: float
    alpha: float
    glu_linear_offset: float


def clamped(op: str, limit: float, offset: float) -> str:
    """Return the name of a gated activation by silu or quick_gelu whose two factors are clamped."""
    return f"{CLAMPED}{tuple(Clamp(float(limit), SLOPES[op], float(offset)))}"


@cache
def clamp_of(activation: str) -> Clamp | None:
    """Return the parameters in a name from clamped(), or None for the name of another activation."""
    name, _, numbers = activation.partition("(")
    return Clamp(*map(float, numbers.rstrip(")").split(","))) if name == CLAMPED and numbers else None


def is_gated(activation: str) -> bool:
    """Return True if an activation, by TE's name, multiplies the two halves of its input."""
    return activation in _GATE_FUNCTIONS or clamp_of(activation) is not None


def activated(activation: str, hidden: Tensor, gate: int = 0) -> Tensor:
    """Apply an activation.

    Args:
        activation: TE's name of the activation, or a name from clamped().
        hidden: [..., columns], or [..., 2 columns] if the activation is gated.
        gate: the half of a gated `hidden` to activate, 0 or 1. The result is multiplied by the other half.
    """
    if activation in _ACTIVATION_FUNCTIONS:
        return _ACTIVATION_FUNCTIONS[activation](hidden)
    halves = hidden.chunk(2, dim=-1)
    first, other = halves[gate], halves[1 - gate]
    if (clamp := clamp_of(activation)) is None:
        return gate_times(_GATE_FUNCTIONS[activation], first, other)
    activate = ops.silu if clamp.alpha == SLOPES["silu"] else ops.quick_gelu
    return gate_times(activate, first, other, clamp.limit, clamp.glu_linear_offset)


def gate_times(
    activate: Callable[[Tensor], Tensor],
    gate: Tensor,
    other: Tensor,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Return activate(gate) * (other + offset), with both factors clamped as in Clamp if there is a limit."""
    if limit is not None:
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    return activate(gate) * (other + offset if offset else other)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b; weight [out, in], which may be joined parameters.

    The backward never reads the bias. It reads the weight only for the gradient of x, and not if autocast has
    cast the weight to a copy.
    """
    if bias is not None:
        note_reads(bias, False)
    cast = limits.autocast_dtype(x)
    if x.requires_grad and (cast is None or weight.dtype in (cast, torch.float64)):
        return watched(ops.linear(x, weight, bias), weight)
    note_reads(weight, False)
    return ops.linear(x, weight, bias)


def product_in_fp32(product: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return torch.mm or torch.bmm of matrices in 16 bits, with a result in fp32."""
    if not x.is_cuda:  # PyTorch has the kernels on GPUs alone
        return product(x.float(), y.float())
    return product(x, y, out_dtype=torch.float32)


class MatrixProduct(FusedOp):
    """An op with matrix products of an input [..., in] and weights [out, in]."""

    def forward(self, x: Tensor, *tensors: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Convert x [..., in] to [..., out]. Return the output of a norm too if `returns_norm`."""
        return self.plain(product, x, *tensors)

    def plain(self, product: Product, x: Tensor, *tensors: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Run the op in plain PyTorch, with matrix products computed by `product`."""
        raise NotImplementedError

    def trained_products(self, needed: Sequence[bool]) -> list[bool]:
        """Return True for each product whose output needs a gradient if these arguments of a call do."""
        return [any(needed[: weight + 2]) for weight in self.PRODUCTS]  # a bias follows its weight


class Linear(MatrixProduct):
    """The op y = x W^T + b; weight [out, in]."""

    PRODUCTS = (1,)

    def plain(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias)


class PaddedLinear(Linear):
    """A linear layer that pads its weight with zeros to a multiple of 64 rows, if this makes calls faster."""

    MULTIPLE = 64

    def plain(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convert x [..., in] to [..., out], contiguous, with no sign of the padding in its strides."""
        if why := limits.without_padding(x, weight):
            self.plain_calls[f"the head without padding, {why}"] += 1
            return super().plain(product, x, weight, bias)
        outs, missing = len(weight), -len(weight) % self.MULTIPLE
        padded = None if bias is None else F.pad(bias, (0, missing))
        return product(x, F.pad(weight, (0, 0, 0, missing)), padded)[..., :outs].contiguous()


class LayerNormLinear(MatrixProduct):
    """A linear layer after a LayerNorm or RMSNorm.

    Args:
        eps: of the norm.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: True if the scale of the norm is 1 + weight.
        returns_norm: True to return the output of the norm too.
    """

    PRODUCTS = (3,)

    def __init__(
        self, *, eps: float, normalization: str, zero_centered_gamma: bool, returns_norm: bool = False
    ):
        super().__init__()
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.returns_norm = returns_norm

    def plain(
        self,
        product: Product,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed = self.norm(x, norm_weight, norm_bias)
        return self._with_norm(product(normed, weight, bias), normed)

    def _with_norm(self, out: Tensor, normed: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (out, normed) if self.returns_norm else out

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Compute the norm."""
        if self.normalization == "RMSNorm":
            return ops.rms_norm(x, weight, self.eps, self.zero_centered_gamma)
        return ops.layer_norm(x, weight, bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.normalization}, eps={self.eps}"


class LayerNormMLP(LayerNormLinear):
    """The MLP fc2(activation(fc1(norm(x)))).

    fc1_weight is [ffn, hidden], or [2 ffn, hidden] if the activation is gated. A gated activation activates
    one half of fc1's columns, and multiplies it by the other half. `norm` are the arguments of
    LayerNormLinear.
    """

    PRODUCTS = (3, 5)

    def __init__(
        self, *, activation: str, gated: Literal["no", "first half", "second half"] = "no", **norm: Any
    ):
        super().__init__(**norm)
        self.activation, self.gated = activation, gated

    def plain(
        self,
        product: Product,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        normed = self.norm(x, norm_weight, norm_bias)
        hidden = product(normed, fc1_weight, fc1_bias)
        hidden = activated(self.activation, hidden, gate=int(self.gated == GATES[2]))
        return self._with_norm(product(hidden, fc2_weight, fc2_bias), normed)

    @property
    def gains(self) -> bool:
        """True if the activation is gated: the kernel then does not write and read half of fc1's columns."""
        return self.gated != "no"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.activation}"
