"""0/1 Adam, arXiv 2202.06009."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_transform.training.one_bit import checks
from te_transform.training.one_bit.adam import OneBitAdam
from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.layout import Layout
from te_transform.training.one_bit.optimizer import Gradients


class ZeroOneAdam(OneBitAdam):
    """Adam with a variance that is updated at fewer and fewer steps, then frozen, then with local steps.

    Until `var_freeze_step`, gradients are averaged at each step that is a multiple of an interval, which
    doubles after every `var_update_scaler` such steps; these steps update m and v. At the others, m takes the
    compressed mean of the gradients. Then v is constant and each rank takes steps by its own gradients, which
    are exchanged at the end of each interval of up to `local_step_clipper` steps. Between exchanges, weights
    differ from rank to rank; synchronize() makes them equal, as before saving a model.

    Args:
        params, lr, betas, eps, weight_decay, process_group: as in OneBitAdam.
        var_freeze_step: the number of steps after which the variance is frozen.
        var_update_scaler: the number of full steps after which their interval doubles.
        local_step_scaler: the number of steps after which the interval of exchanges doubles.
        local_step_clipper: the largest interval of exchanges, in steps.

    Raises:
        OneBitError: as OneBitAdam does.
    """

    _buffers = ("exp_avg", "exp_avg_sq", "denominator", "shared_weight", "local_update")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32768,
        local_step_clipper: int = 16,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        counts = {
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        for name, steps in counts.items():
            checks.check_count(name, steps)
        self.var_update_scaler, self.local_step_scaler = var_update_scaler, local_step_scaler
        self.local_step_clipper = local_step_clipper
        super().__init__(params, lr, betas, eps, weight_decay, var_freeze_step, process_group)
        self._note(full_steps=0, frozen_at=0, local_steps=0, lr_sum=0.0)

    @property
    def needs_averaged_gradients(self) -> bool:
        """True if the next step updates the variance."""
        interval = 2 ** (self.param_groups[0]["full_steps"] // self.var_update_scaler)
        return not self.frozen and (self.steps + 1) % interval == 0

    @property
    def is_synchronized(self) -> bool:
        """True if all ranks have the same weights, that is, no local step was taken since an exchange."""
        return self.param_groups[0]["local_steps"] == 0

    def _warm_up(self, layout: Layout, gradients: Gradients) -> None:
        self._start()
        is_full = self.needs_averaged_gradients
        if is_full:
            self._update_variance(layout, gradients)
            self._note(full_steps=self.param_groups[0]["full_steps"] + 1)
        else:
            gradients = self._compressed_gradients(layout, gradients)
        self._add_to_momentum(layout, gradients)
        with self._weights(layout) as weights:
            for group, trained in zip(self.param_groups, layout.groups, strict=True):
                present = [p for p in trained if self._has_trained(p)]
                denominators = [self._denominator(self.state[p], group) for p in present]
                if present:
                    correction = 1 - group["betas"][0] ** (self.steps + 1)
                    changes = self._changes(group, present, weights, denominators, correction)
                    torch._foreach_add_([weights[p] for p in present], changes)

    def _update_variance(self, layout: Layout, gradients: Gradients) -> None:
        for group, trained in zip(self.param_groups, layout.groups, strict=True):
            present, beta2 = [p for p in trained if p in gradients], group["betas"][1]
            for state in (self.state[p] for p in present):
                state["step"] += 1  # of the variance
            if present:
                own, variances = (
                    [gradients[p] for p in present],
                    [self.state[p]["exp_avg_sq"] for p in present],
                )
                torch._foreach_mul_(variances, beta2)
                torch._foreach_addcmul_(variances, own, own, value=1 - beta2)

    def _compressed_gradients(self, layout: Layout, gradients: Gradients) -> Gradients:
        flat = layout.buffer()
        views = {p: layout.view(flat, p) for p in layout.parameters}
        if gradients:
            torch._foreach_copy_([views[p] for p in gradients], list(gradients.values()))
        self._mean(flat)
        return views

    @staticmethod
    def _denominator(state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        variance = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"].item())
        return variance.masked_fill_(variance == 0, math.inf).sqrt_().add_(group["eps"])

    def _changes(
        self,
        group: dict[str, Any],
        trained: list[nn.Parameter],
        weights: dict[nn.Parameter, Tensor],
        denominators: list[Tensor],
        correction: float = 1.0,
    ) -> list[Tensor]:
        """Return -lr * (m / correction / denominator + weight_decay * p), fp32, for each parameter."""
        changes = torch._foreach_div([self.state[p]["exp_avg"] for p in trained], denominators)
        torch._foreach_mul_(changes, -float(group["lr"]) / correction)
        if group["weight_decay"]:
            decay = -float(group["lr"]) * group["weight_decay"]
            torch._foreach_add_(changes, [weights[p] for p in trained], alpha=decay)
        return changes

    def _correct(self, layout: Layout) -> None:
        """Correct m and v, and start phase 2 without errors, from the weights of now."""
        for group, trained in zip(self.param_groups, layout.groups, strict=True):
            for state in (self.state[p] for p in trained):
                state["exp_avg"].div_(1 - group["betas"][0] ** self.steps)
                if (step := state["step"].item()) > 0:
                    state["exp_avg_sq"].div_(1 - group["betas"][1] ** step)
        self._exchange = None
        self._buffer("local_update")
        self._buffer("shared_weight")
        self._share_weights(layout)
        self._note(frozen_at=self.steps)

    def _compressed(self, layout: Layout, gradients: Gradients) -> None:
        if layout.world_size == 1:
            return super()._compressed(layout, gradients)
        self._add_to_momentum(layout, gradients)
        with self._weights(layout) as weights:
            for group, own in zip(self.param_groups, layout.groups, strict=True):
                if trained := [p for p in own if self._has_trained(p)]:
                    states = [self.state[p] for p in trained]
                    changes = self._changes(group, trained, weights, [s["denominator"] for s in states])
                    torch._foreach_add_([state["local_update"] for state in states], changes)
                    torch._foreach_add_([weights[p] for p in trained], changes)
                group["lr_sum"] += float(group["lr"])
        self._note(local_steps=self.param_groups[0]["local_steps"] + 1)
        doublings = (self.steps - self.param_groups[0]["frozen_at"]) // self.local_step_scaler
        if self.param_groups[0]["local_steps"] >= min(2**doublings, self.local_step_clipper):
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Exchange the local steps, so that all ranks have the same weights; a collective, at any time."""
        if self.is_synchronized:
            return
        layout, update, denominator = self._laid_out(), self._flat["local_update"], self._flat["denominator"]
        update.mul_(denominator).masked_fill_(denominator.isinf(), 0.0)
        self._mean(update)
        for index, group in enumerate(self.param_groups):
            if group["lr_sum"] > 0:
                parts = (layout.parts(flat, index) for flat in (self._flat["exp_avg"], update))
                for momentum, total in zip(*parts, strict=True):
                    torch.div(total, -group["lr_sum"], out=momentum)
        update.div_(denominator)
        with self._weights(layout) as weights:
            targets = [weights[p] for p in layout.parameters]
            torch._foreach_copy_(targets, [self.state[p]["shared_weight"] for p in layout.parameters])
            torch._foreach_add_(targets, [self.state[p]["local_update"] for p in layout.parameters])
        self._share_weights(layout)
        update.zero_()
        self._note(local_steps=0, lr_sum=0.0)

    def _share_weights(self, layout: Layout) -> None:
        """Keep the weights that all ranks have: adding and subtracting steps would round on each rank."""
        shared = [self.state[p]["shared_weight"] for p in layout.parameters]
        torch._foreach_copy_(shared, list(layout.parameters))

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return one state for any number of ranks; see OneBitAdam.

        Raises:
            OneBitError: local steps were taken that are not exchanged yet.
        """
        if not self.is_synchronized:
            steps = self.param_groups[0]["local_steps"]
            raise OneBitError(
                f"expected weights that all ranks share, got {steps} local steps since the last exchange; "
                "call synchronize() before the model and the optimizer are saved"
            )
        return super().gathered_state_dict()
