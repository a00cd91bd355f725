"""The backends of fused ops: `plain` (plain PyTorch) and `te` (NVIDIA Transformer Engine)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import cuda, nn

from te_transform.backends import plain, planned
from te_transform.backends.limits import DTYPES
from te_transform.backends.op import FusedOp


class BackendError(RuntimeError):
    """The error for a requested backend that cannot run on this machine."""

    arguments = ("backend",)  # see ArgumentError


class Backend(Protocol):
    """The interface of a backend. Each backend is a module of this package."""

    NAME: str
    HAS_BIAS: bool  # True if attention is fast with a bias that is added to the scores
    HAS_KERNELS: bool  # True if it has its own kernels for attention, rotary embedding, the loss and FP8
    ACTIVATIONS: Mapping[str, str]  # ops of graph/ops.py that LayerNormMLP supports -> the backend's names
    GATED_ACTIVATIONS: Mapping[str, str]  # the same for gated activations
    # supported gates, the half of fc1's output to activate: "no" (not gated), "first half", "second half"
    GATES: tuple[str, ...]

    Linear: Callable[[], FusedOp]
    PaddedLinear: Callable[[], FusedOp]
    LayerNormLinear: Callable[..., FusedOp]
    LayerNormMLP: Callable[..., FusedOp]
    DotProductAttention: Callable[..., FusedOp]
    Rotary: Callable[[float], FusedOp]
    WideLinear: Callable[[], FusedOp]
    CrossEntropy: Callable[[], FusedOp]

    def recipe_of(self, asked: Any) -> Any:
        """Return the recipe with this name, or the recipe object itself.

        Raises:
            ValueError: the recipe does not run here; the message says why.
        """

    def recipe_now(self) -> Any:
        """Return the active recipe, or None."""

    def multiple(self, recipe: Any) -> int:
        """Return the number that must divide the rows and columns of a matrix product in this recipe."""


# Input features of a linear. Below this width, TE's launches cost more than its bf16 kernels save (H100).
MIN_WIDTH = 2048


def choose(
    name: str, model: nn.Module, planning: bool = False, any_width: bool = False, in_recipe: bool = False
) -> tuple[Backend, str]:
    """Return the backend, and a sentence that says why it was chosen.

    Args:
        name: "te", "torch" or "auto".
        model: the model to convert.
        planning: True if nothing will run. Without TE, ops with TE's names and shapes replace TE's ops.
        any_width: True to use TE in narrow models too. Recipes need TE, and TE's launches cost the CPU
            nothing in a compiled graph.
        in_recipe: True to use TE for float32 weights too: under torch.autocast, their matrix products run
            in a recipe.

    Raises:
        BackendError: `name` is "te" and TE cannot run here; the message says what is missing.
    """
    if name == "torch":
        return plain, "backend 'torch', as asked"
    missing = why_missing()
    if name == "te":
        if not missing:
            return _te(), "backend 'te', as asked"
        if planning:
            return planned, f"backend 'te', planned only, because {missing}"
        raise BackendError(
            f"expected Transformer Engine for backend 'te', got none: {missing}; choose backend "
            "'torch' or 'auto'"
        )
    missing = missing or _why_te_cannot_run(model, in_recipe) or (None if any_width else _too_narrow(model))
    if missing:
        return plain, f"backend 'torch', because {missing}"
    return _te(), "backend 'te', because it runs here and the model is on the GPU"


def why_missing() -> str | None:
    """Return why Transformer Engine does not run on this machine, or None."""
    if not cuda.is_available():
        return "this machine has no GPU that PyTorch can use"
    try:
        _te()
    except Exception as error:  # the import loads shared libraries, which raise various errors
        reason = str(error).strip().splitlines() or [""]
        why = f"Transformer Engine cannot be imported ({type(error).__name__}: {reason[0]})"
        # earlier code may have loaded another version of a library, such as cuDNN
        early = "; try to import transformer_engine.pytorch before any model runs"
        return why + (early if isinstance(error, OSError) else "")
    if cuda.get_device_capability() < (8, 0):
        return "this GPU is older than Ampere, which Transformer Engine needs"
    return None


def _why_te_cannot_run(model: nn.Module, in_recipe: bool) -> str | None:
    """Return why TE's modules would not run for the model in its current state, or None."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    if any(not weight.is_cuda for weight in weights):
        return "the model is not on the GPU: move it there, or choose backend 'te'"
    taken = {*DTYPES, torch.float32} if in_recipe or torch.is_autocast_enabled("cuda") else {*DTYPES}
    if any(weight.dtype not in taken for weight in weights):
        return (
            "the model's weights are not all bfloat16 or float16, and Transformer Engine multiplies "
            "float32 in TF32: convert them, or call the model within torch.autocast"
        )
    return None


def _too_narrow(model: nn.Module) -> str | None:
    """Return why TE would make this model slower in bf16, or None."""
    widest = max((parameter.shape[1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    if widest < MIN_WIDTH:
        return (
            f"no linear has more than {widest} input features, and below {MIN_WIDTH} Transformer Engine's "
            "launches cost more than its kernels save: choose backend 'te' or a recipe"
        )
    return None


def _te() -> Backend:
    from te_transform.backends import te

    return te
