"""The scales of delayed scaling as a table with one row per weight, for ranks to agree on and to save.

Ranks may have run different products, because a rank with few tokens does not use FP8 for them. The rows are
the same on all ranks: the model's matrices by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_transform.backends.fp8.calibration import RecordedAmax
from te_transform.backends.fp8.registry import ParameterState, Source, read_state

ScaleRow = dict[str, Tensor]
"""The saved state of one product, in fp32.

"scale" [5] has the scales of input, weight, output, and of the gradients of output and input, infinite
without a scale. "amax_history" [length, 5] has the amax of earlier steps; row 0 is the running step. "seen"
[3] has the amax of input, weight and gradient for the first scales, -infinite before they are recorded.
"""

Maximum = Callable[[Tensor], Any]  # reduces a tensor to its elementwise maximum over all ranks, in place

_DIRECTIONS = {"forward": slice(0, 3), "backward": slice(3, 5)}
_AMAX_NAMES = ("input", "weight", "grad")
_TABLE_COLUMNS = 5 + len(_AMAX_NAMES)


class ScaledKernel(Protocol):
    """The interface of what a backend keeps for the products that begin with one parameter."""

    seen: RecordedAmax
    weights: list[Source]
    last: int
    """The number of the last forward in training that it ran in, 0 before the first one."""

    def delayed(self) -> dict[str, Any]:
        """Return the states of delayed scaling, "forward" and "backward"; {} before there are any.

        Each state has a `scale` and an `amax_history`.
        """


def names_of(kernel: ScaledKernel) -> list[str]:
    """Return the name of the first parameter of each weight, or "" if it is unknown."""
    return [names[0] for names in joined_names(kernel)]


def joined_names(kernel: ScaledKernel) -> list[list[str]]:
    """Return the names of the parameters of each weight, "" for an unknown one."""
    return [["" if state is None else state.name for state in _states(source)] for source in kernel.weights]


def _states(source: Source) -> list[ParameterState | None]:
    """Return the states of the parameters of a weight, or of the first one if their tensors are unknown."""
    return [read_state(parameter) for parameter in source.parameters()] or [source.state()]


class RankTable:
    """This rank's entries of the table, gathered into one tensor for a collective.

    Args:
        kernels: the kernels that run in the recipe on this rank, or may.
        rows: the row number of each weight, the same on all ranks.
        device: the device of the scales.
    """

    def __init__(self, kernels: Sequence[ScaledKernel], rows: Mapping[str, int], device: Any):
        self.kernels, self.states = list(kernels), [kernel.delayed() for kernel in kernels]
        self.size, self.scales, self.amaxes = len(rows) * _TABLE_COLUMNS, [], []
        scale_cells, amax_cells = [], []
        for kernel in kernels:
            numbers = [rows.get(name) for name in names_of(kernel)]
            if None in numbers:
                continue
            starts = [number * _TABLE_COLUMNS for number in numbers]
            for number, columns, scale, _ in _changed_scales(kernel):
                self.scales.append(scale)
                scale_cells += [starts[number] + column for column in range(5)[columns]]
            for number, column, amax in _waiting(kernel):
                self.amaxes.append(amax)
                amax_cells.append(starts[number] + column)
        self.sizes, self.count = [len(scale) for scale in self.scales], len(scale_cells)
        self.cells = torch.tensor(scale_cells + amax_cells, dtype=torch.int64, device=device)

    def is_of(self, kernels: Sequence[ScaledKernel]) -> bool:
        """Return True if the table of these kernels would be equal, as it is once all have their scales."""
        if self.amaxes or self.kernels != list(kernels):
            return False
        same = (kernel.delayed() == states for kernel, states in zip(kernels, self.states, strict=True))
        return all(same) and not any(True for kernel in kernels for _ in _waiting(kernel))

    @torch.no_grad()
    def agree(self, maximum: Maximum) -> None:
        """Set the scales of all ranks to those of the largest amax of any rank, in one collective.

        A larger amax gives a smaller scale, so each scale becomes the minimum over the ranks.
        """
        table = torch.full((self.size,), -torch.inf, dtype=torch.float32, device=self.cells.device)
        values = torch.cat([table[:0], *self.scales, *(amax.view(1) for amax in self.amaxes)])
        values[: self.count].neg_()
        maximum(table.scatter_reduce_(0, self.cells, values, "amax"))
        cells = table[self.cells]
        if self.scales:
            torch._foreach_copy_(self.scales, cells[: self.count].neg().split(self.sizes))
        if self.amaxes:
            torch._foreach_copy_(self.amaxes, [*cells[self.count :].unbind()])


def _waiting(kernel: ScaledKernel) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each recorded amax without a scale, with the number of the product and the column."""
    for number, product in enumerate(kernel.seen.products):
        if len(product.used) == len(_DIRECTIONS):
            continue
        for column, name in enumerate(_AMAX_NAMES, start=5):
            direction, amax = "backward" if name == "grad" else "forward", getattr(product, name)
            if amax is not None and direction not in product.used:
                yield number, column, amax


def _changed_scales(kernel: ScaledKernel) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield the scales that are no longer TE's initial ones.

    Yields:
        the number of the product, its columns in a row, its scales, and their amax history.
    """
    states = kernel.delayed()
    for number, product in enumerate(kernel.seen.products if states else ()):
        for direction, columns in _DIRECTIONS.items():
            if direction in product.used:
                width, state = columns.stop - columns.start, states[direction]
                own = slice(number * width, (number + 1) * width)
                yield number, columns, state.scale[own], state.amax_history[:, own]


def template(names: Iterable[str], length: int) -> dict[str, ScaleRow]:
    """Return the table before any product has run.

    Args:
        names: the names of the weights.
        length: the length of the amax history.
    """
    return {
        name: {
            "scale": torch.full((5,), torch.inf, dtype=torch.float32, device="cpu"),
            "amax_history": torch.zeros(length, 5, dtype=torch.float32, device="cpu"),
            "seen": torch.full((3,), -torch.inf, dtype=torch.float32, device="cpu"),
        }
        for name in names
    }


def save(kernels: Iterable[ScaledKernel], saved: Mapping[str, ScaleRow]) -> None:
    """Write the state of each product into the rows of its parameters, on the CPU.

    Frozen and trained parameters are not joined, so a parameter that is frozen later has run in several
    products. Its row has the state of the product that ran last in training; of several in the same forward,
    the larger amax.
    """
    newest: dict[str, int] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.last, reverse=True):
        rows = []
        for names in joined_names(kernel):
            last = [name for name in names if newest.setdefault(name, kernel.last) == kernel.last]
            rows.append([saved[name] for name in last if name in saved])
        _save_products(kernel, rows)


def _save_products(kernel: ScaledKernel, rows: Sequence[Sequence[ScaleRow]]) -> None:
    for product, written in zip(kernel.seen.products, rows, strict=True):
        for column, name in enumerate(_AMAX_NAMES):
            for row in written if (amax := getattr(product, name)) is not None else ():
                row["seen"][column] = torch.maximum(row["seen"][column], amax.cpu())
    for number, columns, scale, history in _changed_scales(kernel):
        for row in rows[number]:
            row["scale"][columns] = torch.minimum(row["scale"][columns], scale.cpu())
            saved = row["amax_history"][:, columns]
            saved.copy_(torch.maximum(saved, history.cpu()))


def combine_ranks(saved: Mapping[str, ScaleRow], maximum: Maximum, device: Any) -> None:
    """Combine the tables of all ranks; collective.

    Args:
        saved: the table of this rank, with the same names and sizes on all ranks.
        maximum: the collective.
        device: the device that the collective runs on.
    """
    tensors = [row[key] for row in saved.values() for key in ("amax_history", "seen")]
    scales = [row["scale"] for row in saved.values()]
    whole = torch.cat([part.flatten() for part in (*tensors, *(-scale for scale in scales))]).to(device)
    maximum(whole)
    parts = whole.cpu().split([tensor.numel() for tensor in (*tensors, *scales)])
    for tensor, part in zip(tensors, parts, strict=False):
        tensor.copy_(part.view_as(tensor))
    for scale, part in zip(scales, parts[len(tensors) :], strict=True):
        scale.copy_(-part)


def loaded_for(kernel: ScaledKernel) -> list[ScaleRow] | None:
    """Return the loaded rows that its products start with, or None."""
    rows = [[state and state.saved for state in _states(source)] for source in kernel.weights]
    return None if any(None in joined for joined in rows) else [_joined_row(joined) for joined in rows]


def _joined_row(rows: Sequence[ScaleRow]) -> ScaleRow:
    """Return the row of joined parameters: the larger amax, and no number that a parameter has not."""
    stacked = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    largest = {key: numbers.amax(0) for key, numbers in stacked.items()}
    scale, seen = stacked["scale"], stacked["seen"]
    return {
        **largest,
        "scale": torch.where(scale.isinf().any(0), torch.inf, scale.amin(0)),
        "seen": torch.where(seen.isinf().any(0), -torch.inf, largest["seen"]),
    }


def restore(kernel: ScaledKernel, rows: Sequence[ScaleRow]) -> None:
    """Write rows into the states of a kernel and into its recorded amax."""
    device = kernel.delayed()["forward"].scale.device
    for product, row in zip(kernel.seen.products, rows, strict=True):
        for column, name in enumerate(_AMAX_NAMES):
            if row["seen"][column].isfinite():
                setattr(product, name, row["seen"][column].clone().to(device))
        known = {name for name, columns in _DIRECTIONS.items() if row["scale"][columns].isfinite().all()}
        product.used |= known
    for number, columns, scale, history in _changed_scales(kernel):
        scale.copy_(rows[number]["scale"][columns])
        history.copy_(rows[number]["amax_history"][:, columns])


def keep_scales(parameters: Iterable[Tensor]) -> None:
    """Keep the scales of products that do not run in this step.

    At the end of a step, TE updates the scales of all products that ever ran. The history of a product that
    did not run in this step would have an amax of 0.
    """
    for parameter in parameters:
        for kernel in read_state(parameter).kernels.values():
            for state in kernel.delayed().values():
                state.amax_history[0].copy_(state.amax_history.amax(0))
