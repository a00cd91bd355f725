"""1-bit LAMB, arXiv 2104.06069."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_transform.training.one_bit.adam import OneBitAdam
from te_transform.training.one_bit.layout import Layout
from te_transform.training.one_bit.optimizer import Gradients

COEFFICIENTS = 0.01, 10.0  # bounds of the ratio of norms, weight to update, in the warm-up
AVERAGED = 0.9  # of the mean of these ratios is kept at each step
FACTORS = 0.5, 4.0  # bounds of the factor that follows the variance after the freeze
STEP_OF_FACTOR = 0.1  # relative: how much a factor changes in one step at most


class OneBitLamb(OneBitAdam):
    """LAMB whose ranks exchange one bit for each number of a matrix, once the variance is frozen.

    Warm-up: LAMB on averaged gradients, with bias correction; the ratio of norms c of each parameter is
    clipped to [0.01, 10]. Then v is constant and c is its exponential mean of the warm-up. Momenta are scaled
    to one size before they are exchanged together. A factor f for each parameter follows the variance of the
    gradients that the exchanged momenta imply:

        p -= lr * c * f * (m / (sqrt(v) + eps) + weight_decay * p)

    Args and errors are those of OneBitAdam; `weight_decay` is part of the update that the ratio is taken of.
    """

    _buffers = ("exp_avg", "exp_avg_sq", "denominator", "fresh_exp_avg_sq")
    _scalars = ("step", "coefficient", "scale", "factor")

    def _warm_up(self, layout: Layout, gradients: Gradients) -> None:
        self._start()
        with self._weights(layout) as weights:
            for group, trained in zip(self.param_groups, layout.groups, strict=True):
                for parameter in (p for p in trained if p in gradients):
                    state = self.state[parameter]
                    update = _lamb_update(state, gradients[parameter], group)
                    self._apply(state, weights[parameter], update, group)

    @staticmethod
    def _apply(state: dict[str, Any], weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        update.add_(weight, alpha=group["weight_decay"])
        ratio = _ratio(weight, update)
        mean = state.setdefault("coefficient", torch.zeros_like(ratio))
        mean.mul_(AVERAGED).add_(ratio, alpha=1 - AVERAGED)
        weight.sub_(update.mul_(ratio), alpha=float(group["lr"]))

    def _correct(self, layout: Layout) -> None:
        """Correct m, v and c, and find the scale that gives all momenta one size."""
        super()._correct(layout)
        self._buffer("fresh_exp_avg_sq").copy_(self._flat["exp_avg_sq"])
        trained = [p for p in layout.parameters if self._has_trained(p)]
        if not trained:
            return
        momenta = [self.state[p]["exp_avg"] for p in trained]
        roots = torch.tensor([m.numel() ** 0.5 for m in momenta], dtype=torch.float32, device=layout.device)
        sizes = torch.stack(torch._foreach_norm(momenta)) / roots
        scales = torch.where(sizes > 0, sizes.mean() / sizes, 1.0)
        for parameter, scale in zip(trained, scales, strict=True):
            state = self.state[parameter]
            state["coefficient"].div_(1 - AVERAGED ** state["step"].item())
            state["scale"], state["factor"] = scale.clone(), torch.ones_like(scale)

    def _compressed(self, layout: Layout, gradients: Gradients) -> None:
        trained = [p for p in layout.parameters if self._has_trained(p)]
        momenta, scales = ([self.state[p][name] for p in trained] for name in ("exp_avg", "scale"))
        before = self._flat["exp_avg"].clone()
        self._add_to_momentum(layout, gradients)
        if trained:
            torch._foreach_mul_(momenta, scales)
            self._mean(self._flat["exp_avg"])
            torch._foreach_div_(momenta, scales)
        self._follow_variance(layout, before)
        with self._weights(layout) as weights:
            for group, own in zip(self.param_groups, layout.groups, strict=True):
                self._descend(group, [p for p in own if self._has_trained(p)], weights)

    def _follow_variance(self, layout: Layout, before: Tensor) -> None:
        """Update the variance by the gradients that made `before` the momentum of now."""
        for index, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            parts = (layout.parts(self._flat[name], index) for name in ("exp_avg", "fresh_exp_avg_sq"))
            for old, momentum, fresh in zip(layout.parts(before, index), *parts, strict=True):
                gradient = momentum.sub(old, alpha=beta1).div_(1 - beta1)
                fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _descend(
        self, group: dict[str, Any], trained: list[nn.Parameter], weights: dict[nn.Parameter, Tensor]
    ) -> None:
        if not trained:
            return
        states, updated = [self.state[p] for p in trained], [weights[p] for p in trained]
        momenta, denominators = ([state[name] for state in states] for name in ("exp_avg", "denominator"))
        updates = torch._foreach_div(momenta, denominators)
        shares = None
        if group["weight_decay"]:
            norms = torch.stack(torch._foreach_norm(updates))
            torch._foreach_add_(updates, updated, alpha=group["weight_decay"])
            shares = (norms / torch.stack(torch._foreach_norm(updates))).nan_to_num(1.0).clamp(max=1.0)
        factors = self._factors(states, group["eps"], shares)
        coefficients = torch.stack([state["coefficient"] for state in states]) * factors
        torch._foreach_mul_(updates, list(coefficients.unbind()))
        torch._foreach_add_(updated, updates, alpha=-float(group["lr"]))

    @staticmethod
    def _factors(states: list[dict[str, Any]], eps: float, shares: Tensor | None) -> Tensor:
        """Return the factor of each parameter, and keep it for the next step."""
        ratios = torch._foreach_sqrt([state["fresh_exp_avg_sq"] for state in states])
        torch._foreach_add_(ratios, eps)
        torch._foreach_reciprocal_(ratios)
        torch._foreach_mul_(ratios, [state["denominator"] for state in states])
        for ratio in ratios:  # elements without a variance have no update
            ratio.masked_fill_(ratio.isinf(), 0.0)
        found = torch.stack(torch._foreach_norm(ratios, float("inf")))
        if shares is not None:
            found = found * shares + 1 - shares
        last = torch.stack([state["factor"] for state in states])
        found = found.clamp(*FACTORS).clamp(last * (1 - STEP_OF_FACTOR), last * (1 + STEP_OF_FACTOR))
        torch._foreach_copy_([state["factor"] for state in states], list(found.unbind()))
        return found


def _lamb_update(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Update m, v and their step; return m / (sqrt(v) + eps), both bias corrected."""
    (beta1, beta2), momentum, variance = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    state["step"] += 1
    step = state["step"].item()
    momentum.lerp_(gradient, 1 - beta1)
    variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (variance / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return (momentum / (1 - beta1**step)).div_(denominator)


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    """Return the norm of the weight over that of the update, clipped; 1 where either is zero."""
    norms = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
    is_defined = (norms[0] > 0) & (norms[1] > 0)
    return torch.where(is_defined, (norms[0] / norms[1]).clamp(*COEFFICIENTS), 1.0)
