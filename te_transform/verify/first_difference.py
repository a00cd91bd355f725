"""Find the first module in which two models differ, by comparing what enters and leaves each module.

Modules are paired by name, and judged as the models are: against fp64, by the error of the original. If what
leaves a module is the first tensor to differ, then the module is wrong. If what enters it differs first, then
the module that calls it is wrong. The backward is read in the same manner, from its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from te_transform.graph.inputs import Inputs
from te_transform.verify.compare import DRAWS, Row, compare, worst_of
from te_transform.verify.replay import Run, Subject, run
from te_transform.verify.tape import Moment, Tape

Taped = Callable[[], tuple[Subject, Tape]]
_Key = tuple[Moment, int]  # a moment, and the position of a tensor among those that enter or leave
_GRADIENT = "gradient of "


def first_difference(
    original: Taped, reference: Taped, other: Taped, inputs: Inputs
) -> tuple[str, str] | None:
    """Return the path of the first module that differs, and a sentence about it; None if none does.

    Args:
        original: A function that returns the original, and a tape that records it.
        reference: The same for the original in fp64.
        other: The same for the other model.
        inputs: The inputs of a case that fails.
    """
    own, found = _recorded(original, inputs)
    cotangents = found.cotangents
    exact, _ = _recorded(reference, inputs, cotangents=cotangents, double=True)
    try:
        theirs, _ = _recorded(other, inputs, cotangents=cotangents)
    except _Raised as error:
        return error.path, f"the second model raises in it: {error}"
    keys = _paired(own, theirs)
    converted, worst, wide = (_as_run(tape, keys, like=own) for tape in (theirs, own, exact))
    rows = compare(converted, [worst], wide, "")
    for seed in range(DRAWS):
        if all(row.ok for row in rows):
            return None
        with torch.enable_grad():
            drawn, _ = _recorded(original, inputs, cotangents=cotangents, rounding=seed)
        worst = worst_of(worst, _as_run(drawn, keys, like=own), wide)
        rows = compare(converted, [worst], wide, "")
    return _first_wrong(rows, [*worst.outputs], [*worst.gradients], own)


class _Raised(Exception):
    """An error of the other model, with the path of the module that raised it."""

    def __init__(self, path: str, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.path = path


def _recorded(taped: Taped, inputs: Inputs, **how: object) -> tuple[Tape, Run]:
    subject, tape = taped()

    def within() -> AbstractContextManager:
        stack = ExitStack()
        stack.enter_context(subject.within())
        stack.enter_context(tape.recording())
        return stack

    def call(*args: object, **kwargs: object) -> object:
        tape.is_on = True
        try:
            return subject.call(*args, **kwargs)
        except Exception as error:
            raise _Raised(tape.running[-1] if tape.running else "", error) from error
        finally:
            tape.is_on = False  # checkpoints call modules again in the backward

    return tape, run(replace(subject, call=call, within=within), inputs, **how)


def _paired(own: Tape, theirs: Tape) -> list[_Key]:
    """Return the tensors to compare: all at a moment if both have as many, else the first one."""
    keys: list[_Key] = []
    for moment, one in own.values.items():
        other = theirs.values.get(moment, [])
        count = len(one) if len(one) == len(other) else min(len(one), len(other), 1)
        keys += [(moment, place) for place in range(count) if one[place].shape == other[place].shape]
    return keys


def _as_run(tape: Tape, keys: Iterable[_Key], like: Tape) -> Run:
    """Return the recorded tensors as a run, in the dtypes of the tape `like`; a reference stays in fp64."""

    def cast(tensor: Tensor, other: Tensor) -> Tensor:
        return tensor if tensor.dtype is torch.float64 else tensor.to(other.dtype)

    values = {key: cast(tape.values[key[0]][key[1]], like.values[key[0]][key[1]]) for key in keys}
    gradients = {
        key: cast(tape.gradients[key], like.gradients[key])
        for key in reversed([*keys])
        if key in tape.gradients and key in like.gradients
    }
    return Run(values, gradients, {})


def _first_wrong(
    rows: Sequence[Row], values: Sequence[_Key], gradients: Sequence[_Key], own: Tape
) -> tuple[str, str] | None:
    """Return the path of the module whose code ran when the first wrong tensor was computed."""
    for row, (moment, _) in zip(rows, (*values, *gradients), strict=False):
        if row.ok:
            continue
        is_gradient = row.name.startswith(_GRADIENT)
        path, caller = own.callers[moment]
        what = f"what {'enters' if moment.is_start else 'leaves'} {path or 'the model'}"
        what = f"the gradient of {what}" if is_gradient else what
        return path if moment.is_start is is_gradient else caller, str(replace(row, name=what))
    return None
