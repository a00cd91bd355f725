"""Matrix products of few rows with a weight that is stored in FP8 only, as a custom operator.

Generation is bound by reading the weights, and reads half as many bytes from FP8 weights. The rows of the
input are not rounded to FP8.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from te_transform.backends.library import LIBRARY, registered_ops
from te_transform.backends.limits import DTYPES
from te_transform.graph.bound import F

MAX_ROWS = 16  # rows; from about 32 rows on, FP8 matrix products of the tensor cores are faster (H100)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return True if x [..., in] has few enough rows, and the dtype of the weight.

    Return False in captures with symbolic sizes. A guard on the sizes would tie the capture to them.
    """
    rows = math.prod(x.shape[:-1])  # Size.numel() would turn symbols into numbers
    few = statically_known_true(rows > 0) and statically_known_true(rows <= MAX_ROWS)
    return few and x.dtype == weight.dtype and x.dtype in DTYPES


def few_rows_linear(x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x (weight * inverse)^T + bias, for x [rows, in] and weight [out, in], bytes of E4M3."""
    return F.linear(x, (weight.view(torch.float8_e4m3fn).float() * inverse).to(x.dtype), bias)


def _by_kernel(x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None) -> Tensor:
    from te_transform.backends import few_rows_kernel

    return few_rows_kernel.few_rows_linear(x.contiguous(), weight.view(torch.float8_e4m3fn), inverse, bias)


LIBRARY.define("few_rows_linear(Tensor x, Tensor weight, Tensor inverse, Tensor? bias) -> Tensor")
LIBRARY.impl("few_rows_linear", few_rows_linear, "CPU")
LIBRARY.impl("few_rows_linear", _by_kernel, "CUDA")
op = registered_ops.few_rows_linear.default


@torch.library.register_fake("te_transform::few_rows_linear")
def _fake_result(x: Tensor, weight: Tensor, inverse: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))
