"""The result of verify(), and how it prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from te_transform.execution.console import as_text
from te_transform.report.as_json import as_json
from te_transform.verify.compare import REFERENCE, Row
from te_transform.verify.names import some
from te_transform.verify.states import STATE_DICT

DEAD = "all inputs"  # the inputs of the row of a model with constant outputs
_WORST = 5  # the number of gradients shown per set of inputs, and of state dict entries


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of verify(); true if all comparisons passed.

    Attributes:
        model: The class name of the model.
        rows: Every comparison.
        guilty: The paths of the sites that cause a failure. For other pairs of modules, the path of the first
            module that differs.
        skipped: A sentence for each set of inputs that the original model rejects.
        recipes: The recipes of a model in FP8. Its errors are compared with those of an emulation, see
            emulate.py.
        dead: The parameters that no gradient reaches, whose comparison shows nothing.
        notes: Sentences about the first difference, and about gradients that were not compared.
    """

    model: str
    rows: tuple[Row, ...]
    guilty: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def title(self) -> str:
        failed = [row for row in self.rows if not row.ok]
        if not failed:
            return f"{self.model}: verified, {len(_comparisons(self.rows))} comparisons"
        if failed[0].inputs == DEAD:
            return f"{self.model}: NOT verified, {failed[0]}"
        if failed[0].inputs == STATE_DICT:
            more = f" ({len(failed)} entries of the state dicts differ)" if len(failed) > 1 else ""
            return f"{self.model}: NOT the same, {failed[0]}{more}"
        return f"{self.model}: NOT the same, {len(failed)} of {len(self.rows)} comparisons failed"

    def as_data(self) -> dict[str, Any]:
        """Return the result as booleans, strings and tuples; see docs/json.md."""
        return {
            "model": self.model,
            "verified": bool(self),
            "failed": [f"{row.inputs}: {row}" for row in self.rows if not row.ok],
            "guilty": self.guilty,
            "skipped": self.skipped,
            "dead": self.dead,
            "notes": self.notes,
        }

    def to_json(self) -> str:
        """Return as_data() as JSON; "schema" is the version of its fields."""
        return as_json(self.as_data())

    def __rich__(self) -> Group:
        columns = ("compared", "converted", "original", "allowed", "")
        table = Table(*columns, box=box.SIMPLE_HEAD, caption="errors are relative and against fp64")
        for inputs, group in groupby(self.rows, key=lambda row: row.inputs):
            table.add_row(Text(inputs, style="bold"))
            for name, *others in _lines(inputs, list(group)):
                table.add_row(Text(f"  {name}", overflow="fold"), *others)
        notes = [f"guilty: {path or 'the model itself'}" for path in self.guilty]
        notes += [f"skipped: {sentence}" for sentence in self.skipped]
        if self.dead:
            notes.append(f"dead: no gradient reaches {some(self.dead)}")
        notes += [f"note: {sentence}" for sentence in self.notes]
        nothing = Counter(row.inputs for row in self.rows if not row.finite)
        notes += [
            f"note: {inputs}: {count} tensors of the original have no finite number, and were not compared"
            for inputs, count in nothing.items()
        ]
        notes += [f"note: 'original' is emulated, as exact as FP8 allows in {name}" for name in self.recipes]
        return Group(Text(self.title, style="bold"), table, *map(Text, notes))

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"Verification({self.title})"


def _lines(inputs: str, rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each output, for the worst gradients, and for the number of passed comparisons."""
    gradients = sorted((row for row in rows if row.name.startswith("gradient")), key=lambda row: -row.times)
    others = [row for row in rows if not row.name.startswith("gradient")]
    if inputs == STATE_DICT:
        others = [*others[:-1][:_WORST], others[-1]]
    for row in others + gradients[:_WORST]:
        errors = (row.converted, row.original, row.allowed)
        numbers = [f"{error:.1e}" for error in errors] if row.dtype else [""] * 3
        verdict = f"{'ok' if row.ok else 'FAILED'} {row.reason}".rstrip()
        yield row.name, *numbers, verdict
    compared = _comparisons(rows)
    yield f"{sum(row.ok for row in compared)} of {len(compared)} passed", "", "", "", ""


def _comparisons(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.name != REFERENCE]
