"""Products, alone or behind a norm, and MLPs of two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from te_transform.backends import limits
from te_transform.backends.joined import note_reads, watched
from te_transform.backends.op import FusedOp
from te_transform.graph import ops
from te_transform.graph.bound import F

EXACT_GELU = "gelu_erf"  # a name of our own: TE has no kernel of it
# TE's names: its gelu is the tanh approximation, and X-glu activates the first half of fc1's output
_PLAIN = {
    "gelu": ops.gelu_tanh,
    "qgelu": ops.quick_gelu,
    "silu": ops.silu,
    "relu": ops.relu,
    "srelu": ops.squared_relu,
    EXACT_GELU: ops.gelu,
}
_GATED = {
    "geglu": ops.gelu_tanh,
    "qgeglu": ops.quick_gelu,
    "swiglu": ops.silu,
    "reglu": ops.relu,
    "sreglu": ops.squared_relu,
    "glu": ops.sigmoid,
}
ACTIVATIONS = {op.__name__: name for name, op in _PLAIN.items()}
GATED_ACTIVATIONS = {op.__name__: name for name, op in _GATED.items()}
GATES = ("no", "first half", "second half")


def activated(activation: str, hidden: Tensor, gate: int = 0) -> Tensor:
    """`hidden` [..., columns] activated, by TE's name for it.

    Of a gated activation one half of [..., 2 columns], the first unless `gate` is 1, multiplied with the
    other.
    """
    if activation in _PLAIN:
        return _PLAIN[activation](hidden)
    halves = hidden.chunk(2, dim=-1)
    return _GATED[activation](halves[gate]) * halves[1 - gate]


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b; weight [out, in], which may be joined parameters.

    The backward reads the weight for the gradient of x alone, or a copy that autocast has made, and no bias.
    """
    if bias is not None:
        note_reads(bias, False)
    cast = limits.autocast_dtype(x)
    if x.requires_grad and (cast is None or weight.dtype in (cast, torch.float64)):
        return watched(ops.linear(x, weight, bias), weight)
    note_reads(weight, False)
    return ops.linear(x, weight, bias)


class Linear(FusedOp):
    """y = x W^T + b; weight [out, in]."""

    PRODUCTS = (1,)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.plain(product, x, weight, bias)

    def plain(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The op in plain PyTorch, its matrix products computed by `product`."""
        return product(x, weight, bias)


class PaddedLinear(Linear):
    """A linear whose weight gets rows of zeros, up to a multiple of 64, in calls that gain from it."""

    MULTIPLE = 64

    def plain(self, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], contiguous: who reads it must not see that there were more columns."""
        if why := limits.without_padding(x, weight):
            self.plain_calls[f"the head as it is, {why}"] += 1
            return super().plain(product, x, weight, bias)
        outs, missing = len(weight), -len(weight) % self.MULTIPLE
        padded = None if bias is None else F.pad(bias, (0, missing))
        return product(x, F.pad(weight, (0, 0, 0, missing)), padded)[..., :outs].contiguous()


class LayerNormLinear(FusedOp):
    """A linear of a LayerNorm or RMSNorm; where `returns_norm`, what that computes is returned too."""

    PRODUCTS = (3,)

    def __init__(
        self, *, eps: float, normalization: str, zero_centered_gamma: bool, returns_norm: bool = False
    ):
        super().__init__()
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.returns_norm = returns_norm

    def forward(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., in] -> [..., out], and what the norm returns where that is asked for."""
        return self.plain(product, x, norm_weight, norm_bias, weight, bias)

    def plain(
        self,
        product: Product,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The op in plain PyTorch, its matrix products computed by `product`."""
        normed = self.norm(x, norm_weight, norm_bias)
        return self._with_norm(product(normed, weight, bias), normed)

    def _with_norm(self, out: Tensor, normed: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (out, normed) if self.returns_norm else out

    def norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm alone."""
        if self.normalization == "RMSNorm":
            return ops.rms_norm(x, weight, self.eps, self.zero_centered_gamma)
        return ops.layer_norm(x, weight, bias, self.eps, self.zero_centered_gamma)

    def extra_repr(self) -> str:
        return f"{self.normalization}, eps={self.eps}"


class LayerNormMLP(LayerNormLinear):
    """fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], twice the rows where the activation is gated:
    then one half of fc1's columns is activated, and multiplied with the other."""

    PRODUCTS = (3, 5)

    def __init__(
        self,
        *,
        eps: float,
        normalization: str,
        activation: str,
        zero_centered_gamma: bool,
        gated: Literal["no", "first half", "second half"] = "no",
        returns_norm: bool = False,
    ):
        super().__init__(
            eps=eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            returns_norm=returns_norm,
        )
        self.activation, self.gated = activation, gated

    def forward(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., hidden] -> [..., hidden], and what the norm returns where that is asked for."""
        return self.plain(product, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)

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
        """The op in plain PyTorch, its matrix products computed by `product`."""
        normed = self.norm(x, norm_weight, norm_bias)
        hidden = product(normed, fc1_weight, fc1_bias)
        hidden = activated(self.activation, hidden, gate=int(self.gated == GATES[2]))
        return self._with_norm(product(hidden, fc2_weight, fc2_bias), normed)

    @property
    def gains(self) -> bool:
        """Whether it saves writing and reading one half of fc1's columns."""
        return self.gated != "no"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.activation}"
