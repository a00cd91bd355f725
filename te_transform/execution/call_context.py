"""The modes that a call runs in. Executors read them only here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.tracing import recorded, transformed
from te_transform.execution.classes import ModuleRole, Role
from te_transform.execution.division import Division
from te_transform.execution.modes import is_dispatch_mode_on, is_foreign_mode_on, is_graph_mode_on
from te_transform.plan.options import Options


class CallContext:
    """One call of a module, or of a captured graph behind dynamo.

    Each mode is read once: when the call begins, or by the only executor that asks for it.

    Attributes:
        args: the positional arguments of the call.
        is_observed: True if the conversion or verify() observes the call.
        observe_only: True if the observed call runs as captured.
        prepared: a result of an executor's refuse() for its run().
        records_gradients: True if autograd records the call.
        hooks: the hooks that receive the tensors that autograd saves, or None.
        in_backward: True within a backward, in which a checkpoint repeats a forward.
    """

    def __init__(self, args: Sequence[Any], is_observed: bool = False, observe_only: bool = False):
        self.args = args
        self.is_observed, self.observe_only = is_observed, observe_only
        self.prepared: Any = None
        # as backends/tracing.py, without a call of Python: each call reads these three
        self.records_gradients = torch.is_grad_enabled()
        self.hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.in_backward = torch._C._current_graph_task_id() != -1

    @property
    def is_inference(self) -> bool:
        """True if inference_mode() is on."""
        return torch.is_inference_mode_enabled()

    @property
    def is_checkpointed(self) -> bool:
        """True if hooks receive the tensors that autograd saves, as in a checkpoint that repeats the call."""
        return self.hooks is not None

    @property
    def is_transformed(self) -> bool:
        """True if a transform of torch.func or forward-mode differentiation is on."""
        return transformed()

    @property
    def is_recorded(self) -> bool:
        """True if the user records a CUDA graph."""
        return recorded()

    @property
    def is_deterministic(self) -> bool:
        """True if all calls must compute the same bits."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def is_seen_below(self) -> bool:
        """True if a mode below autograd sees the operations of the call."""
        return is_dispatch_mode_on()

    @property
    def is_seen(self) -> bool:
        """True if a mode of te_transform or one below autograd sees the operations of the call."""
        return is_graph_mode_on() or is_dispatch_mode_on()

    @property
    def is_seen_by_others(self) -> bool:
        """True if a user's torch function mode sees the operations of the call."""
        return is_foreign_mode_on()


Mode = tuple[type, bool, bool]
"""The class of a module, whether it trains, and whether autograd records its calls."""


class ModuleCall(CallContext):
    """A call of a converted model, of a part of it, or of a block.

    Attributes:
        role: of the module in the model.
        is_root: True if the model itself is called.
        is_block: True if a block is called, one of many layers.
        module: the called module.
        forward: the forward of the user's class.
        kwargs: the keyword arguments of the call.
        options: of the conversion.
        division: of the parameters among ranks, or None.
        trial: the trial that times this call, or None.
    """

    def __init__(
        self,
        role: ModuleRole,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        division: Division | None = None,
    ):
        super().__init__(args)
        self.role, self.module, self.forward, self.kwargs = role, module, forward, kwargs
        self.is_root, self.is_block = role.kind is Role.MODEL, role.kind is Role.BLOCK
        self.options, self.division = options, division
        self.trial: Any = None

    @property
    def mode(self) -> Mode:
        """The mode of the call."""
        return type(self.module), self.module.training, self.records_gradients

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments that are tensors, without tensors inside of containers."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def is_decoding(self) -> bool:
        """True if this is a step of generation: one token per sequence, without gradients."""
        if self.records_gradients or not (tensors := self.tensors):
            return False
        first = tensors[0]
        if first.is_floating_point():
            return first.dim() == 3 and first.shape[1] == 1
        return first.shape[1:] == (1,)

    @property
    def is_evaluated(self) -> bool:
        """True if the module is in evaluation mode, and none of its parameters gets a gradient."""
        trains = self.records_gradients and any(p.requires_grad for p in self.module.parameters())
        return not self.module.training and not trains

    def run_original(self) -> Any:
        """Run the user's own forward."""
        return self.forward(self.module, *self.args, **self.kwargs)
