"""Judge converted numbers against the original's, both against the original's arithmetic in fp64.

A comparison passes if and only if

    ||converted - reference||  <=  1.2 ||original - reference||  +  one ulp of the scale

in L2 norms, one ulp being eps(dtype) * scale. No tolerance is chosen for a model, a dtype or a size: the original's own
rounding says what this model can be computed to, and the ulp is there for those that it computes exactly. The scale of an
output is its own norm. The scale of a gradient is the largest norm among the gradients of the same backward: a gradient
is a sum of terms as large as those of the largest, which may cancel. The bias of a key projection is the extreme case, its
gradient is zero in exact arithmetic (softmax does not see a constant) and all rounding in any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from te_transform.inputs import Inputs
from te_transform.originals import Original, fusions
from te_transform.replay import Run, only, run
from te_transform.slots import Fusion

MORE = 1.2  # converted sums run in another order: as good as the original's, not the same


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

    @property
    def times(self) -> float:
        """How many times the allowed error this is; infinity where the error is no matter of size."""
        return float("inf") if self.reason else self.converted / (self.allowed or self.converted or 1.0)

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} {self.reason}"
        return (
            f"{self.name} is {self.converted:.1e} off in {self.dtype}, {MORE} times the original's {self.original:.1e} "
            "plus one ulp is allowed"
        )


class OriginalError(RuntimeError):
    """The original does not run on these inputs: there is nothing to compare with."""


def judge(
    original: nn.Module,
    converted: nn.Module,
    reference: nn.Module,
    inputs: Inputs,
    parameters: Callable[[nn.Module], dict[str, Original]],
    enabled: Sequence[Fusion],
    training: bool,
    label: str = "",
) -> list[Row]:
    """Run the original, `converted` with the fusions `enabled`, and `reference` (see in_double), and compare.

    `parameters` gives a module's original parameters by name. A converted module that raises has one failing row.

    Raises:
        OriginalError: the original raised.
    """
    label = f"{label}, {'training' if training else 'evaluation'}".lstrip(", ")
    try:
        with only((), fusions(original)):
            own = run(original, inputs, parameters(original), training=training)
    except Exception as error:
        raise OriginalError(f"{type(error).__name__}: {error}") from error
    exact = run(
        reference, inputs, parameters(reference), training=training, cotangents=own.cotangents, double=True
    )
    try:
        with only(enabled, fusions(converted)):
            fused = run(converted, inputs, parameters(converted), training=training, cotangents=own.cotangents)
    except Exception as error:
        return [Row(label, "the forward or backward", False, reason=f"raised {type(error).__name__}: {error}")]
    return compare(fused, own, exact, label)


def compare(converted: Run, original: Run, reference: Run, inputs: str) -> list[Row]:
    """A row for every output and every gradient; see the module's docstring for what passes."""
    rows = []
    for name in dict.fromkeys([*original.outputs, *converted.outputs]):
        tensors = [run.outputs.get(name) for run in (converted, original, reference)]
        rows.append(_row(inputs, f"output {name}".rstrip(), tensors, None))
    scale = max((_norm(g) for g in reference.gradients.values()), default=0.0)
    for name in dict.fromkeys([*original.gradients, *converted.gradients]):
        tensors = [run.gradients.get(name) for run in (converted, original, reference)]
        rows.append(_row(inputs, f"gradient of {name}", tensors, scale))
    return rows


def _row(inputs: str, name: str, tensors: list[Tensor | None], scale: float | None) -> Row:
    converted, original, reference = tensors
    if converted is None or original is None or reference is None:
        return Row(inputs, name, False, reason=f"is {'missing' if converted is None else 'not in the original'}")
    kind, needed = (f"{_short(t.dtype)}{list(t.shape)}" for t in (converted, original))
    if kind != needed:
        return Row(inputs, name, False, reason=f"is {kind}, the original's is {needed}")
    if not original.is_floating_point():
        ok = torch.equal(converted, original)
        return Row(inputs, name, ok, dtype=_short(original.dtype), reason="" if ok else "differs, it is exact in the original")
    finite = original.isfinite()
    same = (converted == original) | (converted.isnan() & original.isnan())
    if not torch.equal(converted.isfinite(), finite) or not same[~finite].all():
        return Row(inputs, name, False, reason="has non-finite values where the original's are others")
    counted = finite & reference.isfinite()
    c, o, r = (t[counted].double() for t in tensors)
    size = _norm(r) if scale is None else scale
    error, own = (_norm(t - r) / (size or 1.0) for t in (c, o))
    allowed = MORE * own + (torch.finfo(original.dtype).eps if size else 0.0)
    return Row(inputs, name, error <= allowed, error, own, allowed, _short(original.dtype))


def _norm(tensor: Tensor) -> float:
    tensor = tensor.double()
    return float(tensor[tensor.isfinite()].norm())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
