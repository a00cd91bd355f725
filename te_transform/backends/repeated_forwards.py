"""The forwards that activation checkpoints repeat within a backward, found by autograd's numbers of nodes."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
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
    """

    start: int = field(default_factory=next_node)
    end: float = math.inf

    def close(self) -> None:
        """Note the end of the forward."""
        self.end = next_node()

    def made(self, node: int) -> bool:
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
    """A running backward, with the node for which its last checkpoint repeats. Autograd alone holds it."""

    def __init__(self, task: int):
        self.task, self.node, self.has_ended = task, None, False

    def __call__(self) -> None:
        """Note the end of the backward."""
        self.has_ended = True


_backwards: WeakValueDictionary[int, RunningBackward] = WeakValueDictionary()  # by thread


def repeating_node() -> RepeatingNode:
    """Return the node for which a checkpoint repeats the current call, within a backward.

    A reentrant checkpoint runs a backward of its own within the backward. Checkpoints in it repeat the same
    forward, whose node is that of the outer backward.
    """
    thread, task = threading.get_ident(), torch._C._current_graph_task_id()
    backward = _backwards.get(thread)
    if backward is None or backward.has_ended:
        backward = _backwards[thread] = RunningBackward(task)
        Variable._execution_engine.queue_callback(backward)
    if backward.task == task:
        node = torch._C._current_autograd_node()
        is_reentrant = isinstance(node, BackwardCFunction) and not recomputes()
        backward.node = RepeatingNode(node._sequence_nr(), is_reentrant)
    return backward.node
