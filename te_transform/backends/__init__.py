"""What fused modules are made of: `torch` (plain PyTorch) or `te` (NVIDIA Transformer Engine)."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

# no name `torch` in here: that is a module of this package
from torch import cuda, nn

from te_transform.backends.limits import DTYPES


class BackendError(RuntimeError):
    """The backend asked for cannot run here."""


_WIDE = 2048  # inputs of a product: below, TE's launches cost more than its bf16 kernels save (H100)


def choose(
    name: str, model: nn.Module, planning: bool = False, quantised: bool = False
) -> tuple[ModuleType | SimpleNamespace, str]:
    """The backend's module and a sentence on why it is the one.

    Args:
        name: "te", "torch" or "auto".
        model: what is to be converted.
        planning: nothing will run: where TE is missing, modules of its names and shapes stand for its own.
        quantised: a recipe is asked for, which only TE has.

    Raises:
        BackendError: `name` is "te" and it cannot run here; the sentence says what is missing.
    """
    from te_transform.backends import torch as plain

    if name == "torch":
        return plain, "backend 'torch', as asked"
    missing = _missing()
    if name == "te":
        if not missing:
            return _te(), "backend 'te', as asked"
        if planning:
            return _stand_in(plain), f"backend 'te', planned only, because {missing}"
        raise BackendError(f"backend='te' cannot be used: {missing}; pass backend='torch' or 'auto'")
    missing = missing or _unfit(model) or (None if quantised else _narrow(model))
    if missing:
        return plain, f"backend 'torch', because {missing}"
    return _te(), "backend 'te', because it runs here and the model is on the GPU"


def _missing() -> str | None:
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


def _unfit(model: nn.Module) -> str | None:
    """Why TE's modules would not run for this model as it stands, or None."""
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    if any(not weight.is_cuda for weight in weights):
        return "the model is not on the GPU: move it there first, or pass backend='te'"
    if any(weight.dtype not in DTYPES for weight in weights):
        return (
            "the model's weights are not all bfloat16 or float16, and Transformer Engine multiplies "
            "float32 in TF32: convert them first"
        )
    return None


def _narrow(model: nn.Module) -> str | None:
    """Why TE would make this model slower in bf16, or None."""
    widest = max((parameter.shape[1] for parameter in model.parameters() if parameter.dim() == 2), default=0)
    if widest < _WIDE:
        return (
            f"no product of the model has more than {widest} inputs, and Transformer Engine's launches cost "
            f"more than its bf16 kernels save below {_WIDE}: pass backend='te' or a recipe to have it anyway"
        )
    return None


def _te() -> ModuleType:
    from te_transform.backends import te

    return te


def _stand_in(plain: ModuleType) -> SimpleNamespace:
    """What plans ask of te.py, with plain PyTorch's modules: TE's names and shapes."""
    from te_transform.backends.cudnn import DotProductAttention

    def recipe_of(asked: object) -> object:
        if isinstance(asked, str) or type(asked).__module__.startswith("transformer_engine."):
            return asked
        raise ValueError(f"a {type(asked).__name__} is no TE recipe, one of TE's own or a name is needed")

    def multiple(recipe: object) -> int:
        return 32 if recipe == "mxfp8" or type(recipe).__name__ == "MXFP8BlockScaling" else 16

    own = {"NAME": "te", "PLAIN": False, "recipe_of": recipe_of, "multiple": multiple}
    return SimpleNamespace(**{**vars(plain), "DotProductAttention": DotProductAttention, **own})
