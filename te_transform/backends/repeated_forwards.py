"""The forwards that activation checkpoints repeat within a backward, found by autograd's numbers of nodes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from te_transform.backends.tracing import recomputes

T = TypeVar("T")


def next_node() -> int:
    """Return the number of the next node that autograd makes in this thread."""
    return torch._C._autograd._get_sequence_nr()


@dataclass(eq=False)
class ForwardNodes:
    """The numbers that autograd gave to the nodes of a forward.

    Attributes:
        start: the number of the first node.
        end: the number after the last node.
        number: its number among the model's forwards in training, 0 for another forward.
        needs_update: True if no module of the forward updates the scales of gradients in its own backward.
    """

    start: int = field(default_factory=next_node)
    end: float = math.inf
    number: int = 0
    needs_update: bool = False

    def close(self) -> None:
        """Note the end of the forward."""
        self.end = next_node()

    def created(self, node: int) -> bool:
        """Return True if the node of this number belongs to the forward."""
        return self.start <= node < self.end


class RepeatingNode(NamedTuple):
    """The node of a backward for which a checkpoint repeats a forward.

    Attributes:
        number: autograd's number of the node.
        is_reentrant: True if it is the node of a reentrant checkpoint, which precedes the checkpointed nodes.
    """

    number: int
    is_reentrant: bool

    def nearest(self, starts: Sequence[tuple[int, T]]) -> T:
        """Return the item whose start the node belongs to; `starts` are ascending and not empty."""
        before = [item for start, item in starts if start <= self.number]
        after = [item for start, item in starts if start > self.number]
        is_after = bool(after) and (self.is_reentrant or not before)
        return after[0] if is_after else before[-1]


class RunningBackward:
    """A running backward. Autograd alone holds it.

    A reentrant checkpoint runs a backward of its own within the backward, which counts as a part of it.

    Attributes:
        task: autograd's number of the backward.
        node: the node for which its last checkpoint repeats, or None.
        has_ended: True after the backward.
    """

    def __init__(self, task: int):
        self.task, self.node, self.has_ended = task, None, False
        self._forward: ForwardNodes | None = None
        self._update: Callable[[], None] | None = None

    def after(self, forward: ForwardNodes | None, update: Callable[[], None]) -> None:
        """Call `update` when the backward of `forward` ends: before the next backward, or at the end."""
        if self._update is not None and self._forward is not forward:
            self._update()
        self._forward, self._update = forward, update

    def __call__(self) -> None:
        """Note the end of the backward."""
        self.has_ended = True
        if self._update is not None:
            self._update()


_backwards: WeakValueDictionary[int, RunningBackward] = WeakValueDictionary()  # by thread


def running_backward() -> RunningBackward:
    """Return the running backward, the outermost one if reentrant checkpoints run others within it."""
    thread = threading.get_ident()
    backward = _backwards.get(thread)
    if backward is None or backward.has_ended:
        backward = _backwards[thread] = RunningBackward(torch._C._current_graph_task_id())
        Variable._execution_engine.queue_callback(backward)
    return backward


def repeating_node() -> RepeatingNode:
    """Return the node for which a checkpoint repeats the current call, within a backward.

    Checkpoints in the backward of a reentrant checkpoint repeat the same forward. Its node belongs to the
    outermost backward.
    """
    backward = running_backward()
    if backward.task == torch._C._current_graph_task_id():
        node = torch._C._current_autograd_node()
        is_reentrant = isinstance(node, BackwardCFunction) and not recomputes()
        backward.node = RepeatingNode(node._sequence_nr(), is_reentrant)
    return backward.node
