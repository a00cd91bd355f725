"""Predict what a call costs by class of operations, as the model is and as converted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from te_transform.plan import cost, memory
from te_transform.plan.match import Plan
from te_transform.plan.memory import Memory
from te_transform.plan.options import Options
from te_transform.plan.precision_plan import PrecisionPlan


@dataclass(frozen=True)
class Overview:
    """The predicted costs of a call, each before and after the conversion.

    Attributes:
        seconds: on an H100, by class of operations; None if no time can be predicted.
        unknown: why no time can be predicted, or "".
        memory: of a training step; None if no memory can be predicted.
        mode: "forward and backward" or "forward".
    """

    seconds: tuple[Mapping[str, float], Mapping[str, float]] | None
    unknown: str
    memory: tuple[Memory, Memory] | None
    mode: str


def overview_of(
    plans: Sequence[tuple[str, Plan]],
    options: Options,
    precision: PrecisionPlan | None,
    training: bool,
    parameters: Iterable[nn.Parameter],
    step: Memory | None,
) -> Overview:
    """Return the predicted costs of a call; `step` is the predicted memory of the converted model."""
    why = cost.unknown(plans, options) or ""
    seconds = None
    if not why:
        original = replace(options, run_original=True)
        before = cost.predicted_classes(plans, original, None, training)
        seconds = before, cost.predicted_classes(plans, options, precision, training)
    taken = None
    if step is not None:
        unfused = [(path, replace(plan, canonical=plan.before, sites=[])) for path, plan in plans]
        taken = memory.predict(unfused, parameters, step.inputs, None), step
    return Overview(seconds, why, taken, "forward and backward" if training else "forward")
