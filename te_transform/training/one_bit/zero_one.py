"""0/1 Adam, arXiv 2202.06009."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from te_transform.training.one_bit import checks
from te_transform.training.one_bit.adam import OneBitAdam, descend
from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.optimizer import GradientsOf


class ZeroOneAdam(OneBitAdam):
    """Adam with a variance that is updated at growing intervals, then frozen, and with local steps at last.

    Until `var_freeze_step`, gradients are averaged at the multiples of an interval. These steps update m and
    v. The interval doubles after every `var_update_scaler` of them. In all other steps, m takes the
    compressed mean of the gradients.

    After `var_freeze_step`, v is constant, and each rank takes local steps with its own gradients. The ranks
    exchange them at the end of each interval of up to `local_step_clipper` steps. Between exchanges, weights
    differ among ranks. synchronize() makes them equal: call it before you save a model. All other arguments
    are the same as for OneBitAdam.

    Args:
        var_freeze_step: the number of steps after which the variance is frozen.
        var_update_scaler: the number of full steps after which their interval doubles.
        local_step_scaler: the number of steps after which the interval of exchanges doubles.
        local_step_clipper: the largest interval of exchanges, in steps.

    Raises:
        OneBitError: see OneBitAdam.
    """

    _buffers = (*OneBitAdam._buffers, "shared_weight", "local_change")  # fp32: weights all ranks had last

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
            checks.check_steps(name, steps)
        self.var_update_scaler, self.local_step_scaler = var_update_scaler, local_step_scaler
        self.local_step_clipper = local_step_clipper
        self._divisor: Tensor | None = None  # sqrt(v) + eps, until the freeze
        super().__init__(params, lr, betas, eps, weight_decay, var_freeze_step, process_group)
        self._note(full_steps=0, frozen_at=0, local_steps=0, lr_sum=0.0)

    @property
    def needs_averaged_gradients(self) -> bool:
        """True if the next step updates the variance."""
        interval = 2 ** (self.param_groups[0]["full_steps"] // self.var_update_scaler)
        return not self.frozen and (self.steps + 1) % interval == 0

    @property
    def is_synchronized(self) -> bool:
        """True if all ranks have the same weights: no local step was taken since the last exchange."""
        return self.param_groups[0]["local_steps"] == 0

    def _warm_up(self, gradients: GradientsOf) -> None:
        self._start()
        if is_full := self.needs_averaged_gradients:
            self._update_variance(gradients)
            self._note(full_steps=self.param_groups[0]["full_steps"] + 1)
        self._decay()
        for group, present in self._groups_with(gradients.__contains__):
            given = [gradients[p] for p in present]
            torch._foreach_add_(*self._views(present, "exp_avg"), given, alpha=1 - group["betas"][0])
        if not is_full:
            self._exchange_momentum()
        with self._weights() as weights:
            for group, trained in self._groups_with(self._has_trained):
                (momenta,), sizes = self._views(trained, "exp_avg"), self._denominators(trained)
                updates = torch._foreach_div(momenta, sizes)
                torch._foreach_div_(updates, 1 - group["betas"][0] ** (self.steps + 1))
                descend(group, [weights[p] for p in trained], updates)

    def _exchange_momentum(self) -> None:
        """Replace m by its compressed mean over ranks. The ranks exchange m / (sqrt(v) + eps)."""
        momentum, denominator = self._flat["exp_avg"], self._denominator
        self._mean(momentum.div_(denominator))
        momentum.mul_(denominator.masked_fill(denominator.isinf(), 0.0))  # unused elements, and padding

    def _update_variance(self, gradients: GradientsOf) -> None:
        """Update v, and rescale the errors to the new m / (sqrt(v) + eps)."""
        before = None if self._exchange is None else self._denominator
        for group, present in self._groups_with(gradients.__contains__):
            for state in (self.state[p] for p in present):
                state["step"] += 1  # of the variance
            (variances,), given = self._views(present, "exp_avg_sq"), [gradients[p] for p in present]
            torch._foreach_mul_(variances, group["betas"][1])
            torch._foreach_addcmul_(variances, given, given, value=1 - group["betas"][1])
        self._divisor = None
        if self._exchange is not None and before is not None:
            ratio = (before / self._denominator).nan_to_num_(nan=0.0, posinf=0.0)
            self._exchange.scale_errors(ratio)
        self._has_unused = None

    @property
    def _denominator(self) -> Tensor:
        """Return the flat sqrt(v) + eps. Until the freeze, each change of v recomputes it."""
        if self.frozen:
            return super()._denominator
        if self._divisor is None:
            self._divisor = self._to_denominator_(self._corrected_variance())
        return self._divisor

    def _reset(self) -> None:
        super()._reset()
        self._divisor = None

    def _corrected_variance(self) -> Tensor:
        layout, flat = self._layout, self._flat["exp_avg_sq"].clone()
        for group, trained in self._groups_with(self._has_trained):
            for parameter in trained:
                correction = 1 - group["betas"][1] ** self.state[parameter]["step"].item()
                layout.view(flat, parameter).div_(correction)
        return flat

    def _correct(self) -> None:
        """Bias correct m and v, and reset the errors for the local steps."""
        for group, (part,) in self._parts(self._flat["exp_avg"]):
            part.div_(1 - group["betas"][0] ** self.steps)
        self._flat["exp_avg_sq"].copy_(self._corrected_variance())
        self._exchange = self._divisor = None
        self._note(frozen_at=self.steps)

    def _compressed(self, gradients: GradientsOf) -> None:
        if self._layout.world_size == 1:
            return super()._compressed(gradients)
        if self.is_synchronized:
            self._share_weights()
        self._add_to_update(gradients)
        with self._weights() as weights:
            for group, trained in self._groups_with(self._has_trained):
                updates, changes, shared = self._views(trained, "exp_avg", "local_change", "shared_weight")
                descend(group, [weights[p] for p in trained], updates)
                descend(group, changes, updates)
                if group["weight_decay"]:
                    torch._foreach_mul_(shared, 1 - float(group["lr"]) * group["weight_decay"])
        for group in self.param_groups:
            group["lr_sum"] += float(group["lr"])
        self._note(local_steps=self.param_groups[0]["local_steps"] + 1)
        doublings = (self.steps - self.param_groups[0]["frozen_at"]) // self.local_step_scaler
        if self.param_groups[0]["local_steps"] >= min(2**doublings, self.local_step_clipper):
            self._exchange_local_steps()

    def synchronize(self) -> None:
        """Exchange local steps and errors: all ranks then have the same weights. Collective."""
        if not self.is_synchronized:
            self._exchange_local_steps()
        super().synchronize()

    @torch.no_grad()
    def _exchange_local_steps(self) -> None:
        """Exchange the mean update of the local steps, and repeat these steps with the common update.

        The paper exchanges the change of the weights. Its error would be divided by the learning rates of the
        next steps. Momenta would then grow without limit as the learning rate falls.
        """
        update, change = self._flat["exp_avg"], self._flat["local_change"]
        for group, (own, total) in self._parts(update, change):
            if group["lr_sum"] > 0:
                torch.div(total, -group["lr_sum"], out=own)
        self._mean(update)
        self._clear_unused(update)
        with self._weights() as weights:
            for group, own in zip(self.param_groups, self._layout.groups, strict=True):
                if own:
                    shared, updates = self._views(list(own), "shared_weight", "exp_avg")
                    moved = [weights[p] for p in own]
                    torch._foreach_copy_(moved, shared)
                    torch._foreach_add_(moved, updates, alpha=-group["lr_sum"])
        change.zero_()
        self._note(local_steps=0, lr_sum=0.0)

    def _share_weights(self) -> None:
        """Store the common weights. Subtracting the local steps instead would round differently per rank."""
        parameters = list(self._layout.parameters)
        torch._foreach_copy_(*self._views(parameters, "shared_weight"), parameters)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return one state for any number of ranks; see OneBitAdam.

        Raises:
            OneBitError: there are local steps that are not exchanged yet.
        """
        if not self.is_synchronized:
            steps = self.param_groups[0]["local_steps"]
            raise OneBitError(
                f"expected weights that all ranks share, got {steps} local steps since the last exchange; "
                "call synchronize() before the model and the optimizer are saved"
            )
        return super().gathered_state_dict()
