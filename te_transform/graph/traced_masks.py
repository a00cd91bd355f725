"""Causal masks that transformers makes only when it is traced."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import signature
from types import CodeType
from typing import Any

from torch import fx
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import UserFunctionVariable

from te_transform.graph.dynamo_patches import leave_forward_to_user

_OF_CAPTURE = "a mask that may exist only in captures"
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_DEVIATIONS = ("or_mask_function", "and_mask_function", "block_sequence_ids")
_LOOKS_AHEAD = (
    "its attention has is_causal=False, but transformers makes a causal mask when it is traced; set "
    "is_causal to False in the config, or True on the attention modules"
)


def forms_of_transformers() -> dict[Any, type]:
    """Return the functions of transformers to trace in another form, if it is imported.

    transformers leaves out the causal mask of a batch without padding, and its attention then reads
    `is_causal` of the module. It makes the mask when it is traced, so `is_causal=False` would have no effect.
    """
    masks = sys.modules.get("transformers.masking_utils")
    attention = sys.modules.get("transformers.integrations.sdpa_attention")
    if masks is None or attention is None:
        return {}
    makers = (vars(masks)[name] for name in _MAKERS if hasattr(masks, name))
    return {attention.sdpa_attention_forward: _AttentionFunction} | dict.fromkeys(makers, _MaskFunction)


def makes_masks(code: CodeType) -> bool:
    """Return True if the code is a function of transformers that makes masks.

    A forward that is not captured as a whole gets the masks that it gets without a capture.
    """
    masks = sys.modules.get("transformers.masking_utils")
    return masks is not None and code.co_filename == masks.__file__


class _MaskFunction(UserFunctionVariable):
    """A function that makes a causal mask, or leaves it out."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        trace = super().call_function
        mask = trace(tx, args, kwargs)
        given = _by_name(self, args, kwargs).items()
        if isinstance(mask, TensorVariable) and not any(map(_needs_mask, given)):
            mask.as_proxy().node.meta[_OF_CAPTURE] = True
        return mask


def _needs_mask(argument: tuple[str, VariableTracker]) -> bool:
    """Return True if an argument makes the mask necessary without a capture too."""
    name, given = argument
    if name == "config":
        return not getattr(given.realize().value, "is_causal", True)
    if name == "attention_mask":
        return isinstance(mask := given.realize(), TensorVariable) and mask.ndim == 4
    if name == "allow_is_causal_skip":
        return not given.as_python_constant()
    return name in _DEVIATIONS and not (given.is_python_constant() and given.as_python_constant() is None)


class _AttentionFunction(UserFunctionVariable):
    """The function that calls scaled_dot_product_attention."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        given = _by_name(self, args, kwargs)
        mask, nothing = given["attention_mask"].realize(), ConstantVariable.create(None)
        if isinstance(mask, TensorVariable) and _is_of_capture(mask.as_proxy().node):
            told = given.get("is_causal", nothing).as_python_constant()
            if not (_guarded(tx, given["module"].realize(), "is_causal", True) if told is None else told):
                leave_forward_to_user(_LOOKS_AHEAD)
        trace = super().call_function
        return trace(tx, args, kwargs)


def _by_name(
    function: UserFunctionVariable, args: Sequence[VariableTracker], kwargs: dict[str, VariableTracker]
) -> dict[str, VariableTracker]:
    """Return the arguments of a call by name."""
    return dict(zip(signature(function.fn).parameters, args, strict=False)) | kwargs


def _guarded(tx: Any, owner: Any, name: str, default: Any) -> Any:
    """Return a constant attribute, with a guard on its value."""
    arguments = owner, ConstantVariable.create(name), ConstantVariable.create(default)
    read = VariableTracker.build(tx, getattr).call_function
    return read(tx, arguments, {}).realize().as_python_constant()


def _is_of_capture(node: fx.Node) -> bool:
    """Return True if a mask, or the mask that it is a slice of, may exist only in captures."""
    while _OF_CAPTURE not in node.meta and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return _OF_CAPTURE in node.meta
