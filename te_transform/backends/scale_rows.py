"""The scales of delayed scaling as rows of numbers, one for each weight: what processes agree on, and what a
checkpoint keeps.

Which products have run may differ from process to process, where one got fewer tokens than gain from FP8. The
rows do not: they are the model's matrices, by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from te_transform.backends.joined import Source, state_of
from te_transform.backends.scales import Seen

Row = dict[str, Tensor]
"""What is saved of one product, in fp32.

"scale" [5] has the scales of input, weight, output, of the gradients of output and input, infinite where
there is none yet; "amax_history" [length, 5] the largest values of earlier steps, the one that runs first;
"seen" [3] the largest values of input, weight and gradient that first scales are made of, -infinite where
nothing was seen.
"""

Maximum = Callable[[Tensor], Any]  # takes, in place, the largest of each number over all processes

_DIRECTIONS = {"forward": slice(0, 3), "backward": slice(3, 5)}
_SEEN = ("input", "weight", "grad")
_WIDTH = 5 + len(_SEEN)


class Kernel(Protocol):
    """What a backend keeps for the products that begin with one parameter."""

    seen: Seen
    weights: list[Source]

    def delayed(self) -> dict[str, Any]:
        """Its states of delayed scaling, "forward" and "backward", each with a `scale` and an
        `amax_history`; none where it has none yet."""


def names_of(kernel: Kernel) -> list[str]:
    """The names of its weights in the model, each that of its first parameter; "" where none is known."""
    states = [source.state() for source in kernel.weights]
    return ["" if state is None else state.name for state in states]


class Shared:
    """What this process has of the rows, gathered into one tensor for a collective.

    Args:
        kernels: that run in the recipe here, or may.
        rows: the number of each weight's row, the same in all processes.
        device: where the scales are.
    """

    def __init__(self, kernels: Sequence[Kernel], rows: Mapping[str, int], device: Any):
        self.kernels, self.states = list(kernels), [kernel.delayed() for kernel in kernels]
        self.size, self.scales, self.amaxes = len(rows) * _WIDTH, [], []
        of_scales, of_amaxes = [], []
        for kernel in kernels:
            numbers = [rows.get(name) for name in names_of(kernel)]
            if None in numbers:
                continue
            starts = [number * _WIDTH for number in numbers]
            for columns, state in _given(kernel):
                self.scales.append(state.scale)
                of_scales += [start + column for start in starts for column in range(5)[columns]]
            for number, column, amax in _waiting(kernel):
                self.amaxes.append(amax)
                of_amaxes.append(starts[number] + column)
        self.sizes, self.count = [len(scale) for scale in self.scales], len(of_scales)
        self.places = torch.tensor(of_scales + of_amaxes, dtype=torch.int64, device=device)

    def holds(self, kernels: Sequence[Kernel]) -> bool:
        """Whether these kernels would give the same, as they do once all in FP8 have their scales."""
        if self.amaxes or self.kernels != list(kernels):
            return False
        same = (kernel.delayed() == states for kernel, states in zip(kernels, self.states, strict=True))
        return all(same) and not any(True for kernel in kernels for _ in _waiting(kernel))

    @torch.no_grad()
    def agree(self, maximum: Maximum) -> None:
        """Let all processes scale by the largest values that any of them has seen, in one collective.

        A scale is the smaller the larger the values are that it is made of, so that the smallest scale of all
        processes is the one of the largest values.
        """
        table = torch.full((self.size,), -torch.inf, dtype=torch.float32, device=self.places.device)
        values = torch.cat([table[:0], *self.scales, *(amax.view(1) for amax in self.amaxes)])
        values[: self.count].neg_()
        maximum(table.scatter_reduce_(0, self.places, values, "amax"))
        found = table[self.places]
        if self.scales:
            torch._foreach_copy_(self.scales, found[: self.count].neg().split(self.sizes))
        if self.amaxes:
            torch._foreach_copy_(self.amaxes, [*found[self.count :].unbind()])


def _waiting(kernel: Kernel) -> Iterator[tuple[int, int, Tensor]]:
    """The largest values that no scales are made of yet, with the number of the product and the column."""
    if len(kernel.seen.used) == len(_DIRECTIONS):
        return
    for number, product in enumerate(kernel.seen.products):
        for column, kind in enumerate(_SEEN, start=5):
            direction, amax = "backward" if kind == "grad" else "forward", getattr(product, kind)
            if amax is not None and direction not in kernel.seen.used:
                yield number, column, amax


def _given(kernel: Kernel) -> Iterator[tuple[slice, Any]]:
    """The states that have scales other than the one that TE begins with, with their columns."""
    states = kernel.delayed()
    for direction, columns in _DIRECTIONS.items():
        if states and direction in kernel.seen.used:
            yield columns, states[direction]


def template(names: Iterable[str], length: int) -> dict[str, Row]:
    """What there is to save before anything has run.

    Args:
        names: of the weights.
        length: of the histories.
    """
    return {
        name: {
            "scale": torch.full((5,), torch.inf, dtype=torch.float32, device="cpu"),
            "amax_history": torch.zeros(length, 5, dtype=torch.float32, device="cpu"),
            "seen": torch.full((3,), -torch.inf, dtype=torch.float32, device="cpu"),
        }
        for name in names
    }


def save(kernels: Iterable[Kernel], saved: Mapping[str, Row]) -> None:
    """Write the state of each product into its row, on the CPU; the larger values, where products share a
    weight."""
    for kernel in kernels:
        given = list(_given(kernel))
        for number, (name, product) in enumerate(zip(names_of(kernel), kernel.seen.products, strict=True)):
            if (row := saved.get(name)) is None:
                continue
            for column, kind in enumerate(_SEEN):
                if (amax := getattr(product, kind)) is not None:
                    row["seen"][column] = torch.maximum(row["seen"][column], amax.cpu())
            for columns, state in given:
                width = columns.stop - columns.start
                own = slice(number * width, (number + 1) * width)
                row["scale"][columns] = torch.minimum(row["scale"][columns], state.scale[own].cpu())
                history = row["amax_history"][:, columns]
                history.copy_(torch.maximum(history, state.amax_history[:, own].cpu()))


def combine(saved: Mapping[str, Row], maximum: Maximum, device: Any) -> None:
    """Let each row have what all processes have seen; collective.

    Args:
        saved: of this process, with the same names and sizes in all.
        maximum: the collective.
        device: where it runs.
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


def taken(kernel: Kernel) -> list[Row] | None:
    """The rows that were loaded for its products, which it is now to begin with; None where there are
    none."""
    states = [source.state() for source in kernel.weights]
    rows = [None if state is None else state.saved for state in states]
    return None if None in rows else rows


def restore(kernel: Kernel, rows: list[Row], states: Mapping[str, Any]) -> None:
    """Write rows into the states of a kernel, and into what it has seen."""
    for product, row in zip(kernel.seen.products, rows, strict=True):
        for column, kind in enumerate(_SEEN):
            if row["seen"][column].isfinite():
                setattr(product, kind, row["seen"][column].clone().to(states["forward"].scale.device))
    for direction, columns in _DIRECTIONS.items():
        scale = torch.cat([row["scale"][columns] for row in rows])
        if scale.isinf().any():
            continue
        states[direction].scale.copy_(scale)
        history = torch.cat([row["amax_history"][:, columns] for row in rows], 1)
        states[direction].amax_history.copy_(history)
        kernel.seen.used.add(direction)


def keep_scales(parameters: Iterable[Tensor]) -> None:
    """Keep the scales of products that do not run in this step.

    At the end of a step TE updates the scales of all products that ever ran, from histories in which the step
    of a product that did not run is 0.
    """
    for parameter in parameters:
        for kernel in state_of(parameter).kernels.values():
            for state in kernel.delayed().values():
                state.amax_history[0].copy_(state.amax_history.amax(0))
