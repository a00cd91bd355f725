"""Compare the converted model's numbers with the original's, both against the original in fp64.

A comparison passes if and only if, in L2 norms,

    ||converted - reference||  <=  1.2 ||original - reference||  +  one ulp of the scale

where one ulp is eps(dtype) * scale. There is no tolerance to choose for a model, dtype or size. The
original's own rounding error shows how exactly this model can be computed. The ulp covers values that the
original computes exactly.

The scale of an output is its own norm. The scale of a gradient is the largest norm among the gradients of the
same backward. A gradient sums terms as large as those of the largest gradient, and these may cancel. The
extreme case is the bias of a key projection. Its gradient is zero in exact arithmetic, because softmax
ignores a constant, and pure rounding otherwise. A gradient smaller than the ulp must not get lost either: if
the original's error is below an eighth of the gradient's own norm, at most half of that norm is allowed.

One run of the original may have a small error by chance, if few numbers are compared or a softmax is near a
tie. Before a comparison fails, the original therefore runs more often, with each result off by a random half
ulp. This simulates another order of sums (Monte Carlo arithmetic, Parker 1997). The largest error counts. For
a single number such as a loss, with normal errors, a correct conversion exceeds the bound as follows:

    runs of the original    exceeds 1.2 times the largest error
    6                       once in 11 times
    21                      once in 52 times

A comparison that misses by half or more fails after 21 runs. Models that choose experts or keys have rare,
large errors, where rounding changes a choice. Comparisons that miss by less therefore get up to 101 runs: of
944 conversions of 236 families, 6 in FP8 needed 22 to 38 (H200). After a failure, the models are not the
same, whatever follows. Comparisons on further inputs then get 6 runs.

If the converted model runs in FP8, the original's FP8 products are emulated, quantized and dequantized as
well as FP8 allows (emulate.py). Its draws also vary the scales. In small Llamas and RoBERTas, the FP8 error
of a gradient varies between draws by 8 to 14% of its mean (one standard deviation). One draw in 20 is 1.3
times the mean. The reference stays fp64.

A single site may be too large for fp64, such as the scores of long sequences. A model may have kernels that
take no fp64. The original itself is then the reference, and its draws replace the original. The converted
values may then differ from the original as much as differently rounded runs of the original do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from te_transform.backends.limits import ignore_size_limits, whole_logits
from te_transform.graph.errors import in_full
from te_transform.graph.inputs import Inputs
from te_transform.graph.nodes import dtype_name
from te_transform.verify.replay import Run, Subject, run

MORE = 1.2  # sums of the converted model run in another order, with errors of the same size
GRADIENT = "gradient of "  # the start of the names of rows of gradients
REFERENCE = "reference"  # the name of a row that compares nothing: why the reference is not in fp64
# Runs of the original with random rounding: of any failure, of a near one, and after another has failed.
DRAWS, NEAR_DRAWS, SETTLED_DRAWS = 20, 100, 5
_RESOLVED_SHARE, _LOST_SHARE = 8, 0.5  # see above: of the norm of a gradient
NEAR = 1.5  # the error of a near failure, at most this many times the allowed error

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
    reason: str = ""  # the failure, if it is not a too large error
    finite: bool = True  # True if the original has finite numbers to compare
    zero: bool = False  # True if the reference is zero everywhere
    lost: bool = False  # True if the error is more than half of a gradient's own norm

    @property
    def times(self) -> float:
        """The error divided by the allowed error; infinity if there is a `reason`."""
        return float("inf") if self.reason else self.converted / (self.allowed or self.converted or 1.0)

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} {self.reason}"
        if self.lost:
            return f"{self.name} has an error of {self.converted:.1e}, more than half of its own norm"
        return (
            f"{self.name} has an error of {self.converted:.1e} in {self.dtype}, but at most {MORE} times "
            f"the original's {self.original:.1e} plus one ulp is allowed"
        )


class OriginalError(RuntimeError):
    """The error for inputs on which the original does not run."""


@dataclass(frozen=True)
class Contenders:
    """The three models to compare: the original, the converted model, and the original in fp64.

    Attributes:
        emulation: A context manager around runs of the original; it takes the seed of a draw, or None.
        rehearsals: The number of runs of the converted model before the one that is compared.
        around: A context manager around the runs of the converted model, with their rehearsals. The default
            makes fused ops ignore their size limits.
    """

    original: Subject
    converted: Subject
    reference: Subject
    emulation: Emulation = nullcontext
    rehearsals: int = 0
    around: AbstractContextManager = ignore_size_limits


def judge(
    contenders: Contenders, inputs: Inputs, label: str = "", large: bool = False, settled: bool = False
) -> list[Row]:
    """Run the contenders and compare their outputs, and their gradients if gradients are enabled.

    If the converted model raises, the result is one failing row. If the reference raises in fp64, a row says
    why, and the original replaces it. `settled`: see compare_with_draws(). Compiled code draws other random
    numbers, so a forward that draws any is not compared.

    Raises:
        OriginalError: the original raised, or memory ran out in fp64 and `large` is False.
    """
    original, emulation = contenders.original, contenders.emulation
    own = _run_original(original, inputs, emulation)
    if contenders.converted.is_compiled and (own.drops or own.drawn):
        return []

    def drawn(seed: int) -> Run:
        # random rounding applies to results that require a gradient
        with torch.enable_grad(), emulation(seed):
            other = run(original, inputs, cotangents=own.cotangents, rounding=seed)
        return other if own.gradients else Run(other.outputs, {}, {})

    exact, first, notes = _in_fp64(contenders, inputs, own, large), own, []
    if isinstance(exact, str):
        notes = [Row(label, REFERENCE, True, reason=f"is the original itself, which raised {exact}")]
        exact, first = own, drawn(DRAWS)
    try:
        converted = _run_converted(contenders, inputs, own)
    except Exception as error:
        reason = f"raised {in_full(error)}"
        return [Row(label, "the forward or backward", False, reason=reason)]
    return [*notes, *compare_with_draws(converted, first, exact, drawn, label, settled)]


def _in_fp64(contenders: Contenders, inputs: Inputs, own: Run, large: bool) -> Run | str:
    """Run the reference; if it raises, return the first line of its error."""
    try:
        how = {"cotangents": own.cotangents, "drawn": own.drawn}
        return _run_original(contenders.reference, inputs, **how, double=True)
    except OriginalError as error:
        if not large and isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        return str(error).partition("\n")[0]


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
        raise OriginalError(f"{place}{in_full(error)}") from error


def _run_converted(contenders: Contenders, inputs: Inputs, own: Run) -> Run:
    with contenders.around, whole_logits:
        for _ in range(contenders.rehearsals):
            run(contenders.converted, inputs, cotangents=own.cotangents)
        return run(contenders.converted, inputs, cotangents=own.cotangents)


def compare(converted: Run, original: Run, reference: Run, inputs: str) -> list[Row]:
    """Return a row for every output and every gradient; the module docstring says what passes."""
    scale = _gradient_scale(reference)
    return [_row(inputs, *each, scale) for each in _tensors(converted, original, reference)]


def compare_with_draws(
    converted: Run,
    original: Run,
    reference: Run,
    drawn: Callable[[int], Run],
    inputs: str = "",
    settled: bool = False,
) -> list[Row]:
    """Compare, with draws of the original before a comparison fails; the module docstring says how many.

    Args:
        converted: The run to compare.
        original: A run of the original without random rounding.
        reference: The run in fp64.
        drawn: A function that runs the original with random rounding by a seed.
        inputs: The label of the rows.
        settled: True if comparisons on other inputs have failed already.
    """
    tensors, scale = dict(_tensors(converted, original, reference)), _gradient_scale(reference)
    rows = {name: _row(inputs, name, three, scale) for name, three in tensors.items()}
    errors = dict.fromkeys(rows, 0.0)  # the largest of the draws
    for seed in range(SETTLED_DRAWS if settled else NEAR_DRAWS):
        failed = {name: row.times for name, row in rows.items() if not row.ok and not row.reason}
        if not failed or (seed >= DRAWS and max(failed.values()) > NEAR):
            break
        for name, (draw, own, exact) in _tensors(drawn(seed), original, reference):
            if name in failed and draw is not None:
                errors[name] = max(errors[name], _error(draw, own, exact))
                rows[name] = _row(inputs, name, tensors[name], scale, errors[name])
    return [*rows.values()]


def _tensors(converted: Run, original: Run, reference: Run) -> Iterator[tuple[str, list[Tensor | None]]]:
    """Yield the name of each row, with a tensor of each run."""
    runs = converted, original, reference
    for name in dict.fromkeys([*original.outputs, *converted.outputs]):
        yield f"output {name}".rstrip(), [run.outputs.get(name) for run in runs]
    for name in dict.fromkeys([*original.gradients, *converted.gradients]):
        yield f"{GRADIENT}{name}", [run.gradients.get(name) for run in runs]


def _gradient_scale(reference: Run) -> float:
    """Return the norm that errors of gradients are relative to."""
    return max(map(_norm, reference.gradients.values()), default=0.0)


def _row(inputs: str, name: str, tensors: list[Tensor | None], scale: float, drawn: float = 0.0) -> Row:
    """Compare one tensor of each run; `drawn` is the largest error of further runs of the original."""
    converted, original, reference = tensors
    dtype = dtype_name((converted if original is None else original).dtype)
    if reason := _unlike(converted, original):
        return Row(inputs, name, False, reason=reason)
    if not original.is_floating_point():
        return Row(inputs, name, True, dtype=dtype)
    counted = _compared_mask(original, reference)
    exact = _numbers(reference, counted)
    own_size = _norm(exact)
    size = scale if name.startswith(GRADIENT) else own_size
    error, own = (_norm(_numbers(t, counted) - exact) / (size or 1.0) for t in (converted, original))
    own, own_size = max(own, drawn / (size or 1.0)), own_size / (size or 1.0)
    allowed = MORE * own + (torch.finfo(original.dtype).eps if size else 0.0)
    lost = _RESOLVED_SHARE * own < own_size and _LOST_SHARE * own_size < error <= allowed
    allowed = _LOST_SHARE * own_size if lost else allowed
    finite = bool(exact.numel()) or not original.numel()
    zero = bool(exact.numel()) and not exact.any()
    numbers = error, own, allowed
    return Row(inputs, name, error <= allowed, *numbers, dtype, finite=finite, zero=zero, lost=lost)


def _unlike(converted: Tensor | None, original: Tensor | None) -> str:
    """Return a difference other than rounding, or "": missing tensors, dtypes, shapes, inf and nan."""
    if converted is None or original is None:
        return "is missing" if converted is None else "is not in the original"
    kind, needed = (f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (converted, original))
    if kind != needed:
        return f"is {kind}, but the original's is {needed}"
    if not original.is_floating_point():
        return "" if torch.equal(converted, original) else "differs, it must equal the original's exactly"
    same = (converted == original) | (converted.isnan() & original.isnan())
    infinite = ~(original.isfinite() & converted.isfinite())
    return "" if same[infinite].all() else "has inf or nan at other positions than the original's"


def _error(draw: Tensor, original: Tensor, reference: Tensor) -> float:
    counted = _compared_mask(original, reference)
    return _norm(_numbers(draw, counted) - _numbers(reference, counted))


def _compared_mask(original: Tensor, reference: Tensor) -> Tensor | None:
    """Return a mask of the numbers to compare, which are finite in both, or None if all are."""
    counted = original.isfinite() & reference.isfinite()
    return None if counted.all() else counted


def _numbers(tensor: Tensor, counted: Tensor | None) -> Tensor:
    return (tensor if counted is None else tensor[counted]).double()


def _norm(tensor: Tensor) -> float:
    tensor = tensor.double()
    norm = float(tensor.norm())
    return norm if math.isfinite(norm) else float(tensor[tensor.isfinite()].norm())
