"""Traceable forms of calls that cause graph breaks in dynamo, only for captures of this package."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.exc import Unsupported
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.misc import DebuggingVariable
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.modules import transformer

from te_transform.graph.dynamo_patches import around, leave_to_user, patched
from te_transform.graph.traced_masks import forms_of_transformers

_ASKS = (
    "nn.TransformerEncoder and Decoder read a mask to check if it is causal, on which their result depends; "
    "pass is_causal, or tgt_is_causal to a decoder"
)
_STACKS = ("TransformerEncoder.forward", "TransformerDecoder.forward")
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_METHODS = ("forward", "_sa_block", "_mha_block", "_ff_block")  # encoder layers have no _mha_block


@contextmanager
def traceable_forms() -> Iterator[None]:
    """Register the traceable forms with dynamo in this context; other compilations keep PyTorch's own."""
    rules, compare = trace_rules.get_torch_obj_rule_map(), symbolic_convert.compare_op_handlers
    own = {
        transformer._detect_is_causal_mask: _CausalMask,
        warnings.warn: _Warning,
        torch.compiler.is_exporting: UserFunctionVariable,  # its code: PyTorch 2.11 folds it to True
        associative_scan: _Scan,
    }
    forms = own | forms_of_transformers()
    before, less = {key: rules[key] for key in forms if key in rules}, compare["<"]
    try:
        rules.update(forms)
        compare["<"] = _compared(less)
        with patched([(TensorVariable, "method_item", around(_fold_item))]):
            yield
    finally:
        for key in forms:
            rules.pop(key, None)
        rules.update(before)
        compare["<"] = less


class _CausalMask(UserFunctionVariable):
    """The function that checks if the mask of nn.TransformerEncoder and Decoder is causal, from its values.

    The answer is a hint: a layer may omit a causal mask. PyTorch's own layers compute the same result with
    the mask, and get the answer False. If the result may differ, the check causes a graph break.
    """

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [variable.realize() for variable in args]
        if len(given) == 3 and _python_value(given[1], 0) is None and _is_only_a_hint(tx, given[0]):
            return ConstantVariable.create(False)
        traced = super().call_function
        with suppress(Unsupported):
            return traced(tx, args, kwargs)
        leave_to_user(_ASKS)


def _is_only_a_hint(tx: Any, mask: Any) -> bool:
    """Return True if the traced stack has the same result and gradients with a mask and no hint."""
    code, local = tx.f_code, tx.symbolic_locals
    if code.co_filename != transformer.__file__ or code.co_qualname not in _STACKS:
        return False
    stack, x = local["self"].realize(), (local.get("src") or local["tgt"]).realize()
    if not (isinstance(mask, TensorVariable) and isinstance(x, TensorVariable)) or mask.requires_grad:
        return False
    fits = mask.device == x.device and mask.dtype in (torch.bool, torch.float32, x.dtype)
    return fits and all(map(_is_of_pytorch, stack.value.layers))


def _is_of_pytorch(layer: Any) -> bool:
    kind = next((kind for kind in _LAYERS if isinstance(layer, kind)), None)
    if kind is None or not _uses_methods(layer, kind, *_METHODS):
        return False
    attention = layer.self_attn
    if not isinstance(attention, nn.MultiheadAttention):
        return False
    is_own = _uses_methods(attention, nn.MultiheadAttention, "forward")
    # bias_k and add_zero_attn add a key, which a hint would hide
    return is_own and attention.bias_k is None and not attention.add_zero_attn


def _uses_methods(module: nn.Module, kind: type, *methods: str) -> bool:
    """Return True if the module uses these methods of the class, and no hook sees keyword arguments."""
    hooks = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs
    own = (getattr(kind, name, None) for name in methods)
    now = (inspect.unwrap(getattr(type(module), name, len)) for name in methods)
    same = (method is None or method is other for method, other in zip(own, now, strict=True))
    return not any(hooks) and all(same) and not any(name in vars(module) for name in methods)


class _Warning(DebuggingVariable):
    """A warnings.warn() call with a text, which each call runs after the graph."""

    @classmethod
    def create_with_source(cls, value: Any, source: Any) -> _Warning:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        return cls(value, source=source)

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        named = [kwargs[name] for name in ("message", "category")[len(args) :] if name in kwargs]
        said = [*args[:2], *named]
        is_plain = map(isinstance, map(_python_value, said), (str, type))
        if not (said and all(is_plain) and self.source):
            ends_the_graph = SkipFunctionVariable(self.value, source=self.source).call_function
            return ends_the_graph(tx, args, kwargs)
        tx.output.root_tx.debug_locals.append((self, said))
        return ConstantVariable.create(None)


class _Scan(UserFunctionVariable):
    """associative_scan(), in operations on all elements.

    Its kernel for pointwise functions has a backward that takes memory for each pair of elements. Mamba of
    transformers calls it only when it is traced.
    """

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        combine_and_elements, mode = args[:4], ConstantVariable.create("generic")
        trace = super().call_function
        return trace(tx, combine_and_elements, {**kwargs, "combine_mode": mode})


def _python_value(variable: Any, unknown: Any = None) -> Any:
    """Return the constant value of a dynamo variable, or `unknown` if it is not constant."""
    return variable.as_python_constant() if variable.is_python_constant() else unknown


def _compared(less: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dynamo handler for `<` that folds `torch.rand([]) < bound` to False for bounds up to 0.

    Layers compare this way for layer dropping: `torch.rand([]) < self.layerdrop`.
    """

    def compare(tx: Any, args: Any, kwargs: Any) -> Any:
        number, bound = args
        value = _python_value(bound.realize())
        if isinstance(value, (int, float)) and value <= 0 and _is_drawn(number.realize()):
            return ConstantVariable.create(False)
        return less(tx, args, kwargs)

    return compare


def _is_drawn(number: Any) -> bool:
    """Return True if the variable is a 0-dim result of torch.rand() that no other node reads or writes."""
    if not isinstance(number, TensorVariable):
        return False
    node = number.as_proxy().node
    is_rand = node.op == "call_function" and node.target is torch.rand and "out" not in node.kwargs
    return is_rand and not node.users and number.ndim == 0


def _fold_item(own: Callable[..., Any], self: TensorVariable, *args: Any, **kwargs: Any) -> Any:
    """Fold `.item()` of a tensor made only of Python numbers.

    DeBERTa slices by `torch.tensor(min(length, span))`. A fake tensor keeps such a value as its `constant`
    until an in-place write.
    """
    tensor = self.as_proxy().node.meta.get("example_value")
    value = getattr(tensor, "constant", None)
    return own(self, *args, **kwargs) if value is None else ConstantVariable.create(value.item())
