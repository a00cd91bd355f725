"""Traceable forms of calls that end a graph in dynamo, for the captures of this package alone."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.misc import DebuggingVariable
from torch.nn.modules import transformer

_STACKS = ("TransformerEncoder.forward", "TransformerDecoder.forward")
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_METHODS = ("forward", "_sa_block", "_mha_block", "_ff_block")  # of a layer, as far as it has them


@contextmanager
def traceable_forms() -> Iterator[None]:
    """Let dynamo trace these calls meanwhile; compilers of others see PyTorch's own."""
    rules, compare = trace_rules.get_torch_obj_rule_map(), symbolic_convert.compare_op_handlers
    forms = {transformer._detect_is_causal_mask: _CausalMask, warnings.warn: _Warning}
    before, less = {key: rules[key] for key in forms if key in rules}, compare["<"]
    try:
        rules.update(forms)
        compare["<"] = _compared(less)
        yield
    finally:
        for key in forms:
            rules.pop(key, None)
        rules.update(before)
        compare["<"] = less


class _CausalMask(UserFunctionVariable):
    """The question of nn.TransformerEncoder and Decoder whether a mask is causal, asked of its values.

    The answer is a hint for the layers, which leave out the mask then. PyTorch's own layers compute the same
    with the mask, so they get no hint. Other layers may do something else: the question ends the graph there.
    """

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        mask, is_causal, *_ = (*args, None, None)
        is_asked = isinstance(is_causal, ConstantVariable) and is_causal.value is None
        is_mask = isinstance(mask, TensorVariable) and (mask.dtype is torch.bool or mask.dtype.is_floating_point)
        if is_asked and is_mask and len(args) == 3 and _are_layers_of_pytorch(tx):
            return ConstantVariable.create(False)
        return super().call_function(tx, args, kwargs)


def _are_layers_of_pytorch(tx: Any) -> bool:
    """Return whether the function being traced hands the hint to PyTorch's own layers, and to nobody else."""
    code = tx.f_code
    if code.co_filename != transformer.__file__ or code.co_qualname not in _STACKS:
        return False
    stack = getattr(tx.symbolic_locals.get("self"), "value", None)
    return isinstance(stack, nn.Module) and all(map(_is_of_pytorch, getattr(stack, "layers", (None,))))


def _is_of_pytorch(layer: Any) -> bool:
    kind = next((kind for kind in _LAYERS if isinstance(layer, kind)), None)
    if kind is None or not _runs(layer, kind, *_METHODS):
        return False
    attentions = [part for part in layer.children() if isinstance(part, nn.MultiheadAttention)]
    return bool(attentions) and all(_runs(part, nn.MultiheadAttention, "forward") for part in attentions)


def _runs(module: nn.Module, kind: type, *methods: str) -> bool:
    """Return whether these methods are those of the class, and no hook sees keyword arguments."""
    hooks = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs
    own = (getattr(kind, name, None) for name in methods)
    now = (inspect.unwrap(getattr(type(module), name, len)) for name in methods)
    same = (method is None or method is other for method, other in zip(own, now, strict=True))
    return not any(hooks) and all(same) and not any(name in vars(module) for name in methods)


class _Warning(DebuggingVariable):
    """warnings.warn() of a text, which is called after the graph, in each call."""

    @classmethod
    def create_with_source(cls, value: Any, source: Any) -> _Warning:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return cls(value, source=source)

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        named = [kwargs[name] for name in ("message", "category")[len(args) :] if name in kwargs]
        said = [*args[:2], *named]
        is_plain = [isinstance(value, kind) for value, kind in zip(map(_constant, said), (str, type), strict=False)]
        if not (said and all(is_plain) and self.source):
            return SkipFunctionVariable(self.value, source=self.source).call_function(tx, args, kwargs)
        tx.output.root_tx.debug_locals.append((self, said))
        return ConstantVariable.create(None)


def _constant(value: Any) -> Any:
    """Return what a variable of dynamo stands for, or None if only the call knows."""
    return value.as_python_constant() if value.is_python_constant() else None


def _compared(less: Callable[..., Any]) -> Callable[..., Any]:
    """Return what handles `<` for dynamo: no number that torch.rand() draws is less than 0, as a layer's
    `torch.rand([]) < self.layerdrop` asks."""

    def compare(tx: Any, args: Any, kwargs: Any) -> Any:
        number, bound = args
        is_bound = isinstance(bound, ConstantVariable) and isinstance(bound.value, (int, float))
        if is_bound and bound.value <= 0 and not math.isnan(bound.value) and _is_drawn(number):
            return ConstantVariable.create(False)
        return less(tx, args, kwargs)

    return compare


def _is_drawn(number: Any) -> bool:
    """Return whether it is one number of torch.rand(), to which nothing has been written."""
    if not isinstance(number, TensorVariable):
        return False
    node = number.as_proxy().node
    is_rand = node.op == "call_function" and node.target is torch.rand and "out" not in node.kwargs
    return is_rand and not node.users and number.ndim == 0
