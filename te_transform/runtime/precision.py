"""The precision of a converted model at run time: its forward runs in a recipe's autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from te_transform.slots import Made
from te_transform.weights import is_quantised


@dataclass
class Amax:
    """The largest absolute values around one product, as 0-dim tensors; None where nothing was seen."""

    input: Tensor | None
    weight: Tensor
    grad: Tensor | None = None


@dataclass(eq=False)
class Kept:
    """Whether fused modules, which share one of these, may use weights that an earlier call quantised.

    Apart from Precision, which knows all modules: a copy of one of them shall not be one of all.
    """

    weights: bool = False
    grad: bool = False  # whether they were quantised for a backward too
    settle: Callable[[], None] | None = None  # what finds that out, in a call in which nobody has asked yet

    def may_be_used(self) -> bool:
        """Whether they may in this call, and under this gradient mode."""
        settle, self.settle = self.settle, None
        if settle is not None:
            settle()
        return self.weights and self.grad == torch.is_grad_enabled()


@dataclass(eq=False)
class Precision:
    """A recipe, and the fused modules that run in it.

    Weights are quantised once, and kept, over the calls of te_transform.accumulate(), and in evaluation
    without gradients for as long as no weight has been written to.
    """

    recipe: Any  # TE's
    modules: list[nn.Module]
    kept: Kept = field(default_factory=Kept)
    accumulating: bool = False
    stamp: tuple | None = None  # of the weights when they were quantised

    @torch.compiler.disable  # TE's kernels break compiled graphs, and its delayed scaling cannot be compiled
    def run(self, model: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """One call of the model's own forward."""
        from te_transform.backends import te

        # what to look at is every weight: only where a call has use for that
        self.kept.settle = partial(self._keep, model.training, torch.is_grad_enabled())
        self.kept.weights = False
        try:
            with te.autocast(self.recipe):
                return forward(*args, **kwargs)
        finally:
            self.kept.settle = None

    def _keep(self, training: bool, grad: bool) -> None:
        stamp = None
        if self.accumulating:
            stamp = grad, ()
        elif not training and not grad:
            weights = [getattr(module, name) for module in self.modules for name in module.weight_names]
            weights = [weight for weight in weights if not is_quantised(weight)]  # there is nothing to keep
            if not any(weight.is_inference() for weight in weights):
                # not by id(), which a later tensor may have again
                held = ((WeakIdRef(weight), weight.data_ptr(), weight._version) for weight in weights)
                stamp = False, tuple(held)
        if stamp != self.stamp:
            self.forget()
        self.stamp, self.kept.weights, self.kept.grad = stamp, stamp is not None, grad

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stamp": None}  # a copy has other weights

    def forget(self) -> None:
        """Free the weights that were kept."""
        for module in self.modules:
            module.forget_weights()
        self.stamp, self.kept.weights = None, False


class AutocastSlot(Made):
    """The converted model: its forward runs in its precision."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._te_transform_precision.run(self, super().forward, args, kwargs)

    def train(self, mode: bool = True) -> AutocastSlot:
        """As nn.Module's; kept weights are made anew, whatever was done to the model before."""
        self._te_transform_precision.forget()
        return super().train(mode)


def precisions(converted: nn.Module) -> dict[str, Precision]:
    """What a model runs in, by the paths of the converted models in it; its own path is ""."""
    held = {path: vars(m).get("_te_transform_precision") for path, m in converted.named_modules()}
    return {path: precision for path, precision in held.items() if precision is not None}
