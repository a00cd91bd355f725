"""The costs of a recorded step: by module, by class of operations, and by operation."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Iterator

from torch import nn

from te_transform.graph.grouped import grouped
from te_transform.profile.classes import CLASSES, IDLE
from te_transform.profile.ranges import Label, Ranges
from te_transform.profile.result import PartTime
from te_transform.profile.steps import RecordedSteps
from te_transform.profile.timeline import slices_of
from te_transform.profile.tree import Op, ops_of
from te_transform.profile.watch import Watch
from te_transform.report.places import listed, unnumbered

NS = 1e-9  # seconds in a nanosecond


class Analysis:
    """The operations of a recorded step and their exclusive costs in nanoseconds.

    Attributes:
        watch: the torch calls of the first step, none for a converted or compiled model.
        by_label: label number, True in the backward, class -> cost.
        by_outer: outermost operation -> cost, with its backward.
        by_op: operation -> cost, without the operations inside, and without waiting for the CPU before it.
    """

    def __init__(self, model: nn.Module, recording: RecordedSteps):
        self.model, self.recording, self.labels = model, recording, recording.labels
        self.watch = recording.watch or Watch(Ranges(model))
        self.ops = ops_of(recording.events, recording.labels)
        self.on_gpu = any(event.is_kernel for event in recording.events)
        self.by_label: Counter[tuple[int, bool, str]] = Counter()
        self.by_outer: Counter[Op] = Counter()
        self.by_op: Counter[Op] = Counter()
        for each in slices_of(self.ops, recording.events):
            self.by_label[each.op.label, each.op.is_backward, each.kind] += each.taken
            self.by_op[each.op] += each.taken * (each.kind != IDLE)
            if each.op.outer is not None:
                self.by_outer[each.op.outer] += each.taken

    @property
    def total(self) -> int:
        """The duration of the profiled step in nanoseconds."""
        return self.ops[0].event.end - self.ops[0].event.start

    @property
    def scale(self) -> float:
        """Seconds of a timed step per nanosecond of the step under the profiler, which may be slower."""
        return min(NS, statistics.median(self.recording.seconds) / self.total)

    @property
    def root(self) -> int:
        """The number of the model's own label."""
        return next((n for n, label in enumerate(self.labels) if label.kind and not label.path), 0)

    def forward(self) -> Iterator[Op]:
        """Yield the operations of the forward, without ranges."""
        return (op for op in self.ops if op.outer is not None and not op.is_backward)

    def within(self, op: Op) -> int:
        """Return the cost of an operation and of all operations inside it."""
        return self.by_op[op] + sum(map(self.within, op.inside))

    def cost(self, labels: Container[int] | None = None, kind: str = "") -> int:
        """Return the cost of these label numbers and of this class; of all by default."""
        return sum(
            taken
            for (label, _, own), taken in self.by_label.items()
            if (labels is None or label in labels) and (not kind or own == kind)
        )

    def under(self, path: str) -> set[int]:
        """Return the numbers of the labels at a path and below it."""
        inside = f"{path}." if path else ""
        return {
            n
            for n, label in enumerate(self.labels)
            if n and (label.path == path or label.path.startswith(inside))
        }

    def classes(self) -> dict[str, float]:
        """Return the seconds of each class, in the order of the table."""
        return {kind: NS * taken for kind in CLASSES if (taken := self.cost(kind=kind))}

    def parts(self) -> Iterator[PartTime]:
        """Yield the parts of the step, the most expensive first. Equal layers are one part."""
        numbers = sorted({number for number, _, _ in self.by_label})
        groups = grouped((alike(self.labels[number]), number) for number in numbers)
        yield from sorted(map(self._part, groups.values()), key=lambda part: -part.seconds)

    def _part(self, numbers: list[int]) -> PartTime:
        first, kinds, backward = self.labels[numbers[0]], Counter(), 0
        for (number, is_backward, kind), taken in self.by_label.items():
            if number in numbers:
                kinds[kind] += taken
                backward += taken * is_backward
        return PartTime(
            where(self.labels[number] for number in numbers),
            first.kind,
            len(numbers),
            NS * kinds.total(),
            NS * backward,
            {kind: NS * kinds[kind] for kind in CLASSES if kinds[kind]},
            first.rule,
        )


def alike(label: Label) -> tuple[str, str, str]:
    """Return a key that equal layers share."""
    return unnumbered(label.path), label.kind, label.rule


def where(labels: Iterable[Label]) -> str:
    """Return the paths of labels as text."""
    all_labels = [*labels]
    if not all_labels[0].kind and not all_labels[0].path:
        return "outside of modules"
    return listed(label.path for label in all_labels)
