"""Find the first module in which two models differ, by comparing what enters and leaves each module.

Modules are paired by name, and judged as the models are: against fp64, by the error of the original. If what
leaves a module is the first tensor to differ, then the module is wrong. If what enters it differs first, then
the module that calls it is wrong. The backward is read in the same manner, from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from te_transform.graph.errors import in_full
from te_transform.graph.inputs import Inputs
from te_transform.verify.compare import GRADIENT, Contenders, Row, compare_with_draws
from te_transform.verify.judged import in_dtype
from te_transform.verify.replay import Run, Subject, run
from te_transform.verify.tape import Moment, Tape

_Key = tuple[Moment, int]  # a moment, and the position of a tensor among those that enter or leave


def first_difference(
    contenders: Contenders, own_tape: Callable[[], Tape], their_tape: Callable[[], Tape], inputs: Inputs
) -> tuple[str, str] | None:
    """Return the path of the first module that differs, and a sentence about it; None if none does.

    Args:
        contenders: The models in a case that fails.
        own_tape: A function that returns a tape to record a run of the original.
        their_tape: The same for the other model.
        inputs: The inputs of the case.
    """
    try:
        own, run = _record_tape(contenders.original, own_tape(), inputs)
        how = {"cotangents": run.cotangents}
        exact, _ = _record_tape(contenders.reference, own_tape(), inputs, **how, drawn=run.drawn, double=True)
    except _Raised:  # the original does not run with hooks
        return None
    try:
        theirs, _ = _record_tape(contenders.converted, their_tape(), inputs, **how)
    except _Raised as error:
        return error.path, f"the second model raises in it: {error}"
    keys = _paired(own, theirs)
    converted, first, wide = (_as_run(tape, keys, like=own) for tape in (theirs, own, exact))

    def drawn(seed: int) -> Run:
        with torch.enable_grad():
            tape, _ = _record_tape(contenders.original, own_tape(), inputs, **how, rounding=seed)
        return _as_run(tape, keys, like=own)

    rows = compare_with_draws(converted, first, wide, drawn)
    keyed = zip((*first.outputs, *first.gradients), rows, strict=False)
    return _first_wrong([(key, row) for key, row in keyed if not row.ok], own, theirs)


class _Raised(Exception):
    """An error of the other model, with the path of the module that raised it."""

    def __init__(self, path: str, error: Exception):
        super().__init__(in_full(error))
        self.path = path


def _record_tape(subject: Subject, tape: Tape, inputs: Inputs, **how: object) -> tuple[Tape, Run]:
    def call(*args: object, **kwargs: object) -> object:
        with tape.recording():
            return subject.call(*args, **kwargs)

    try:
        return tape, run(replace(subject, call=call), inputs, **how)
    except Exception as error:
        raise _Raised(tape.running[-1] if tape.running else "", error) from error


def _paired(own: Tape, theirs: Tape) -> list[_Key]:
    """Return the tensors to compare: all at a moment if both have as many, else the first one."""
    keys: list[_Key] = []
    for moment, one in own.values.items():
        other = theirs.values.get(moment, [])
        count = len(one) if len(one) == len(other) else min(len(one), len(other), 1)
        is_result = not moment.path and not moment.is_start  # the shape of the model's result matters
        keys += [(moment, n) for n in range(count) if is_result or _can_be_paired(one[n], other[n])]
    return keys


def _can_be_paired(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.is_floating_point() == other.is_floating_point()


def _as_run(tape: Tape, keys: Iterable[_Key], like: Tape) -> Run:
    """Return the recorded tensors as a run, in the dtypes of the tape `like`; a reference stays in fp64."""
    values = {
        (moment, n): in_dtype(tape.values[moment][n], like.values[moment][n].dtype) for moment, n in keys
    }
    gradients = {
        key: in_dtype(tape.gradients[key], like.gradients[key].dtype)
        for key in reversed([*keys])
        if key in tape.gradients and key in like.gradients
    }
    return Run(values, gradients, {})


def _first_wrong(wrong: Sequence[tuple[_Key, Row]], own: Tape, theirs: Tape) -> tuple[str, str] | None:
    """Return the path of the module whose code ran when the first wrong tensor was computed."""
    if not wrong:
        return None
    key, row = wrong[0]
    is_gradient = row.name.startswith(GRADIENT)
    detached = [key for key, row in wrong if row.name.startswith(GRADIENT) and key not in theirs.trained]
    if is_gradient and key in detached:  # the forward cut the graph, where it did so first
        key, is_gradient = detached[-1], False
        row = replace(row, reason="requires no gradient, the original's does")
    (moment, _), what = key, "what enters" if key[0].is_start else "what leaves"
    path, caller = own.callers[moment]
    name = f"{'the gradient of ' * is_gradient}{what} {path or 'the model'}"
    return path if moment.is_start is is_gradient else caller, str(replace(row, name=name))
