"""The fused modules in plain PyTorch, with Transformer Engine's constructor arguments, parameter names and
semantics.

The reference that everything is tested against on any machine, and the right lowering where TE is not there.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_transform import vocabulary

NAME = "torch"
# its modules are plain operations: nothing is gained by joining a norm with what reads it, so that norms run
# where they stand, or by storing a transposed weight otherwise
PLAIN = True

# TE's names: its gelu is the tanh approximation, and X-glu activates the first half of fc1's output
_PLAIN = {
    "gelu": vocabulary.gelu_tanh,
    "qgelu": vocabulary.quick_gelu,
    "silu": vocabulary.silu,
    "relu": vocabulary.relu,
}
_GATED = {
    "geglu": vocabulary.gelu_tanh,
    "qgeglu": vocabulary.quick_gelu,
    "swiglu": vocabulary.silu,
    "reglu": vocabulary.relu,
    "glu": vocabulary.sigmoid,
}
ACTIVATIONS = {word.__name__: name for name, word in _PLAIN.items()}
GATED_ACTIVATIONS = {word.__name__: name for name, word in _GATED.items()}


class Linear(nn.Module):
    """y = x W^T + b; weight [out, in]."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(device, params_dtype, out_features, in_features)
        self.bias = _parameter(device, params_dtype, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return vocabulary.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )


class _Normalising(nn.Module):
    """A module that begins with a LayerNorm or RMSNorm."""

    normalised = False  # whether its input is already

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: str,
    ):
        super().__init__()
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.layer_norm_weight = _parameter(device, params_dtype, width)
        self.layer_norm_bias = (
            _parameter(device, params_dtype, width) if normalization == "LayerNorm" else None
        )

    def norm_repr(self) -> str:
        """The norm, as it is printed."""
        where = " (runs in front)" if self.normalised else ""
        return f"{self.normalization}{where}, eps={self.eps}"

    def normalise(self, x: Tensor) -> Tensor:
        """The norm alone, x [..., width] -> [..., width]."""
        if self.normalization == "RMSNorm":
            return vocabulary.rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return vocabulary.layer_norm(x, weight, bias, self.eps, self.zero_centered_gamma)


class LayerNormLinear(_Normalising):
    """A linear of a LayerNorm or RMSNorm; layer_norm_weight [in], layer_norm_bias [in] (LayerNorm), weight,
    bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        bias: bool,
        normalization: str,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: str,
    ):
        super().__init__(
            in_features,
            eps=eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            params_dtype=params_dtype,
            device=device,
        )
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(device, params_dtype, out_features, in_features)
        self.bias = _parameter(device, params_dtype, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return vocabulary.linear(x if self.normalised else self.normalise(x), self.weight, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.norm_repr()}"
        )


class LayerNormMLP(_Normalising):
    """fc2(activation(fc1(norm(x)))); fc1_weight [ffn, hidden], twice the rows where the activation is
    gated."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        eps: float,
        bias: bool,
        normalization: str,
        activation: str,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: str,
    ):
        super().__init__(
            hidden_size,
            eps=eps,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            params_dtype=params_dtype,
            device=device,
        )
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        rows = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.fc1_weight = _parameter(device, params_dtype, rows, hidden_size)
        self.fc1_bias = _parameter(device, params_dtype, rows) if bias else None
        self.fc2_weight = _parameter(device, params_dtype, hidden_size, ffn_hidden_size)
        self.fc2_bias = _parameter(device, params_dtype, hidden_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        x = x if self.normalised else self.normalise(x)
        hidden = vocabulary.linear(x, self.fc1_weight, self.fc1_bias)
        if self.activation in _GATED:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = _GATED[self.activation](gate) * up
        else:
            hidden = _PLAIN[self.activation](hidden)
        return vocabulary.linear(hidden, self.fc2_weight, self.fc2_bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.ffn_hidden_size}, {self.activation}, {self.norm_repr()}"


class DotProductAttention(nn.Module):
    """softmax(q k^T * scale + mask) v, by scaled_dot_product_attention."""

    # Hugging Face's attention functions that it can take the place of
    stands_for: tuple[str, ...] = ("eager",)

    def takes(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        """Whether this is a call that the core has a kernel of its own for."""
        return True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """query [batch, heads, length, width], key and value likewise; the mask keeps True, or is added."""
        with self.kernels(query, key, value, mask, is_causal):
            return vocabulary.sdpa(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)

    def kernels(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> contextlib.AbstractContextManager:
        """What PyTorch chooses its kernel in."""
        # where a mask of finite numbers hides a whole row, the fused kernels' gradients are wrong (torch
        # 2.13): they normalise by a log-sum-exp in which the number of keys has been rounded away
        added = mask is not None and mask.is_floating_point() and torch.is_grad_enabled()
        return sdpa_kernel(SDPBackend.MATH) if added else contextlib.nullcontext()


def _parameter(device: str, dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
