"""The precision of a converted model at run time: its forward runs in a recipe's autocast."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_transform.backends.joined import state_of
from te_transform.backends.limits import small_calls_in_fp8
from te_transform.backends.weight_cache import evaluating, forget_weights


@dataclass(eq=False)
class Precision:
    """What a converted model runs in.

    Weights are quantized once, and kept, over the calls of te_transform.accumulate(), and in evaluation without
    gradients for as long as no weight has been written to.

    Args:
        recipe: TE's.
        products: whether the product that begins with the parameter of this name runs in the recipe. Those that
            are not named do what their op says; layers may share one op.
        small_calls: whether calls of so few tokens that they are faster in their own dtype run in the recipe too.
    """

    recipe: Any
    products: Mapping[str, bool] = field(default_factory=dict)
    small_calls: bool = False
    running_now: bool = False
    known: weakref.ref | None = None  # the model whose parameters have been told

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Let `model`, whose forward runs in here, do so in the recipe.

        TE ends a step of delayed scaling where the outermost autocast ends. So a forward within another one does
        not enter it again, nor one that a checkpoint repeats within a backward: there each op knows what it did.
        """
        if self.running_now or torch._C._current_graph_task_id() != -1:
            yield
            return
        from te_transform.backends import te

        self._tell(model)
        self.running_now = True
        try:
            small = small_calls_in_fp8() if self.small_calls else contextlib.nullcontext()
            with te.autocast(self.recipe), small, evaluating(not model.training and not _is_sharded(model)):
                yield
        finally:
            self.running_now = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let what runs in here run in its own dtype, although a forward is under way."""
        from te_transform.backends import te

        with te.autocast(self.recipe, enabled=False):
            yield

    def _tell(self, model: nn.Module) -> None:
        if self.known is None or self.known() is not model:
            self.known = weakref.ref(model)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            for name, inside in self.products.items():
                state_of(parameters[name]).in_fp8 = inside

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "running_now": False, "known": None}  # a copy has other parameters

    def forget(self, model: nn.Module) -> None:
        """Free the quantized weights that are kept; whatever was done to the model before, they are made anew."""
        forget_weights(model.parameters())


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP fills the memory of the parameters anew in each call, of which their versions tell nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)
