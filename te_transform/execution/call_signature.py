"""Functions of tensors that may be recorded, and the calls of each that one recording can compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from te_transform.backends.fp8.fp8_only import StoredForms
from te_transform.execution.division import RankGroup
from te_transform.execution.rerun import RunGraph

MOST_CHANGES = 2  # changes of the set of outputs with gradients; each change causes a new recording


@dataclass(frozen=True)
class Function:
    """A function of tensors, with the properties that its recording needs.

    Args:
        run: the function. It returns a sequence of tensors, and of values that are the same in all calls.
        static_inputs: for each argument, True if it is memory of the model, whose address belongs to the
            signature of a call. Other arguments are copied to the addresses that the recorded kernels read.
        writes: the indices of the arguments that the function writes to.
        states: the indices of the arguments in which it updates state, such as the amax of FP8.
        note: receives a sentence if calls cannot be replayed.
        ranks: the ranks of a divided model. A recording calls the function several times, and each of these
            calls runs collectives, so all ranks must record the same call. Addresses differ per rank, so they
            are not part of the signature. If they changed since the recording, the function runs.
        forms: of the arguments that are FP8-only. `run` and the indices are those of opened() arguments.
    """

    run: RunGraph
    static_inputs: Sequence[bool]
    writes: Sequence[int]
    states: Sequence[int]
    note: Callable[[str], None]
    ranks: RankGroup | None = None
    forms: StoredForms = field(default_factory=dict)

    @property
    def changes(self) -> list[int]:
        """The indices of the arguments that a call changes."""
        return [*self.writes, *self.states]

    def agreed(self, why: str | None) -> str | None:
        """Return why calls cannot be replayed, on this rank or on another."""
        return why if self.ranks is None else self.ranks.agreed(why)


@dataclass(eq=False)
class CallSignature:
    """The calls with the same shapes and mode, and their recording."""

    trained: list[int]  # the indices of the arguments that need a gradient, one for each tensor
    writes: set[int] = field(default_factory=set)  # the indices of the arguments that calls wrote to
    calls: int = 0
    wanted: set[int] = field(default_factory=set)  # the outputs that got gradients in the warm-ups
    refused: bool = False
    changes: int = 0  # changes of `wanted` after a recording
    copies_gradients: bool = False  # True if something other than `.grad` held a gradient
    graphs: Any = None  # the GraphRecording, see executors/cuda_graph.py
    waiting: Callable[[], Any] | None = None  # a weak reference to the last forward without a backward

    def knows_gradients(self) -> bool:
        """Return True if the outputs with gradients are known, or nothing is trained."""
        return not self.trained or bool(self.wanted)

    def is_waiting(self) -> bool:
        """Return True if a replay would overwrite what a pending backward reads."""
        return self.waiting is not None and self.waiting() is not None

    def warmed_up(self, run: RunGraph, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the function, and note which of its outputs get gradients."""
        self.calls += 1
        before = _versions(arguments)
        outputs = run(*arguments)
        now, given = _versions(arguments), set(map(id, arguments))
        self.writes |= {index for index, version in before.items() if now[index] != version}
        for index, output in enumerate(outputs):
            is_new = isinstance(output, Tensor) and id(output) not in given
            if self.trained and is_new and output.requires_grad:
                output.register_hook(partial(self._note_gradient, index))
        return outputs

    def _note_gradient(self, index: int, grad: Tensor | None) -> None:
        if grad is not None:  # a function with several outputs calls the hooks of all outputs
            self.wanted.add(index)

    def record_for(self, wanted: set[int], note: Callable[[str], None]) -> None:
        """Record the next call for other outputs with gradients, unless the set keeps changing."""
        self.wanted, self.graphs, self.changes = wanted, None, self.changes + 1
        if self.changes > MOST_CHANGES:
            self.refused = True
            note("a graph runs without CUDA graphs: the set of its outputs with gradients keeps changing")


def _versions(arguments: Sequence[Any]) -> dict[int, int]:
    tensors = ((index, a) for index, a in enumerate(arguments) if isinstance(a, Tensor))
    return {index: a._version for index, a in tensors if not a.is_inference()}
