"""Compare a converted model with its original, and say what differs because of what."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from te_transform.autocast import precisions
from te_transform.check import check_sites, guilty, place
from te_transform.compare import FP8_DRAWS, OriginalError, Row, judge
from te_transform.emulate import emulated, formats_of
from te_transform.inputs import Inputs, as_inputs
from te_transform.originals import fusions, original_parameters
from te_transform.preserve import preserved
from te_transform.progress import progress
from te_transform.replay import in_double
from te_transform.slots import Fusion, original_class
from te_transform.variations import EXAMPLE, variations
from te_transform.weights import is_quantised

__all__ = ["Verification", "check_sites", "verify"]

_WIDTH = 110  # columns of str(verification)
_STATE = "state_dict"
_E4M3 = 2**-4  # the largest relative error of rounding to it
_WORST = 5  # gradients shown of each set of inputs


@dataclass(frozen=True, repr=False)
class Verification:
    """What verify() found; true if all is as it was.

    `rows` holds every comparison, `guilty` the paths of the sites that a difference comes from, `skipped` a
    sentence for each set of inputs that the original model does not take, `recipes` the recipes of a model in
    FP8: the original that its errors are compared with is then emulated, see emulate.py.
    """

    model: str
    rows: tuple[Row, ...]
    guilty: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def title(self) -> str:
        failed = sum(not row.ok for row in self.rows)
        if not failed:
            return f"{self.model}: verified, {len(self.rows)} comparisons"
        return f"{self.model}: NOT the same, {failed} of {len(self.rows)} comparisons failed"

    def __rich__(self) -> Group:
        columns = ("inputs", "compared", "converted", "original", "allowed", "")
        table = Table(*columns, box=box.SIMPLE_HEAD, caption="errors are relative and against fp64")
        for inputs, group in groupby(self.rows, key=lambda row: row.inputs):
            for line in _lines(inputs, list(group)):
                table.add_row(*line)
        notes = [f"guilty: {path or 'the model itself'}" for path in self.guilty]
        notes += [f"skipped: {sentence}" for sentence in self.skipped]
        notes += [f"note: 'original' is emulated, as exact as FP8 can be in {name}" for name in self.recipes]
        return Group(Text(self.title, style="bold"), table, *map(Text, notes))

    def __str__(self) -> str:
        plain = {"width": _WIDTH, "color_system": None, "force_terminal": False, "force_jupyter": False}
        console = Console(file=io.StringIO(), legacy_windows=False, **plain)
        console.print(self)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Verification({self.title})"


def verify(model: nn.Module, converted: nn.Module, example_inputs: Any = None) -> Verification:
    """Compare `converted` with `model`, forward and each gradient, against the original's arithmetic in fp64.

    In training mode with dropout off and in evaluation mode; on the example inputs, fresh random values,
    another batch size, another length, and a left-padded batch where the model takes an attention_mask.
    compare.py says what passes; a model in FP8 is measured by how exact FP8 can be. The state dicts have to
    agree bitwise. After a failure, subsets of the fusions are run to find those that cause it. What
    torch.compile makes of the model is not looked at. Needs the memory of `model` in fp64 and of its
    gradients.

    Args:
        model: the original, or the converted model itself if it was converted in place; left as it is.
        converted: what te_transform.convert() returned.
        example_inputs: as convert() takes them.

    Raises:
        ValueError: these two cannot be compared, the original does not run on the example inputs, or there is
            no emulation of the converted model's recipe.
        te_transform.InputError: there are no inputs and none can be invented.
    """
    _check(model, converted)
    compiled = any(module._compiled_call_impl is not None for module in converted.modules())
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    recipes = [precision.recipe for precision in precisions(converted).values() if precision.modules]
    for recipe in recipes:
        formats_of(recipe)
    delayed = [m for p in precisions(converted).values() if p.recipe.delayed() for m in p.modules]
    rehearsal = _Scales(delayed) if delayed else None
    how = {}
    if recipes:
        emulation = partial(emulated, model, converted)
        how = {"emulation": emulation, "draws": FP8_DRAWS, "rehearsal": rehearsal}
    samples = as_inputs(model, example_inputs)
    sets = [(label, _trained(inputs)) for label, inputs in variations(model, samples)]
    states = list(_compare_states(model, converted))
    with preserved(model), preserved(converted), _same_scales(delayed), eager:
        twin = in_double(model)

        def rows_of(label: str, inputs: Inputs, training: bool, enabled: Sequence[Fusion]) -> list[Row]:
            return judge(model, converted, twin, inputs, original_parameters, enabled, training, label, **how)

        def fails(enabled: Sequence[Fusion]) -> bool:
            return any(_failed(rows_of(*one, enabled)) for one in failing)

        rows, failing, skipped = _all_rows(sets, partial(rows_of, enabled=fusions(converted)))
        # where the original modules fail too, in the converted model, it is their parameters
        found = guilty(fusions(converted), fails) if failing and not fails(()) else []
    paths = dict.fromkeys([*_holders(converted, states), *map(place, found)])
    names = dict.fromkeys(type(recipe).__name__ for recipe in recipes)
    return Verification(type(model).__name__, (*states, *rows), tuple(paths), tuple(skipped), tuple(names))


def _check(model: nn.Module, converted: nn.Module) -> None:
    is_module = isinstance(converted, nn.Module)
    if not is_module or not ("_te_transform" in vars(converted) or fusions(converted)):
        raise ValueError(
            f"the second model is a {type(converted).__name__} that te_transform.convert() did not return, a "
            "converted model is needed: verify(model, te_transform.convert(model))"
        )
    if original_class(model) is not original_class(converted):
        raise ValueError(
            f"the first model is a {type(model).__name__}, the second was a {type(converted).__name__}, the "
            "same class is needed: pass the model that was converted"
        )


@dataclass(frozen=True)
class _Scales:
    """The scales of delayed scaling, which every run goes into."""

    modules: list[nn.Module]

    def until_settled(self) -> Iterator[None]:
        """From 1 on, as often as one of them moves by more than half: a gradient that was cut off in one
        module is too small in all before it, so that each run may settle one module more."""
        for module in self.modules:
            module.reset_fp8_meta_tensors()
        before = None
        for _ in range(len(self.modules) + 2):
            yield
            now = self._now()
            if before is not None and torch.allclose(now, before, rtol=0.5):
                return
            before = now

    def _now(self) -> Tensor:
        states = filter(None, (module.get_fp8_meta_tensors() for module in self.modules))
        return torch.cat([scale for state in states for scale, _ in state.values()])


@contextlib.contextmanager
def _same_scales(modules: list[nn.Module]) -> Iterator[None]:
    """Put back the scales of delayed scaling."""
    before = [(module, module.get_fp8_meta_tensors()) for module in modules]
    try:
        yield
    finally:
        for module, scales in before:
            module.reset_fp8_meta_tensors(scales)


def _trained(inputs: Inputs) -> Inputs:
    """The inputs with every floating tensor requiring a gradient."""
    args, kwargs = inputs.clone()
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    return Inputs(args, kwargs)


def _all_rows(
    sets: list[tuple[str, Inputs]], rows_of: Callable[..., list[Row]]
) -> tuple[list[Row], list[tuple[str, Inputs, bool]], list[str]]:
    """Every row, the sets and modes that have a failing one, and which sets the original did not take."""
    rows: list[Row] = []
    failing, skipped = [], []
    for label, inputs in progress(sets, "verifying"):
        try:
            for training in (True, False):
                rows += (found := rows_of(label, inputs, training))
                failing += [(label, inputs, training)] if _failed(found) else []
        except OriginalError as error:
            if label.startswith(EXAMPLE):
                raise ValueError(
                    f"the original does not run on the example inputs ({inputs}), it raised {error}"
                ) from error
            skipped.append(f"{label}, the original raised {error}")
    return rows, failing, skipped


def _failed(rows: list[Row]) -> bool:
    return not all(row.ok for row in rows)


def _compare_states(model: nn.Module, converted: nn.Module) -> Iterator[Row]:
    own, theirs = model.state_dict(), converted.state_dict()
    if list(own) != list(theirs):
        changed = sorted(own.keys() ^ theirs.keys()) or "in order"
        yield Row(_STATE, "names", False, reason=f"differ, {changed}")
    held = original_parameters(converted)
    for name in own.keys() & theirs.keys():
        if name in held and is_quantised(held[name].held):
            yield _rounded(name, own[name], theirs[name])
        elif not _same_bits(own[name], theirs[name]):
            yield Row(_STATE, name, False, reason="is not bitwise the original's")
    yield Row(_STATE, f"{len(own)} entries", True)


def _rounded(name: str, own: Tensor, theirs: Tensor) -> Row:
    """A weight that is held in FP8 alone may be off by the rounding of E4M3, 3 bits of mantissa."""
    error = float((theirs.double() - own.double()).norm() / own.double().norm().clamp(min=1e-300))
    return Row(_STATE, name, error <= _E4M3, error, allowed=_E4M3, dtype="FP8")


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other)))


def _holders(converted: nn.Module, states: list[Row]) -> Iterator[str]:
    """The sites that hold the parameters which differ."""
    originals = original_parameters(converted)
    for row in states:
        original = originals.get(row.name)
        if not row.ok and original is not None and original.view is not None:
            yield place(original.view.fusion)


def _lines(inputs: str, rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """A line for each output, for the worst gradients and whatever else failed, and one that counts."""
    gradients = sorted((row for row in rows if row.name.startswith("gradient")), key=lambda row: -row.times)
    others = [row for row in rows if not row.name.startswith("gradient")]
    for number, row in enumerate(others + gradients[:_WORST]):
        errors = (row.converted, row.original, row.allowed)
        numbers = [f"{error:.1e}" for error in errors] if row.dtype else [""] * 3
        verdict = "ok" if row.ok else f"FAILED {row.reason}".rstrip()
        yield "" if number else inputs, row.name, *numbers, verdict
    yield "", f"{sum(row.ok for row in rows)} of {len(rows)} passed", "", "", "", ""
