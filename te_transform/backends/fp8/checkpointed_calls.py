"""Calls that a checkpoint may repeat, with the scales that they had, or the function that ran them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from te_transform.backends.fp8.current_model import running_forward
from te_transform.backends.repeated_forwards import ForwardNodes, next_node, repeating_node


@dataclass
class NotedCall:
    """The calls of a product, or of a graph, within one forward.

    Attributes:
        in_fp8: True if they ran in FP8.
        in_recipe: True if they were meant to run in FP8. The first calls have no scales yet.
        ran: the compiled function that ran a graph, with its key; None if the graph ran fused.
        scales: a copy of the scales of delayed scaling.
        state: the state with which compiled graphs repeat a product.
        forward: the nodes of the forward, or None outside of a model.
        starts: the number of the first node of each call.
        repeated: True after a backward has repeated one of them.
    """

    in_fp8: bool
    in_recipe: bool
    ran: Any = None
    scales: Tensor | None = None
    state: Any = None
    forward: ForwardNodes | None = None
    starts: list[int] = field(default_factory=list)
    repeated: bool = False


class NotedCalls:
    """The last calls of a product or a graph.

    Several forwards may come before a backward, each with its own scales, and a backward may repeat them in
    any order. A repetition is identified by the number of the autograd node that needs it. The node belongs
    to the forward, or to a checkpoint around the forward.
    """

    MOST = 32  # forwards without a backward; each keeps a few numbers on the GPU

    def __init__(self) -> None:
        self.noted: deque[NotedCall] = deque(maxlen=self.MOST)

    def note(
        self,
        in_fp8: bool = False,
        in_recipe: bool = False,
        scales: Callable[[], Tensor | None] = lambda: None,
        ran: Any = None,
    ) -> None:
        """Note a call that starts now; `scales` returns a copy of its scales."""
        forward, last = running_forward(), self.noted[-1] if self.noted else None
        known = last is not None and forward is not None and last.forward is forward
        if not known or (last.in_fp8, last.in_recipe, last.ran) != (in_fp8, in_recipe, ran):
            waiting = [call for call in self.noted if not call.repeated]
            last = NotedCall(in_fp8, in_recipe, ran, scales() if in_fp8 else None, None, forward)
            self.noted = deque([*waiting, last], self.MOST)
        last.starts.append(next_node())

    def again(self) -> NotedCall | None:
        """Return the call that the current backward repeats, or None if none was noted."""
        if not self.noted:
            return None
        node = repeating_node()
        starts = [(start, call) for call in self.noted for start in call.starts]
        inside = [each for each in starts if (forward := each[1].forward) and forward.created(node.number)]
        call = node.nearest(inside or starts)
        call.repeated = True
        return call
