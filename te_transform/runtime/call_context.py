"""The modes that a call runs in. Executors ask them here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from te_transform.backends.tracing import in_backward, recorded, saving_hooks, transformed
from te_transform.runtime.modes import is_dispatch_mode_on, is_foreign_mode_on, is_graph_mode_on


class CallContext:
    """One call of a module, or of a captured graph behind dynamo.

    Each mode is read once, when an executor first asks for it.

    Attributes:
        args, kwargs: of the call; a graph has no kwargs.
        is_observed: whether the conversion or verify() looks at the call.
        observe_only: whether the call runs as captured for that.
        found: what an executor's refuse() found out for its run().
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        is_observed: bool = False,
        observe_only: bool = False,
    ):
        self.args, self.kwargs = args, kwargs or {}
        self.is_observed, self.observe_only = is_observed, observe_only
        self.found: Any = None

    @cached_property
    def records_gradients(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled()

    @cached_property
    def is_inference(self) -> bool:
        """Whether inference_mode() is on."""
        return torch.is_inference_mode_enabled()

    @cached_property
    def is_checkpointed(self) -> bool:
        """Whether hooks take what autograd saves, as those of a checkpoint that will repeat the call."""
        return saving_hooks()

    @cached_property
    def in_backward(self) -> bool:
        """Whether a backward makes the call, as a checkpoint repeats a forward."""
        return in_backward()

    @cached_property
    def is_transformed(self) -> bool:
        """Whether a transform of torch.func or forward-mode differentiation is on."""
        return transformed()

    @cached_property
    def is_recorded(self) -> bool:
        """Whether somebody else records a CUDA graph."""
        return recorded()

    @cached_property
    def is_deterministic(self) -> bool:
        """Whether all calls have to compute the same bits."""
        return torch.are_deterministic_algorithms_enabled()

    @cached_property
    def is_seen_below(self) -> bool:
        """Whether a mode below autograd sees the operations of the call."""
        return is_dispatch_mode_on()

    @cached_property
    def is_seen(self) -> bool:
        """Whether a mode of te_transform or one below autograd sees the operations of the call."""
        return is_graph_mode_on() or self.is_seen_below

    @cached_property
    def is_seen_by_others(self) -> bool:
        """Whether a user's torch function mode sees the operations of the call."""
        return is_foreign_mode_on()
