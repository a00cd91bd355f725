"""What fused ops are made of: `plain` (plain PyTorch) or `te` (NVIDIA Transformer Engine)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import cuda, nn

from te_transform.backends import plain, planned
from te_transform.backends.limits import DTYPES
from te_transform.backends.op import FusedOp


class BackendError(RuntimeError):
    """The backend asked for cannot run here."""


class Backend(Protocol):
    """What rules and plans ask of a backend; each is a module of this package."""

    NAME: str
    HAS_BIAS: bool  # whether its attention is fast with a bias that is added to the scores
    HAS_KERNELS: bool  # whether it has kernels of its own: for attention, angles and the loss, and in FP8
    ACTIVATIONS: Mapping[str, str]  # the ops of graph/ops.py that LayerNormMLP has -> its own names for them
    GATED_ACTIVATIONS: Mapping[str, str]  # the same of those whose result is multiplied with the other half
    # which half of an MLP's first product is activated there: "no" (none), "first half", "second half"
    GATES: tuple[str, ...]

    Linear: Callable[[], FusedOp]
    PaddedLinear: Callable[[], FusedOp]
    LayerNormLinear: Callable[..., FusedOp]
    LayerNormMLP: Callable[..., FusedOp]
    DotProductAttention: Callable[..., FusedOp]
    Experts: Callable[..., FusedOp]
    Rotary: Callable[[float], FusedOp]
    CrossEntropy: Callable[[], FusedOp]

    def recipe_of(self, asked: Any) -> Any:
        """The recipe of this name, or the recipe object itself; ValueError says why it does not run here."""

    def recipe_now(self) -> Any:
        """The recipe that is on, None where there is none."""

    def multiple(self, recipe: Any) -> int:
        """What the rows and columns of a product have to be a multiple of in this recipe."""


# Inputs of a product: below, TE's launches cost more than its bf16 kernels save (H100).
MIN_WIDTH = 2048


def choose(
    name: str, model: nn.Module, planning: bool = False, any_width: bool = False, in_recipe: bool = False
) -> tuple[Backend, str]:
    """The backend and a sentence on why it is the one.

    Args:
        name: "te", "torch" or "auto".
        model: what is to be converted.
        planning: nothing will run: where TE is missing, ops of its names and shapes stand for its own.
        any_width: TE is wanted in narrow models too: for a recipe, which only TE has, or in a compiled graph,
            where its launches cost the CPU nothing.
        in_recipe: TE is wanted for weights in float32 too, whose products run in a recipe under
            torch.autocast.

    Raises:
        BackendError: `name` is "te" and it cannot run here; the sentence says what is missing.
    """
    if name == "torch":
        return plain, "backend 'torch', as asked"
    missing = why_missing()
    if name == "te":
        if not missing:
            return _te(), "backend 'te', as asked"
        if planning:
            return planned, f"backend 'te', planned only, because {missing}"
        raise BackendError(f"backend='te' cannot be used: {missing}; pass backend='torch' or 'auto'")
    missing = missing or _unfit(model, in_recipe) or (None if any_width else _narrow(model))
    if missing:
        return plain, f"backend 'torch', because {missing}"
    return _te(), "backend 'te', because it runs here and the model is on the GPU"


def why_missing() -> str | None:
    """Why Transformer Engine does not run on this machine, or None."""
    if not cuda.is_available():
        return "this machine has no GPU that PyTorch can use"
    try:
        _te()
    except Exception as error:  # its libraries are loaded in there, and each fails in its own way
        reason = str(error).strip().splitlines() or [""]
        found = f"Transformer Engine cannot be imported ({type(error).__name__}: {reason[0]})"
        # what has run before may have loaded another version of a library, of cuDNN for example
        early = "; try to import transformer_engine.pytorch before any model runs"
        return found + (early if isinstance(error, OSError) else "")
    if cuda.get_device_capability() < (8, 0):
        return "this GPU is older than Ampere, which Transformer Engine needs"
    return None


def _unfit(model: nn.Module, in_recipe: bool) -> str | None:
    """Why TE's modules would not run for this model as it stands, or None."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    if any(not weight.is_cuda for weight in weights):
        return "the model is not on the GPU: move it there, or pass backend='te'"
    taken = {*DTYPES, torch.float32} if in_recipe or torch.is_autocast_enabled("cuda") else {*DTYPES}
    if any(weight.dtype not in taken for weight in weights):
        return (
            "the model's weights are not all bfloat16 or float16, and Transformer Engine multiplies "
            "float32 in TF32: convert them, or call the model within torch.autocast"
        )
    return None


def _narrow(model: nn.Module) -> str | None:
    """Why TE would make this model slower in bf16, or None."""
    widest = max((parameter.shape[1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    if widest < MIN_WIDTH:
        return (
            f"no product of the model has more than {widest} inputs, and Transformer Engine's launches cost "
            f"more than its bf16 kernels save below {MIN_WIDTH}: pass backend='te' or a recipe to have it "
            "anyway"
        )
    return None


def _te() -> Backend:
    from te_transform.backends import te

    return te
