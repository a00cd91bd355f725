"""Find the modules whose weights another package quantized; no rule can fuse them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends.fp8.fp8_only import FP8Only
from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import dtype_name

_WORDS = ("linear", "quant")  # parts of the names of quantized module classes
_INDEX_DTYPES = (torch.int64, torch.bool)  # dtypes of indices and masks


def quantized_modules(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of modules with quantized weights, keyed by a text like "int8 of Linear8bitLt"."""
    return grouped(
        (f"{dtype} of {type(module).__name__}", path)
        for path, module in model.named_modules()
        if (dtype := next(_quantized_dtypes(module), None))
    )


def _quantized_dtypes(module: nn.Module) -> Iterator[str]:
    """Yield the type or dtype of each quantized tensor of a module."""
    if type(module).__module__.startswith("torch.ao.nn.") and callable(getattr(module, "weight", None)):
        yield "packed weights"  # the method `weight` unpacks them
    named = type(module).__name__.lower()
    is_product = isinstance(module, nn.Linear) or any(word in named for word in _WORDS)
    for tensor in chain(module._parameters.values(), module._buffers.values()):
        if isinstance(tensor, Tensor) and is_product and tensor.dim() >= 2 and (what := _what(tensor)):
            yield what


def _what(tensor: Tensor) -> str:
    """Return the type or dtype of a quantized tensor, or "" if the tensor is not quantized."""
    if is_traceable_wrapper_subclass(tensor):
        package = type(tensor).__module__.partition(".")[0]
        is_known = package in ("torchao", "optimum", "bitsandbytes") and not isinstance(tensor, FP8Only)
        return type(tensor).__name__ if is_known else ""
    dtype = tensor.dtype
    narrow = dtype.itemsize == 1 or not (dtype.is_floating_point or dtype.is_complex)
    return dtype_name(dtype) * (narrow and dtype not in _INDEX_DTYPES)
