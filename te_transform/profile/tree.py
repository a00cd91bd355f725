"""Attribute each operation of a step to a module: by ranges in the forward, by autograd in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from te_transform.profile.classes import COMPILED, ELEMENTWISE, NORM, OVERHEAD, operation_class_of_copy
from te_transform.profile.events import Event
from te_transform.profile.ranges import PREFIX, STEP, Label

FACTORED = ("mm", "addmm", "bmm", "baddbmm")  # products of two tensors


@dataclass(eq=False, slots=True)
class Op:
    """An event on the CPU with its owner.

    Attributes:
        event: of the profiler.
        parent: the event around it, or None.
        label: the number of its module's label.
        is_backward: True inside of an autograd node.
        kind: the class of the operation.
        outer: the outermost operation around it, apart from ranges, autograd nodes and compiled code. In the
            backward, the operation of the forward that made the autograd node. None for ranges.
        call: the range around it, or None.
        inside: the events inside it.
    """

    event: Event
    parent: Op | None = None
    label: int = 0
    is_backward: bool = False
    kind: str = OVERHEAD
    outer: Op | None = None
    call: Op | None = None
    inside: list[Op] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.event.name.removeprefix("aten::")


def factor_shapes(product: Op) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the two factors; addmm and baddbmm have a summand before them."""
    return product.event.shapes[1:3] if "add" in product.name else product.event.shapes[:2]


def ops_of(events: Iterable[Event], labels: Sequence[Label]) -> list[Op]:
    """Return the operations of the step on the CPU by their start. The step itself is first."""
    on_cpu = [event for event in events if not (event.is_kernel or event.is_async)]
    step = next(event for event in on_cpu if event.name == STEP)
    during = [event for event in on_cpu if step.start <= event.start and event.end <= step.end]
    during.sort(key=lambda event: (event is not step, event.start, -event.end))
    return [*_attributed(during, labels)]


def _attributed(events: Iterable[Event], labels: Sequence[Label]) -> Iterator[Op]:
    open_in: dict[int, list[Op]] = {}
    makers: dict[tuple[int, int], Op] = {}  # thread and number of an autograd node: the last op before it
    last: dict[int, Op] = {}  # in each thread: the last op with a label in the backward
    for event in events:
        stack = open_in.setdefault(event.thread, [])
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        op = Op(event, stack[-1] if stack else None)
        if op.parent is not None:
            op.parent.inside.append(op)
        _inherit_from_parent(op)
        if event.name.startswith(PREFIX):
            op.label, op.outer, op.call = int(event.name.removeprefix(PREFIX)), None, op
            op.kind = OVERHEAD
        elif event.forward_thread > 0 or event.name.startswith("autograd::engine"):
            maker = makers.get((event.forward_thread, event.sequence), last.get(event.thread))
            _follow(op, maker)
            last[event.thread] = op
        else:
            if event.sequence >= 0:
                makers[event.thread, event.sequence] = op
            _classify(op, labels)
        stack.append(op)
        yield op


def _inherit_from_parent(op: Op) -> None:
    if (parent := op.parent) is not None:
        op.label, op.is_backward, op.call = parent.label, parent.is_backward, parent.call
        op.outer, op.kind = parent.outer, parent.kind if parent.outer is not None else OVERHEAD


def _follow(op: Op, maker: Op | None) -> None:
    """Give an autograd node the label of the operation that made it, unless a checkpoint repeats a module."""
    op.is_backward = True
    if maker is not None:
        op.label, op.outer, op.call = maker.label, maker.outer, maker.call
    op.kind = OVERHEAD


def _classify(op: Op, labels: Sequence[Label]) -> None:
    own = operation_class_of_copy(op.event.name, op.event.dtypes)
    if op.outer is None and own != COMPILED and op.event.name != STEP:
        op.outer = op
    if op.kind == OVERHEAD:
        op.kind = own
        if own == ELEMENTWISE and "norm" in labels[op.label].kind.lower():
            op.kind = NORM
