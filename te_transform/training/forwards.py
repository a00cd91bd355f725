"""The training forwards of a model with their decisions, for checkpoints that repeat them in a backward."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.autograd import Variable

from te_transform.backends.tracing import saving_hooks
from te_transform.training.layered import Decision


@dataclass
class TrainingForward:
    """A training forward, with the numbers that autograd gave to its nodes.

    Attributes:
        decision: of the forward.
        thread: autograd numbers the nodes of each thread separately.
        start: the number of the first node.
        end: the number after the last node.
    """

    decision: Decision
    thread: int
    start: int
    end: float = math.inf


class RunningBackward:
    """A running backward, with the decision that its last checkpoint repeated. Autograd alone holds it."""

    def __init__(self, task: int):
        self.task, self.decision, self.has_ended = task, None, False

    def __call__(self) -> None:
        """Note the end of the backward."""
        self.has_ended = True


class TrainingForwards:
    """The last training forwards of a model.

    A checkpoint repeats a forward for an autograd node that the forward made, so that the number of the node
    identifies the forward.
    """

    MOST = 1024

    def __init__(self) -> None:
        self.noted: deque[TrainingForward] = deque(maxlen=self.MOST)
        self.open: set[int] = set()  # the threads that run a forward
        self.running: WeakValueDictionary[int, RunningBackward] = WeakValueDictionary()  # by thread

    @contextmanager
    def noted_as(self, decision: Decision) -> Iterator[None]:
        """Note a forward, unless the call is a part of a noted forward."""
        forward = TrainingForward(decision, threading.get_ident(), torch._C._autograd._get_sequence_nr())
        if forward.thread in self.open:
            yield
            return
        self.noted.append(forward)
        self.open.add(forward.thread)
        try:
            yield
        finally:
            self.open.remove(forward.thread)
            forward.end = torch._C._autograd._get_sequence_nr()

    def repeated(self) -> Decision | None:
        """Return the decision of the forward that the current backward repeats, or None if it had none.

        A reentrant checkpoint runs a backward of its own within the backward. Checkpoints in it repeat the
        same forward.
        """
        thread, task = threading.get_ident(), torch._C._current_graph_task_id()
        backward = self.running.get(thread)
        if backward is None or backward.has_ended:
            backward = self.running[thread] = RunningBackward(task)
            Variable._execution_engine.queue_callback(backward)
        if backward.task == task:
            backward.decision = self._of(torch._C._current_autograd_node()._sequence_nr())
        return backward.decision

    def _of(self, node: int) -> Decision | None:
        """Return the decision of the forward that made a node.

        Raises:
            RuntimeError: the forward is unknown.
        """
        first, threads = self.noted[0] if self.noted else None, {forward.thread for forward in self.noted}
        is_ambiguous = len(threads) > 1 and any(f.decision != first.decision for f in self.noted)
        if is_ambiguous or (len(self.noted) == self.MOST and node < first.start):
            raise RuntimeError(
                f"expected a checkpoint that repeats one of the last {self.MOST} forwards in one thread, got "
                f"an older one or forwards of several steps in {len(threads)} threads; call step() after all "
                "backwards"
            )
        found = next((forward for forward in reversed(self.noted) if forward.start <= node), None)
        # a checkpoint around the model may contain later nodes, but a reentrant one drops nothing
        is_known = found is not None and (node < found.end or saving_hooks())
        return found.decision if is_known else None
