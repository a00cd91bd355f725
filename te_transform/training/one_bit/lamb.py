"""1-bit LAMB, arXiv 2104.06069."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_transform.training.one_bit.adam import OneBitAdam
from te_transform.training.one_bit.optimizer import GradientsOf

COEFFICIENTS = 0.01, 10.0  # bounds of norm(weight) / norm(update) in the warm-up
AVERAGED = 0.9  # the decay of the running mean of these ratios
FACTORS = 0.5, 4.0  # bounds of the factor that follows the variance after the freeze
STEP_OF_FACTOR = 0.1  # the largest relative change of a factor per step


class OneBitLamb(OneBitAdam):
    """LAMB whose ranks exchange one bit per element of a matrix after the variance is frozen.

    Warm-up: LAMB on averaged gradients, with bias correction. The ratio of norms c of each parameter is
    clipped to [0.01, 10]. Then v is constant, and c is its exponential mean in the warm-up. u is exchanged as
    in OneBitAdam, while the paper scales the momentum of each parameter. A factor f per parameter follows the
    variance of the gradients that u implies:

        p -= lr * c * f * (u + weight_decay * p)

    Arguments and errors are the same as in OneBitAdam. The ratio of norms includes `weight_decay`.
    """

    _buffers = (*OneBitAdam._buffers, "relative_variance")
    _scalars = ("step", "coefficient", "factor")

    def _warm_up(self, gradients: GradientsOf) -> None:
        self._start()
        with self._weights() as weights:
            for group, present in self._groups_with(gradients.__contains__):
                states = [self.state[p] for p in present]
                updates = _lamb_updates(states, [gradients[p] for p in present], group)
                _apply_updates(states, [weights[p] for p in present], updates, group)

    def _start(self) -> None:
        super()._start()
        for parameter in self._layout.parameters:
            state, one = self.state[parameter], torch.ones((), dtype=torch.float32, device=parameter.device)
            state.setdefault("coefficient", torch.zeros_like(one))
            state.setdefault("factor", one)

    def _freeze(self) -> None:
        """Freeze v and c. From now on, the variance is tracked as a multiple of (sqrt(v) + eps) ** 2."""
        super()._freeze()
        for group, (relative, size) in self._parts(self._flat["relative_variance"], self._denominator):
            torch.sub(1.0, group["eps"] / size, out=relative).square_()
        for state in (self.state[p] for p in self._layout.parameters if self._has_trained(p)):
            state["coefficient"].div_(1 - AVERAGED ** state["step"].item())

    def _exchange_update(self, gradients: GradientsOf) -> None:
        """Exchange u, and track the variance of the gradients that the change of u implies."""
        before, update = self._flat["exp_avg"].clone(), self._flat["exp_avg"]
        super()._exchange_update(gradients)
        for group, (old, new, variance) in self._parts(before, update, self._flat["relative_variance"]):
            beta1, beta2 = group["betas"]
            gradient = new.sub(old, alpha=beta1).div_(1 - beta1)
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _descend(
        self, group: dict[str, Any], trained: list[nn.Parameter], weights: dict[nn.Parameter, Tensor]
    ) -> None:
        moved, states = [weights[p] for p in trained], [self.state[p] for p in trained]
        updates, shares = [state["exp_avg"] for state in states], None
        if group["weight_decay"]:
            norms = torch.stack(torch._foreach_norm(updates))
            updates = torch._foreach_add(updates, moved, alpha=group["weight_decay"])
            shares = (norms / torch.stack(torch._foreach_norm(updates))).nan_to_num(1.0).clamp(max=1.0)
        factors = self._factors(states, group["eps"], shares)
        coefficients = torch.stack([state["coefficient"] for state in states]) * factors
        updates = torch._foreach_mul(updates, list(coefficients.unbind()))
        torch._foreach_add_(moved, updates, alpha=-float(group["lr"]))

    def _factors(self, states: list[dict[str, Any]], eps: float, shares: Tensor | None) -> Tensor:
        """Return the factor of each parameter, and keep it for the next step."""
        sizes = [state["exp_avg_sq"] for state in states]
        ratios = torch._foreach_sqrt([state["relative_variance"] for state in states])
        torch._foreach_addcdiv_(ratios, [torch.full_like(size, eps) for size in sizes], sizes)
        torch._foreach_reciprocal_(ratios)
        if self._has_unused:
            for ratio, size in zip(ratios, sizes, strict=True):
                ratio.masked_fill_(size.isinf(), 0.0)
        factors = torch.stack(torch._foreach_norm(ratios, float("inf")))
        if shares is not None:
            factors = factors * shares + 1 - shares
        last = torch.stack([state["factor"] for state in states])
        factors = factors.clamp(*FACTORS).clamp(last * (1 - STEP_OF_FACTOR), last * (1 + STEP_OF_FACTOR))
        torch._foreach_copy_([state["factor"] for state in states], list(factors.unbind()))
        return factors


def _lamb_updates(
    states: list[dict[str, Any]], gradients: list[Tensor], group: dict[str, Any]
) -> list[Tensor]:
    """Update m and v, and return m / (sqrt(v) + eps) of each parameter, bias corrected."""
    (beta1, beta2), names = group["betas"], ("exp_avg", "exp_avg_sq", "step")
    momenta, variances, steps = ([state[name] for state in states] for name in names)
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(momenta, gradients, 1 - beta1)
    torch._foreach_mul_(variances, beta2)
    torch._foreach_addcmul_(variances, gradients, gradients, value=1 - beta2)
    taken = [step.item() for step in steps]
    denominators = torch._foreach_div(variances, [1 - beta2**step for step in taken])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, group["eps"])
    updates = torch._foreach_div(momenta, [1 - beta1**step for step in taken])
    torch._foreach_div_(updates, denominators)
    return updates


def _apply_updates(
    states: list[dict[str, Any]], weights: list[Tensor], updates: list[Tensor], group: dict[str, Any]
) -> None:
    """Update the weights, and the running mean of the ratios of norms."""
    if group["weight_decay"]:
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
    ratios, means = list(_ratios(weights, updates).unbind()), [state["coefficient"] for state in states]
    torch._foreach_mul_(means, AVERAGED)
    torch._foreach_add_(means, ratios, alpha=1 - AVERAGED)
    torch._foreach_mul_(updates, ratios)
    torch._foreach_add_(weights, updates, alpha=-float(group["lr"]))


def _ratios(weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """Return norms of weights over norms of updates, clipped; 1 where either is zero. fp32 [parameters]."""
    above, below = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(updates))
    is_defined = (above > 0) & (below > 0)
    return torch.where(is_defined, (above / below).clamp(*COEFFICIENTS), 1.0)
