"""The custom operators of te_transform, which run the backend's kernels on a GPU.

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


def define_operator(name: str, schema: str) -> None:
    """Define an operator that the backend's kernel of this name computes."""

    def run(*arguments: Any) -> Any:
        return KERNELS[name](*arguments)

    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CUDA")
