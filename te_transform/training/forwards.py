"""The training forwards of a model with their decisions, for checkpoints that repeat them in a backward."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from te_transform.backends.repeated_forwards import ForwardNodes, repeating_node
from te_transform.training.layered import Decision


@dataclass(eq=False, kw_only=True)
class TrainingForward(ForwardNodes):
    """A training forward.

    Attributes:
        decision: of the forward.
        thread: autograd numbers the nodes of each thread separately.
    """

    decision: Decision
    thread: int = field(default_factory=threading.get_ident)


class TrainingForwards:
    """The last training forwards of a model.

    A checkpoint repeats a forward for an autograd node that the forward made, so that the number of the node
    identifies the forward.
    """

    MOST = 1024

    def __init__(self) -> None:
        self.noted: deque[TrainingForward] = deque(maxlen=self.MOST)
        self.open: set[int] = set()  # the threads that run a forward

    @contextmanager
    def noted_as(self, decision: Decision) -> Iterator[None]:
        """Note a forward, unless the call is a part of a noted forward."""
        forward = TrainingForward(decision=decision)
        if forward.thread in self.open:
            yield
            return
        self.noted.append(forward)
        self.open.add(forward.thread)
        try:
            yield
        finally:
            self.open.remove(forward.thread)
            forward.close()

    def repeated(self) -> Decision | None:
        """Return the decision of the forward that the current backward repeats, or None if it had none.

        Raises:
            RuntimeError: the forward is unknown.
        """
        node = repeating_node()
        first, threads = self.noted[0] if self.noted else None, {forward.thread for forward in self.noted}
        is_ambiguous = len(threads) > 1 and any(f.decision != first.decision for f in self.noted)
        if is_ambiguous or (len(self.noted) == self.MOST and node.number < first.start):
            raise RuntimeError(
                f"expected a checkpoint that repeats one of the last {self.MOST} forwards in one thread, got "
                f"an older one or forwards of several steps in {len(threads)} threads; call step() after all "
                "backwards"
            )
        noted = next((forward for forward in reversed(self.noted) if forward.start <= node.number), None)
        # a checkpoint around the model may contain later nodes, but a reentrant one drops nothing
        is_known = noted is not None and (noted.created(node.number) or not node.is_reentrant)
        return noted.decision if is_known else None
