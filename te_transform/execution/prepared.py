"""A specialized function with its recording and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from te_transform.backends.fp8.fp8_only import StoredForms, opened
from te_transform.execution.graph_recording import CallSignature
from te_transform.execution.lm_head import Head
from te_transform.execution.replayed import Replayed


class Prepared:
    """A function of a graph's arguments, followed by the precomputed tensors.

    Args:
        run: the function without the head.
        head: runs outside of the recording.
        replayed: the function as CUDA graphs. FP8 tensors are passed as bytes.
        forms: the indices of these FP8 tensors, with their classes and dtypes.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        head: Head | None,
        replayed: Replayed | None = None,
        forms: StoredForms | None = None,
    ):
        self.run, self.head, self.replayed, self.forms = run, head, replayed, forms or {}

    def __call__(self, *arguments: Any) -> Any:
        return self._with_head(self.run if self.replayed is None else self._replay, arguments)

    def signature_of(self, arguments: Sequence[Any], own: int) -> CallSignature | None:
        """Return the signature of a call, or None.

        Its recording must need only the first `own` arguments.
        """
        if self.replayed is None:
            return None
        signature = self.replayed.signature_of(opened(arguments, self.forms))
        is_enough = signature.graphs is not None and signature.graphs.needs <= own
        return signature if is_enough else None

    def again(self, signature: CallSignature) -> Callable[..., Any] | None:
        """Return a function of the graph's arguments that replays the recording, or None if it was freed."""
        replay = None if self.replayed is None else self.replayed.again(signature)
        return None if replay is None else lambda *arguments: self._with_head(replay, arguments)

    def _replay(self, *arguments: Any) -> Any:
        return self.replayed(*opened(arguments, self.forms))

    def _with_head(self, run: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return run(*arguments) if self.head is None else self.head(run, *arguments)
