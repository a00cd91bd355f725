"""Scripts import this to load Transformer Engine's libraries before PyTorch loads a cuDNN of its own."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # --help needs no TE
    import transformer_engine.pytorch  # noqa: F401
