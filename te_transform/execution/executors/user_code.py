"""The user's own forward: for the calls that no captured graph runs, or none is faster for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl

from te_transform.execution.blocks import blocks
from te_transform.execution.call_context import ModuleCall, mode_of
from te_transform.execution.material import ReportMaterial
from te_transform.execution.policy import CapturePolicy
from te_transform.execution.trials import Trials

_GRAPHS = "captured graphs may run the call"

_NO_STRIDES = (
    "a nested tensor of layout torch.strided has no sizes to guard, its calls run the user's own code; "
    "pass a padded tensor and a padding mask (src_key_padding_mask of nn.TransformerEncoder), or "
    "layout=torch.jagged"
)

_OVERRIDES = (
    "a {} is given, a tensor whose class sees each call of PyTorch's functions by a __torch_function__ of "
    "its own, of which dynamo captures some calls and not others: such calls run as the user's own code"
)


class UserCode:
    """Runs a call of a module as the user wrote it.

    Args:
        policy: says in which modes nothing is captured.
        material: is told of tensors that no graph may be given.
    """

    name = "the user's own code"

    def __init__(self, policy: CapturePolicy, material: ReportMaterial):
        self.policy, self.material, self.trials = policy, material, Trials()

    def refuse(self, call: ModuleCall) -> str | None:
        """Return why a graph may run the call, or None if the user's own code has to."""
        return None if self._has_to(call) else _GRAPHS

    def is_faster(self, call: ModuleCall) -> bool:
        """Return True if the user's own code has turned out to be faster; sets the trial that goes on."""
        trial = self.trials.of(call)
        own = None if trial is None else self.trials.choice(trial)
        call.trial = trial if own is None else None
        return bool(own)

    def run(self, call: ModuleCall, but_blocks: bool = False) -> Any:
        """Run the call, with whole parameters if the model is divided, except for captured blocks."""
        with self._with_whole_parameters(call, but_blocks):
            return call.run_original()

    def _has_to(self, call: ModuleCall) -> bool:
        policy, options = self.policy, call.options
        if policy.run_original or options.run_original or call.is_seen_by_others:
            return True
        if self._has_no_strides(call.tensors) or self._is_overridden(call.tensors):
            return True
        # Nothing is gained by fused kernels on so little, and a cache that grows would be captured over and
        # over. One that does not may run as a CUDA graph.
        if call.is_decoding and not (options.graphs and _has_static_cache(call)):
            return True
        if type(call.module) in policy.uncaptured or (policy.makes_nested and call.is_evaluated):
            return True
        return mode_of(call.module) in policy.checkpointed_modes

    def _has_no_strides(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if strided nested tensors are given: asking their sizes ends the process."""
        found = any(value.is_nested and value.layout is torch.strided for value in tensors)
        if found:
            self.material.tell(_NO_STRIDES)
        return found

    def _is_overridden(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if tensors are given whose class changes what PyTorch's functions do."""
        kind = next((type(held) for held in tensors if _overrides(type(held))), None)
        if kind is not None:
            self.material.tell(_OVERRIDES.format(kind.__name__))
        return kind is not None

    def _with_whole_parameters(self, call: ModuleCall, but_blocks: bool) -> AbstractContextManager[None]:
        division = call.division
        if division is None:
            return nullcontext()
        repeats = call.records_gradients and mode_of(call.module) in self.policy.checkpointed_modes
        without = blocks(call.module) if but_blocks else ()
        inside = {id(part) for block in without for part in block.modules()}
        return division.whole((part for part in call.module.modules() if id(part) not in inside), repeats)


def _overrides(kind: type[Tensor]) -> bool:
    """Return True if a class of tensors has a __torch_function__ that compilers cannot take apart."""
    if kind is Tensor:
        return False
    own = kind.__torch_function__
    usual = Tensor.__torch_function__.__func__, _disabled_torch_function_impl
    is_known = kind.__module__.startswith("torch.") or hasattr(kind, "__tensor_flatten__")
    return not is_known and getattr(own, "__func__", own) not in usual


def _has_static_cache(call: ModuleCall) -> bool:
    """Return True if there is a cache of keys and values that does not grow, as transformers marks it."""
    given = (*call.args, *call.kwargs.values())
    return any(getattr(value, "is_compileable", False) is True for value in given)
