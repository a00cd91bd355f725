"""The precision of a converted model at run time: its forward runs in a recipe's autocast."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from te_transform.backends.joined import state_of
from te_transform.backends.limits import small_calls_in_fp8
from te_transform.backends.running import forget_weights, running
from te_transform.backends.tracing import in_backward, transformed


@dataclass(eq=False)
class Precision:
    """What a converted model runs in.

    Weights are quantized once, and kept, over the calls of te_transform.accumulate(), and in evaluation
    without gradients for as long as no weight has been written to.

    Args:
        recipe: TE's.
        products: whether the product that begins with the parameter of this name runs in the recipe: of
            layers that share an op, which then cannot know. Those that are not named run as their ops say.
        small_calls: whether calls of so few tokens that they are faster in their own dtype run in the
            recipe too.
    """

    recipe: Any
    products: Mapping[str, bool] = field(default_factory=dict)
    small_calls: bool = False
    entered: bool = False

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Let `model`, whose forward runs in here, do so in the recipe.

        TE ends a step of delayed scaling where the outermost autocast ends. So a forward within another one
        does not enter it again, nor one that a checkpoint repeats within a backward: there each op knows
        what it did. Under function transforms no op runs in a recipe, and TE could update no scales.
        """
        if self.entered or in_backward() or transformed():
            yield
            return
        from te_transform.backends import te

        weights_stay = not model.training and not _is_sharded(model)
        small = small_calls_in_fp8 if self.small_calls else contextlib.nullcontext()
        if not state_of(next(model.parameters())).told:
            self._tell(model)
        self.entered = True
        try:
            with te.autocast(self.recipe), small, running(weights_stay, partial(self._tell, model)):
                yield
        finally:
            self.entered = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let what runs within a forward do so in the model's own dtype meanwhile."""
        if not self.entered:
            yield
            return
        from te_transform.backends import te

        with te.autocast(self.recipe, enabled=False):
            yield

    def _tell(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            state = state_of(parameter)
            state.told = True
            if name in self.products:  # a tied parameter comes by each of its names, `products` has one
                state.in_fp8 = self.products[name]

    def forget(self, model: nn.Module) -> None:
        """Free the quantized weights that are kept; whatever was done to the model before, they are made
        anew."""
        forget_weights(model.parameters())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "entered": False}


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP fills the memory of the parameters anew in each call, of which their versions tell
    nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
