"""Attention through Hugging Face's own door, AttentionInterface: the model's code goes on building masks and
caches.

The converted module reads a copy of its config that names our core; model.config stays as it is, so that
checkpoints and set_attn_implementation() see the model they knew. Masks, lengths and dropout are read at
every call.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.rotary import rotating
from te_transform.slots import OwnerSlot, Slot, original_class, traced

NAME = "te_transform"
_KNOWN = {"position_ids", "cache_position", "use_cache", "sliding_window", "is_causal", "output_attentions"}


class DispatchSlot(OwnerSlot):
    """A Hugging Face attention module whose written-out core is called by another name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._te_transform_slot
        if why := _why_as_it_was(self, slot, args, kwargs):
            slot.fusion.count_plain(why)
            return self._as_it_was(*args, **kwargs)
        if not torch.compiler.is_compiling():
            _follow(self.config, slot.config)
        turning = None
        if slot.rotates and slot.fusion.enabled and not traced():
            turning = rotating(original_class(self))  # of the forward that the class has today
        if turning is None:
            return super(OwnerSlot, self).forward(*args, **kwargs)
        return turning(self, *args, **kwargs)

    def _as_it_was(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward under its own config; whoever calls it meanwhile gets the same numbers."""
        ours = self.__dict__["config"]
        try:
            self.__dict__["config"] = self._te_transform_slot.config
            return super(OwnerSlot, self).forward(*args, **kwargs)
        finally:
            self.__dict__["config"] = ours


def _why_as_it_was(module: nn.Module, slot: Slot, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why the call is one that sdpa_attention_forward is the best for, in which we would be in the way."""
    if traced() or not (slot.fusion.enabled and _is_copy(module.config)):
        return None
    hidden = next(iter((*args, *kwargs.values())), None)
    why = slot.fusion.why_plain(hidden) if isinstance(hidden, Tensor) else None
    return why if why and _named(slot.config) == "sdpa" else None


def dispatches(module: nn.Module, cores: tuple[str, ...]) -> bool:
    """Whether the module looks its attention core up by name, and today's name is one of `cores`."""
    scope = _scope(module)
    named = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"} <= scope.keys()
    return named and getattr(getattr(module, "config", None), "_attn_implementation", None) in cores


def enter(module: nn.Module, slot: Slot) -> None:
    """Let `module` find our core under its name."""
    _scope(module)["ALL_ATTENTION_FUNCTIONS"].register(NAME, attend)
    slot.config = module.config
    module.__dict__["config"] = copy.copy(module.config)
    # the public setter would pass the name on to configs that are shared with the rest of the model
    module.config._attn_implementation_internal = _name(module, slot)


def _name(module: nn.Module, slot: Slot) -> str:
    """Our core's name, in a form that compilers read too where the module's code does not ask for others."""
    constants = repr(getattr(getattr(_forward(module), "__code__", None), "co_consts", ()))
    asks = any(repr(name) in constants for name in slot.fusion.fused.stands_for)
    return _Name(slot.config) if asks else NAME


class _Name(str):
    """Our core's name, which is equal too to the one in the model's config: some forwards go by that."""

    config: Any

    def __new__(cls, config: Any) -> _Name:
        name = super().__new__(cls, NAME)
        name.config = config
        return name

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or self.config._attn_implementation == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _follow(config: Any, original: Any) -> None:
    """Let the copy of a config hold what the original holds now, but for the name of the core."""
    if _is_copy(config):
        name = config._attn_implementation_internal
        vars(config).update({**vars(original), "_attn_implementation_internal": name})


def _is_copy(config: Any) -> bool:
    """Whether it is ours, and not what somebody has put in its place."""
    return _named(config) == NAME


def _named(config: Any) -> str | None:
    """The name that the config's public property returns, which looks at much else at every call."""
    return getattr(config, "__dict__", {}).get("_attn_implementation_internal")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as AttentionInterface calls it: query [batch, heads, length, width] -> [batch, length, heads,
    width].

    Where the probabilities are wanted, or an argument is new to us, the function the model's config names is
    called.
    """
    slot: Slot = module._te_transform_slot
    named, core = _named(slot.config), slot.fusion.fused
    original = _original(named, module)
    # sdpa_attention_forward takes any argument, and goes by one of those that are new to us
    new = {"position_bias"} if named == "sdpa" else rest.keys() - _KNOWN
    known = all(rest.get(key) is None for key in new)
    causal = named == "sdpa" and attention_mask is None and _is_causal(module, query, rest)
    stands = named in core.stands_for and slot.fusion.enabled and known and not _wants_probabilities(rest)
    if stands:
        slot.fusion.count_run()
    if stands and named == "sdpa":  # which knows how to call PyTorch's kernels with its own masks
        stands = core.takes(query, key, value, attention_mask, causal) and _is_theirs(original)
    if not stands:
        return original(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **rest)
    if slot.rotates and not traced():
        value = _alone(value, query, key)
    mask = None if attention_mask is None else attention_mask[..., : key.shape[-2]]
    scale = slot.scale if scaling is None else scaling
    grouped = key.shape[1] != query.shape[1]
    out = core(query, key, value, mask, dropout, causal, scale, grouped)
    return out.transpose(1, 2).contiguous(), None


def _alone(value: Tensor, *others: Tensor) -> Tensor:
    """The values in storage of their own, where a joined product's would be kept for them alone.

    A backward keeps queries and keys as they were turned; before that they were the larger part of what the
    values are a part of.
    """
    storage = value.untyped_storage()
    shared = any(x.untyped_storage().data_ptr() == storage.data_ptr() for x in others)
    if shared or not value.requires_grad or storage.nbytes() <= value.nbytes:
        return value
    return value.transpose(1, 2).contiguous().transpose(1, 2)  # [batch, length, heads, width] in memory


def _is_causal(module: nn.Module, query: Tensor, rest: dict[str, Any]) -> bool:
    """What sdpa_attention_forward of transformers 5 takes a call without a mask for."""
    given = rest.get("is_causal")
    return query.shape[2] > 1 and (getattr(module, "is_causal", True) if given is None else given)


def _original(named: str, module: nn.Module) -> Callable:
    scope = _scope(module)
    return scope["ALL_ATTENTION_FUNCTIONS"].get_interface(named, scope["eager_attention_forward"])


def _is_theirs(sdpa: Callable) -> bool:
    """Whether the function is Hugging Face's own: anybody can register another under its name."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa is sdpa_attention_forward


def _scope(module: nn.Module) -> dict[str, Any]:
    """The globals that hold the module's attention functions."""
    scope = getattr(_forward(module), "__globals__", {})
    if "ALL_ATTENTION_FUNCTIONS" in scope:
        return scope
    # somebody may have put a forward from elsewhere around the class's own
    scopes = (vars(sys.modules[kind.__module__]) for kind in original_class(module).__mro__)
    return next((scope for scope in scopes if "ALL_ATTENTION_FUNCTIONS" in scope), {})


def _forward(module: nn.Module) -> Callable:
    return inspect.unwrap(original_class(module).forward)


def _wants_probabilities(rest: dict[str, Any]) -> bool:
    """Whether the caller asked for attention probabilities, which a fused core never has."""
    if rest.get("output_attentions"):
        return True
    # the collector's context variable cannot be compiled, nor what it collects
    if torch.compiler.is_compiling():
        return False
    from transformers.utils.output_capturing import _active_collector

    return any("attentions" in name for name in _active_collector.get() or {})
