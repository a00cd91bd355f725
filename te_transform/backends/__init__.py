"""What the fused modules are made of: `torch` (plain PyTorch, anywhere) or `te` (NVIDIA Transformer
Engine)."""

from __future__ import annotations

from types import ModuleType


class BackendError(RuntimeError):
    """The backend asked for cannot run here."""


def choose(name: str) -> tuple[ModuleType, str]:
    """The backend's module and a sentence on why it is the one.

    Raises:
        BackendError: `name` is "te"; the sentence says what is missing.
    """
    from te_transform.backends import torch as plain

    if name == "torch":
        return plain, "backend 'torch', as asked"
    missing = "te_transform has no Transformer Engine backend yet"
    if name == "te":
        raise BackendError(f"backend='te' cannot be used: {missing}; pass backend='torch' or 'auto'")
    return plain, f"backend 'torch', because {missing}"
