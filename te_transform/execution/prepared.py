"""What runs the calls of one kind: a function, recorded as CUDA graphs or not, with the head beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_transform.backends.quantized import opened
from te_transform.execution.graph_recording import CallSignature
from te_transform.execution.lm_head import Head
from te_transform.execution.replayed import Replayed


class Prepared:
    """A function of a graph's own arguments, and after them of what is known before it runs.

    Args:
        run: the function, without the head.
        head: what runs beside it.
        replayed: the function as CUDA graphs, which takes tensors that are held in FP8 as their bytes.
        forms: the places of these, with their dtypes.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        head: Head | None,
        replayed: Replayed | None = None,
        forms: Mapping[int, torch.dtype] | None = None,
    ):
        self.run, self.head, self.replayed, self.forms = run, head, replayed, forms or {}

    def __call__(self, *arguments: Any) -> Any:
        return self._with_head(self.run if self.replayed is None else self._replay, arguments)

    def kind_of(self, arguments: Sequence[Any], own: int) -> CallSignature | None:
        """What was recorded for a call; None where nothing was, or a replay needs more than its first `own`
        arguments."""
        if self.replayed is None:
            return None
        kind = self.replayed.kind_of(opened(arguments, self.forms))
        return kind if kind.graphs is not None and kind.graphs.needs <= own else None

    def again(self, kind: CallSignature) -> Callable[..., Any] | None:
        """Return what replays calls of this kind, by the graph's own arguments; None if the recording was let
        go of."""
        replay = None if self.replayed is None else self.replayed.again(kind)
        return None if replay is None else lambda *arguments: self._with_head(replay, arguments)

    def _replay(self, *arguments: Any) -> Any:
        return self.replayed(*opened(arguments, self.forms))

    def _with_head(self, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return run(*arguments) if self.head is None else self.head(run, *arguments)
