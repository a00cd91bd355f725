"""What happens to a converted model last: torch.compile."""

from __future__ import annotations

from torch import nn

from te_transform.config import Options


def finalise(model: nn.Module, options: Options) -> None:
    """Compile the model in place, if that was asked: it keeps its class, and compiles at its first call."""
    if options.compile:
        model.compile(mode=None if options.compile is True else options.compile)


def unfinalise(model: nn.Module) -> None:
    """Undo `finalise`, whether it was done or not."""
    # none was there before: check_model() refuses compiled models
    model.__dict__.pop("_compiled_call_impl", None)
