"""Calls that a checkpoint may repeat, with the scales that they had, or the function that ran them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.fp8.current_model import forward_number
from te_transform.backends.tracing import saving_hooks


@dataclass
class NotedCall:
    """The calls of a product, or of a graph, within one forward.

    Attributes:
        in_fp8: True if they ran in FP8.
        calibrating: True if they ran in their own dtype because there were no scales yet.
        ran: the compiled function that ran a graph, with its key; None if the graph ran fused.
        scales: a copy of the scales of delayed scaling.
        state: the state with which compiled graphs repeat a product.
        forward: the number of the forward.
        moments: autograd's sequence number at each call.
        repeated: True after a backward has repeated one of them.
    """

    in_fp8: bool
    calibrating: bool
    ran: Any = None
    scales: Tensor | None = None
    state: Any = None
    forward: int | None = None
    moments: list[int] = field(default_factory=list)
    repeated: bool = False

    @property
    def in_recipe(self) -> bool:
        """True if the calls were meant to run in FP8."""
        return self.in_fp8 or self.calibrating


class NotedCalls:
    """The last calls of a product or a graph.

    Several forwards may come before a backward, each with its own scales, and a backward may repeat them in
    any order. A repetition is identified by the autograd node that needs it. The forward recorded that node
    after the call, or, for reentrant checkpoints, before the call. Autograd numbers the nodes of a thread.
    """

    MOST = 32  # forwards without a backward; each keeps a few numbers on the GPU

    def __init__(self) -> None:
        self.noted: deque[NotedCall] = deque(maxlen=self.MOST)

    def note(
        self,
        in_fp8: bool = False,
        calibrating: bool = False,
        scales: Callable[[], Tensor | None] = lambda: None,
        ran: Any = None,
    ) -> None:
        """Note a call that starts now; `scales` returns a copy of its scales."""
        forward, last = forward_number(), self.noted[-1] if self.noted else None
        known = last is not None and forward is not None and last.forward == forward
        if not known or (last.in_fp8, last.calibrating, last.ran) != (in_fp8, calibrating, ran):
            waiting = [call for call in self.noted if not call.repeated]
            last = NotedCall(in_fp8, calibrating, ran, scales() if in_fp8 else None, None, forward)
            self.noted = deque([*waiting, last], self.MOST)
        last.moments.append(torch._C._autograd._get_sequence_nr())

    def again(self) -> NotedCall | None:
        """Return the call that the current backward repeats, or None if none was noted."""
        moments = [(moment, call) for call in self.noted for moment in call.moments]
        if not moments:
            return None
        node = torch._C._current_autograd_node()._sequence_nr()
        if saving_hooks():
            found = [call for moment, call in reversed(moments) if moment <= node]
        else:
            found = [call for moment, call in moments if moment > node]
        call = found[0] if found else self.noted[-1]
        call.repeated = True
        return call
