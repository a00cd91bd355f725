"""Linear layers with 16-bit inputs and results in fp32, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from te_transform.backends.op import FusedOp
from te_transform.graph import ops


class WideLinear(FusedOp):
    """The op y = x W^T + b in fp32, of x and W in 16 bits."""

    OUTSIDE_RECIPE = (
        "with a recipe, too, linears in fp32, such as routers, multiply 16-bit numbers: a rounding to FP8 "
        "would change which experts a token chooses"
    )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convert x [..., in] to [..., out] in fp32."""
        return ops.wide_linear(x, weight, bias)
