"""The user's own forward, for calls that no captured graph can run, or that graphs do not speed up."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl

from te_transform.execution.blocks import blocks
from te_transform.execution.call_context import ModuleCall
from te_transform.execution.known_integers import Questions
from te_transform.execution.material import ReportMaterial
from te_transform.execution.modes import NOTHING
from te_transform.execution.policy import CapturePolicy
from te_transform.execution.trials import OWN_IS_FASTER, Trials

_CHOSEN = "the conversion chose your own code, see the notes"
_SEEN = "a torch function mode of yours sees the operations"
_UNSUPPORTED = "an argument is a tensor of a class that no graph supports"
_ONE_TOKEN = "one token per sequence and no gradients, which fused kernels do not speed up"
_UNCAPTURED = "dynamo cannot capture the code of a divided model"
_NESTED = "the evaluation of nn.TransformerEncoder makes nested tensors"
_CHECKPOINTED = "an activation checkpoint in the forward repeats a part of it"

_NO_STRIDES = (
    "a nested tensor of layout torch.strided has no sizes to guard, so its calls run the user's own code. "
    "Pass a padded tensor and a padding mask (src_key_padding_mask of nn.TransformerEncoder), or "
    "layout=torch.jagged"
)

_OVERRIDES = (
    "expected arguments of class torch.Tensor, got a {} with its own __torch_function__, whose calls dynamo "
    "captures only in part; calls with such arguments run the user's own code"
)


class UserCode:
    """The executor that runs a call of a module as the user wrote it.

    Args:
        policy: decides in which modes nothing is captured.
        material: receives notes on tensors that no graph supports.

    Attributes:
        calls: the calls of the model that it ran, by reason.
    """

    name = "the user's own code"

    def __init__(self, policy: CapturePolicy, material: ReportMaterial):
        self.policy, self.material, self.trials = policy, material, Trials()
        self.questions = Questions()
        self.calls: Counter[str] = Counter()

    def needed(self, call: ModuleCall) -> str | None:
        """Return why the user's own code must run the call, or None if a graph may run it."""
        policy, options = self.policy, call.options
        if policy.run_original or options.run_original:
            return _CHOSEN
        if call.is_seen_by_others:
            return _SEEN
        if self._has_unsupported(call):
            return _UNSUPPORTED
        # Fused kernels do not speed up single tokens, and a growing cache would cause a capture per token.
        # With a static cache, the step may run as a CUDA graph.
        if call.is_decoding and not (options.graphs and _has_static_cache(call)):
            return _ONE_TOKEN
        if type(call.module) in policy.uncaptured:
            return _UNCAPTURED
        if policy.makes_nested and call.is_evaluated:
            return _NESTED
        # a checkpoint repeats a forward that ran before the block was captured
        if call.is_block and call.in_backward and not call.role.has_run:
            return _CHECKPOINTED
        is_checkpointed = policy.checkpointed_modes and call.mode in policy.checkpointed_modes
        return _CHECKPOINTED if is_checkpointed else None

    def faster(self, call: ModuleCall) -> str | None:
        """Return a reason if trials found the user's own code faster, else None.

        Set `call.trial` if a trial is not over.
        """
        trial = self.trials.of(call)
        own = None if trial is None else self.trials.choice(trial)
        call.trial = trial if own is None else None
        return OWN_IS_FASTER if own else None

    def count(self, call: ModuleCall, why: str) -> None:
        """Count a call for the report, unless it is of a block or of verify()."""
        if call.is_root and not self.policy.run_original:
            self.calls[why] += 1

    def run(self, call: ModuleCall, but_blocks: bool = False) -> Any:
        """Run the call, with whole parameters if the model is divided, except for captured blocks."""
        questions, given = self.questions, (call.module, call.args, call.kwargs)
        with (
            self._with_whole_parameters(call, but_blocks),
            questions.answered(*given) if but_blocks else NOTHING,
        ):
            return call.run_original()

    def _has_unsupported(self, call: ModuleCall) -> bool:
        """Return True if an argument is a tensor that no graph supports.

        A read of the sizes of a strided nested tensor ends the process. Some classes change the results of
        PyTorch's functions.
        """
        for value in (*call.args, *call.kwargs.values()):
            if not isinstance(value, Tensor):
                continue
            if value.is_nested and value.layout is torch.strided:
                self.material.tell(_NO_STRIDES)
                return True
            if (kind := type(value)) is not Tensor and _overrides(kind):
                self.material.tell(_OVERRIDES.format(kind.__name__))
                return True
        return False

    def _with_whole_parameters(self, call: ModuleCall, but_blocks: bool) -> AbstractContextManager[None]:
        division = call.division
        if division is None:
            return NOTHING
        repeats = call.records_gradients and call.mode in self.policy.checkpointed_modes
        without = blocks(call.module) if but_blocks else ()
        inside = {id(part) for block in without for part in block.modules()}
        return division.whole((part for part in call.module.modules() if id(part) not in inside), repeats)


def _overrides(kind: type[Tensor]) -> bool:
    """Return True if a class of tensors has a __torch_function__ that compilers cannot trace."""
    own = kind.__torch_function__
    usual = Tensor.__torch_function__.__func__, _disabled_torch_function_impl
    is_known = kind.__module__.startswith("torch.") or hasattr(kind, "__tensor_flatten__")
    return not is_known and getattr(own, "__func__", own) not in usual


def _has_static_cache(call: ModuleCall) -> bool:
    """Return True if an argument is a static cache of keys and values, as transformers marks it."""
    given = (*call.args, *call.kwargs.values())
    return any(getattr(value, "is_compileable", False) is True for value in given)
