"""The custom operators of te_transform: plain PyTorch on the CPU, the backend's kernels on a GPU.

torch.library.custom_op would take three times the CPU time per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("te_transform", "FRAGMENT")
registered_ops = torch.ops.te_transform

KERNELS: dict[str, Callable[..., Any]] = {}
"""The backend's GPU kernels, by the names of operators."""


def define_operator(function: Callable[..., Any], schema: str) -> None:
    """Define an operator with the name of `function`, which computes it where no kernel does."""

    def run(*arguments: Any) -> Any:
        return KERNELS.get(function.__name__, function)(*arguments)

    LIBRARY.define(function.__name__ + schema)
    LIBRARY.impl(function.__name__, function, "CPU")
    LIBRARY.impl(function.__name__, run, "CUDA")
