"""The effects of a call beside its result.

Names do not tell all of them: in training, a batch norm updates its running statistics, and an embedding with
`max_norm` shortens the rows that it reads.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from te_transform.graph.nodes import called, changes_state, is_foreign, is_random, value, writes

_MAY_DRAW = re.compile(
    r"scaled_dot_product_attention|multi_head_attention_forward|lstm|gru|rnn_(tanh|relu)"
    r"|fractional_max_pool\dd(_with_indices)?|(svd|pca)_lowrank"
)

_RUNNING = ("running_mean", "running_var")
_SHORTENED = ("max_norm", ("weight",))
# of each function: the argument that switches updates on, or "", and the updated arguments
_UPDATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "batch_norm": ("training", _RUNNING),
    "native_batch_norm": ("training", _RUNNING),
    "cudnn_batch_norm": ("training", _RUNNING),
    "miopen_batch_norm": ("training", _RUNNING),
    "instance_norm": ("use_input_stats", _RUNNING),
    "batch_norm_update_stats": ("", _RUNNING),
    "batch_norm_gather_stats": ("", _RUNNING),
    "batch_norm_gather_stats_with_counts": ("", _RUNNING),
    "embedding": _SHORTENED,
    "embedding_bag": _SHORTENED,
    "fused_moving_avg_obs_fake_quant": ("", ("running_min", "running_max", "scale", "zero_point")),
}


def updated(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call updates; nodes.writes() knows the calls whose names tell it."""
    name, _, _overload = called(node).partition(".")
    if node.op != "call_function" or name not in _UPDATES:
        return []
    switch, names = _UPDATES[name]
    defaults = _defaults(node.target, name)
    arguments = {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}
    if switch and arguments.get(switch) in (None, False):
        return []
    return [argument for name in names if isinstance(argument := arguments.get(name), fx.Node)]


def changes_tensors(node: fx.Node) -> bool:
    """Return True if a call writes to a tensor or an object in place, or updates an argument."""
    return writes(node) or bool(updated(node))


def is_pure(node: fx.Node) -> bool:
    """Return True if only its result shows that a call ran, so that an unread call can be erased.

    Private functions of PyTorch may change a mode or a tensor under any name.
    """
    name, _, _overload = called(node).partition(".")
    has_effects = any(test(node) for test in (changes_tensors, changes_state, is_random, is_foreign))
    is_unknown = name.startswith("_") or isinstance(node.target, HigherOrderOperator) or value(node) is None
    return not (has_effects or is_unknown or _MAY_DRAW.fullmatch(name))


@cache
def _defaults(target: Any, name: str) -> dict[str, Any]:
    """Return the default values of a function's arguments, by name and in their order."""
    if isinstance(target, FunctionType):
        parameters = inspect.signature(target).parameters
        return {key: parameter.default for key, parameter in parameters.items()}
    schema = getattr(target, "_schema", None) or getattr(torch.ops.aten, name).default._schema
    return {argument.name: argument.default_value for argument in schema.arguments}
