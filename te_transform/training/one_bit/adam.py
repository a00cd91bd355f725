"""1-bit Adam, arXiv 2102.02888."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adam import adam

from te_transform.training.one_bit import checks
from te_transform.training.one_bit.optimizer import GradientsOf, OneBitOptimizer

CHANGE = 0.04  # the relative change of norm1(v) over 1 / (1 - beta2) steps below which "auto" freezes v
CHECKS = 10  # the number of checks of norm1(v) in 1 / (1 - beta2) steps


class OneBitAdam(OneBitOptimizer):
    """Adam whose ranks exchange one bit per element of a matrix after the variance is frozen.

    Warm-up: bitwise torch.optim.AdamW (torch.optim.Adam without weight decay) on averaged gradients, for fp32
    weights. Then v is constant, and with u = m / (sqrt(v) + eps) and q the compressed mean over ranks:

        u = q(beta1 * u + (1 - beta1) * own gradient / (sqrt(v) + eps))
        p -= lr * (u + weight_decay * p)

    The paper exchanges m instead of u. An exchange gives all elements the same size. Elements with a small v,
    such as rows of rare tokens, would then take steps of unlimited length. At the freeze, m and v are bias
    corrected. Elements with v = 0 get no update.

    Args:
        params: as in torch.optim.Optimizer. Groups may have their own lr, betas, eps and weight_decay.
        weight_decay: decoupled, as in AdamW, in both phases.
        freeze_step: the number of warm-up steps, 15% to 25% of training. "auto" freezes v as soon as norm1(v)
            changes by less than 4% over 1 / (1 - beta2) steps without a rise of the learning rate.
        process_group: the ranks; by default all.

    Raises:
        OneBitError: there is no process group, or an option is out of range. Parameters are sharded (FSDP,
            tensor parallelism), or not in fp32, bf16 or fp16.
    """

    _buffers = ("exp_avg", "exp_avg_sq")  # from the freeze on: u, and sqrt(v) + eps

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int | Literal["auto"] = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if freeze_step != "auto":
            checks.check_steps("freeze_step", freeze_step)
        self.freeze_step = freeze_step
        self._has_unused: bool | None = None  # True if an element had no gradient before the freeze
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"variances": [], "last_lr": math.inf}  # for "auto"
        super().__init__(params, defaults, process_group)

    @property
    def needs_averaged_gradients(self) -> bool:
        """True during the warm-up."""
        return not self.frozen

    def _update(self, gradients: GradientsOf) -> None:
        if self.frozen:
            self._compressed(gradients)
        else:
            self._warm_up(gradients)
        self._note(steps=self.steps + 1)
        if not self.frozen and self._is_steady():
            self._freeze()
            self._note(frozen=True, variances=[])

    def _warm_up(self, gradients: GradientsOf) -> None:
        self._start()
        with self._weights() as weights:
            for group, present in self._groups_with(gradients.__contains__):
                self._adam(group, present, weights, gradients)

    def _adam(
        self,
        group: dict[str, Any],
        present: list[nn.Parameter],
        weights: dict[nn.Parameter, Tensor],
        gradients: GradientsOf,
    ) -> None:
        """Take a step of torch.optim.AdamW. It is fused on a GPU if all weights are 16-bit copies."""
        momenta, variances, steps = self._views(present, "exp_avg", "exp_avg_sq", "step")
        is_fused = present[0].is_cuda and all(weights[p] is not p for p in present)
        adam(
            [weights[p] for p in present],
            [gradients[p] for p in present],
            momenta,
            variances,
            [],
            [*torch.stack(steps).to(present[0].device)] if is_fused else steps,
            fused=is_fused or None,
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if is_fused:  # the fused step counts on the GPU
            torch._foreach_add_(steps, 1)

    def _reset(self) -> None:
        super()._reset()
        self._has_unused = None

    def _is_steady(self) -> bool:
        """Return True if the variance must be frozen now. Rank 0 decides for all ranks."""
        if self.freeze_step != "auto":  # torch.distributed.checkpoint makes a first step without gradients
            return self.steps >= self.freeze_step and self._norm_of_variance().item() > 0
        span = math.ceil(1 / (1 - max(group["betas"][1] for group in self.param_groups)) - 1e-6)
        every = max(span // CHECKS, 1)
        if self.steps % every:
            return False
        norm = self._norm_of_variance()
        if self._layout.world_size > 1:
            dist.broadcast(norm, group=self.process_group, group_src=0)
        before = [] if self._warms_up_rate() else self.param_groups[0]["variances"]
        variances = [*before, norm.item()][-(span // every) - 1 :]
        self._note(variances=variances)
        change = abs(variances[-1] - variances[0])
        return len(variances) > span // every and change < CHANGE * variances[0]

    def _warms_up_rate(self) -> bool:
        """Return True if a learning rate has risen since the last check."""
        rises = False
        for group in self.param_groups:
            rate = float(group["lr"])
            rises |= rate > group["last_lr"]
            group["last_lr"] = rate
        return rises

    def _norm_of_variance(self) -> Tensor:
        """Return the bias-corrected norm1 of the variance, in fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self._layout.device)
        for group, (part,) in self._parts(self._flat["exp_avg_sq"]):
            total += part.sum(dtype=torch.float64) / (1 - group["betas"][1] ** self.steps)
        return total

    def _freeze(self) -> None:
        """Replace v by sqrt(v) + eps, or infinity for v = 0, and m by m / (sqrt(v) + eps), bias corrected."""
        self._correct()
        self._to_denominator_(self._flat["exp_avg_sq"])
        self._flat["exp_avg"].div_(self._flat["exp_avg_sq"])

    def _correct(self) -> None:
        for group, trained in self._groups_with(self._has_trained):
            for state in (self.state[p] for p in trained):
                step = state["step"].item()
                state["exp_avg"].div_(1 - group["betas"][0] ** step)
                state["exp_avg_sq"].div_(1 - group["betas"][1] ** step)

    def _to_denominator_(self, variance: Tensor) -> Tensor:
        """Turn a flat variance into sqrt(v) + eps, or infinity for v = 0."""
        denominator = variance.masked_fill_(variance == 0, math.inf).sqrt_()
        for group, (part,) in self._parts(denominator):
            part.add_(group["eps"])
        return denominator

    @property
    def _denominator(self) -> Tensor:
        """Return sqrt(v) + eps, flat."""
        return self._flat["exp_avg_sq"]

    def _denominators(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        layout, denominator = self._layout, self._denominator
        return [layout.view(denominator, p) for p in parameters]

    def _clear_unused(self, values: Tensor) -> None:
        """Zero the elements without a gradient before the freeze. An exchange gives them a nonzero value."""
        denominator = self._denominator
        if self._has_unused is None:
            sizes = self._denominators(list(self._layout.parameters))
            self._has_unused = torch.stack([size.isinf().any() for size in sizes]).any().item()
        if self._has_unused:
            values.masked_fill_(denominator.isinf(), 0.0)

    def _compressed(self, gradients: GradientsOf) -> None:
        self._exchange_update(gradients)
        with self._weights() as weights:
            for group, trained in self._groups_with(self._has_trained):
                self._descend(group, trained, weights)

    def _exchange_update(self, gradients: GradientsOf) -> None:
        """Add the gradients to u, and replace u by its compressed mean over ranks."""
        self._add_to_update(gradients)
        self._mean(self._flat["exp_avg"])
        self._clear_unused(self._flat["exp_avg"])

    def _add_to_update(self, gradients: GradientsOf) -> None:
        """Compute beta1 * u + (1 - beta1) * g / denominator. A missing gradient counts as zeros."""
        self._decay()
        for group, present in self._groups_with(gradients.__contains__):
            (updates,), given = self._views(present, "exp_avg"), [gradients[p] for p in present]
            denominators = self._denominators(present)
            torch._foreach_addcdiv_(updates, given, denominators, value=1 - group["betas"][0])

    def _decay(self) -> None:
        """Multiply the momentum by beta1 of each group."""
        for group, (part,) in self._parts(self._flat["exp_avg"]):
            part.mul_(group["betas"][0])

    def _has_trained(self, parameter: nn.Parameter) -> bool:
        """Return False for empty parameters, and for parameters that got no gradient in the warm-up."""
        return parameter.numel() > 0 and self.state[parameter]["step"].item() > 0

    def _views(self, parameters: list[nn.Parameter], *names: str) -> list[list[Tensor]]:
        return [[self.state[p][name] for p in parameters] for name in names]

    def _descend(
        self, group: dict[str, Any], trained: list[nn.Parameter], weights: dict[nn.Parameter, Tensor]
    ) -> None:
        descend(group, [weights[p] for p in trained], *self._views(trained, "exp_avg"))


def descend(group: dict[str, Any], weights: list[Tensor], updates: list[Tensor]) -> None:
    """Compute p = (1 - lr * weight_decay) * p - lr * update for each weight, as AdamW does."""
    lr = float(group["lr"])
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    torch._foreach_add_(weights, updates, alpha=-lr)
