"""The norms of Adam's second moments, a measure of the variance of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_transform.training.length_schedule import CurriculumError


class VarianceNorms(NamedTuple):
    """Norms of sqrt(v) over all parameters, where v is Adam's second moment."""

    l1: float
    max: float


@torch.no_grad()
def variance_norms(optimizer: torch.optim.Optimizer) -> VarianceNorms:
    """Return the l1 norm and the largest element of sqrt(v), as arXiv 2108.06084 measures stability.

    `exp_avg_sq` of the optimizer's state is read in fp32. All ranks must call this function, because it
    gathers DTensors. It waits for the GPU: do not call it in each step.

    Raises:
        CurriculumError: the optimizer has no second moments, such as a 1-bit optimizer after the freeze.
    """
    groups, states = getattr(optimizer, "param_groups", ()), getattr(optimizer, "state", {})
    moments = [state["exp_avg_sq"] for state in states.values() if "exp_avg_sq" in state]
    if any(group.get("frozen") for group in groups) or not moments:
        raise CurriculumError(
            f"expected second moments (exp_avg_sq), got a {type(optimizer).__name__} without; pass an "
            "optimizer of Adam's family after its first step"
        )
    whole = (moment.full_tensor() if hasattr(moment, "full_tensor") else moment for moment in moments)
    roots = [moment.float().sqrt() for moment in whole if moment.numel()]
    sums, largest = [root.sum(dtype=torch.float64) for root in roots], [root.max() for root in roots]
    return VarianceNorms(sum(map(float, sums)), max(map(float, largest), default=0.0))
