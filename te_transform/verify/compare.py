"""Judge converted numbers against the original's, both against the original's arithmetic in fp64.

A comparison passes if and only if, in L2 norms,

    ||converted - reference||  <=  1.2 ||original - reference||  +  one ulp of the scale

one ulp being eps(dtype) * scale. No tolerance is chosen for a model, a dtype or a size: the original's own
rounding says how exactly this model can be computed, and the ulp is there for what it computes exactly.

The scale of an output is its own norm. The scale of a gradient is the largest norm among the gradients of the
same backward: a gradient is a sum of terms as large as the largest's, and they may cancel. The bias of a key
projection is the extreme case: its gradient is zero in exact arithmetic (softmax does not see a constant),
rounding in any other.

One run of the original can be lucky, where few numbers are compared or a softmax sits on an edge. So before a
comparison fails, the original is run up to 20 times more with each result off by a random half ulp (Monte
Carlo arithmetic, Parker 1997), which is what another order of sums does to it, and its largest error counts.
With normal errors, that of a single number, as a loss is, would be above 1.2 times the largest of six once in
11 times, and is above that of 21 once in 52.

Where the converted model runs in FP8, the original that counts is one whose same products are quantized and
dequantized as well as FP8 can (emulate.py); its draws have other scales too. A gradient's error in FP8
differs from draw to draw by 8 to 14% of its mean (one standard deviation) in small Llamas and RoBERTas, where
one draw in 20 is 1.3 times the mean. The reference stays what it is.

Where a single site is too large for fp64, as scores of long sequences are, the original itself is the
reference, and draws of it take its place: what is converted may be as far from the original as that is from
itself, rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from te_transform.backends.limits import ignore_size_limits, whole_logits
from te_transform.graph.inputs import Inputs
from te_transform.graph.nodes import dtype_name
from te_transform.verify.replay import Run, Subject, run

MORE = 1.2  # converted sums run in another order: as good as the original's, not the same
DRAWS = 20  # of the original, with random rounding

Emulation = Callable[[int | None], AbstractContextManager]


@dataclass(frozen=True)
class Row:
    """One compared tensor; errors and `allowed` are relative to the comparison's scale."""

    inputs: str
    name: str
    ok: bool
    converted: float = 0.0
    original: float = 0.0
    allowed: float = 0.0
    dtype: str = ""
    reason: str = ""  # why it failed, where that is no matter of size
    finite: bool = True  # whether any number of the original's could be compared

    @property
    def times(self) -> float:
        """How many times the allowed error this is; infinity where the error is no matter of size."""
        return float("inf") if self.reason else self.converted / (self.allowed or self.converted or 1.0)

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} {self.reason}"
        return (
            f"{self.name} is {self.converted:.1e} off in {self.dtype}, {MORE} times the original's "
            f"{self.original:.1e} plus one ulp is allowed"
        )


class OriginalError(RuntimeError):
    """The original does not run on these inputs: there is nothing to compare with."""


@dataclass(frozen=True)
class Contenders:
    """What is compared: the original, the converted one, and the original in fp64.

    `emulation` is entered where the original runs, with the seed of a draw or None. `rehearsals` are runs of
    the converted one before that which counts; `sizes` is entered where it runs: all that is fused takes
    calls of any size, unless it says otherwise.
    """

    original: Subject
    converted: Subject
    reference: Subject
    emulation: Emulation = nullcontext
    rehearsals: int = 0
    sizes: AbstractContextManager = ignore_size_limits


def judge(contenders: Contenders, inputs: Inputs, label: str = "", large: bool = False) -> list[Row]:
    """Run the contenders, and compare: outputs alone, or gradients too where they are enabled.

    If the converted one raises, that is one failing row. Where there is no memory for fp64, that raises
    unless it may be too `large`.

    Raises:
        OriginalError: the original raised, or the reference did.
    """
    original, emulation = contenders.original, contenders.emulation
    own = _run_original(original, inputs, emulation)

    def drawn(seed: int) -> Run:
        # with gradients enabled, which say what is rounded
        with torch.enable_grad(), emulation(seed):
            found = run(original, inputs, cotangents=own.cotangents, rounding=seed)
        return found if own.gradients else Run(found.outputs, {}, {})

    exact, originals = _in_fp64(contenders, inputs, own, large), [own]
    if exact is None:
        exact, originals = own, [drawn(DRAWS)]
    try:
        converted = _run_converted(contenders, inputs, own)
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}"
        return [Row(label, "the forward or backward", False, reason=reason)]
    rows = compare(converted, originals, exact, label)
    for seed in range(DRAWS):
        if not any(not row.ok and not row.reason for row in rows):
            break
        originals.append(drawn(seed))
        rows = compare(converted, originals, exact, label)
    return rows


def _in_fp64(contenders: Contenders, inputs: Inputs, own: Run, large: bool) -> Run | None:
    """The reference; None where there is no memory for it, and it is known to be large."""
    try:
        return _run_original(contenders.reference, inputs, cotangents=own.cotangents, double=True)
    except OriginalError as error:
        if not large or not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
    return None  # only now is the memory free that the error's frames held


def _run_original(
    subject: Subject,
    inputs: Inputs,
    emulation: Emulation = nullcontext,
    **how: object,
) -> Run:
    try:
        with emulation(None):
            return run(subject, inputs, **how)
    except Exception as error:
        place = "in fp64, " if how else ""
        raise OriginalError(f"{place}{type(error).__name__}: {error}") from error


def _run_converted(contenders: Contenders, inputs: Inputs, own: Run) -> Run:
    with contenders.sizes, whole_logits:
        for _ in range(contenders.rehearsals):
            run(contenders.converted, inputs, cotangents=own.cotangents)
        return run(contenders.converted, inputs, cotangents=own.cotangents)


def compare(converted: Run, originals: Sequence[Run], reference: Run, inputs: str) -> list[Row]:
    """A row for every output and every gradient; see the module's docstring for what passes.

    The first of `originals` is the original, the others are draws of it with random rounding.
    """
    runs, rows = (converted, *originals, reference), []
    for name in dict.fromkeys([*originals[0].outputs, *converted.outputs]):
        rows.append(_row(inputs, f"output {name}".rstrip(), [run.outputs.get(name) for run in runs], None))
    scale = max((_norm(g) for g in reference.gradients.values()), default=0.0)
    for name in dict.fromkeys([*originals[0].gradients, *converted.gradients]):
        rows.append(_row(inputs, f"gradient of {name}", [run.gradients.get(name) for run in runs], scale))
    return rows


def _row(inputs: str, name: str, tensors: list[Tensor | None], scale: float | None) -> Row:
    converted, original, *draws, reference = tensors
    dtype = dtype_name((converted if original is None else original).dtype)
    if reason := _unlike(converted, original):
        return Row(inputs, name, False, reason=reason)
    if not original.is_floating_point():
        return Row(inputs, name, True, dtype=dtype)
    counted = original.isfinite() & reference.isfinite()
    exact = reference[counted].double()
    size = _norm(exact) if scale is None else scale
    error, *own = (_norm(t[counted].double() - exact) / (size or 1.0) for t in (converted, original, *draws))
    allowed = MORE * max(own) + (torch.finfo(original.dtype).eps if size else 0.0)
    finite = bool(counted.any()) or not counted.numel()
    return Row(inputs, name, error <= allowed, error, max(own), allowed, dtype, finite=finite)


def _unlike(converted: Tensor | None, original: Tensor | None) -> str:
    """What tells the two apart before any error is measured."""
    if converted is None or original is None:
        return "is missing" if converted is None else "is not in the original"
    kind, needed = (f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (converted, original))
    if kind != needed:
        return f"is {kind}, the original's is {needed}"
    if not original.is_floating_point():
        return "" if torch.equal(converted, original) else "differs, the original's has to be met exactly"
    same = (converted == original) | (converted.isnan() & original.isnan())
    infinite = ~(original.isfinite() & converted.isfinite())
    return "" if same[infinite].all() else "has inf or nan where the original has others"


def _norm(tensor: Tensor) -> float:
    tensor = tensor.double()
    return float(tensor[tensor.isfinite()].norm())
