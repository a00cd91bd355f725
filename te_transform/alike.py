"""Whether two modules were called alike: layers of one model share what was worked out for the first of
them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, fx, nn

from te_transform.trace import Call, Recording

_OWN = ("_parameters", "_buffers", "_modules", "training")  # nn.Module's, looked at otherwise


def likeness(call: Call, recording: Recording, norm: Call | None) -> Hashable:
    """A key that two calls share only if their modules have the same classes, attributes and shapes inside,
    but for their own numbers, and were recorded as the same operations on inputs alike.

    Classes and attributes alone would not do: layers of one class differ by their mask (Gemma 2) or by who
    owns a bias (T5).
    """
    modules = [(path, module_key(module, call.path)) for path, module in call.module.named_modules()]
    before = module_key(norm.module, norm.path) if norm else None
    return (
        tuple(modules),
        before,
        _operations(call, recording),
        _value(recording, {}, (call.args, call.kwargs)),
    )


def own_numbers(*calls: Call | None) -> dict[tuple[nn.Module, str], int]:
    """The attributes of the modules below `calls` that may be a layer's number, one in the call's path."""
    found = {}
    for call in filter(None, calls):
        places = _numbers_in(call.path)
        for module in call.module.modules():
            found |= {(module, k): v for k, v in module.__dict__.items() if _is_number(v, places)}
    return found


def module_key(module: nn.Module, path: str = "") -> Hashable:
    """Its class, attributes and tensors' shapes; numbers in its `path` count as one."""
    places = _numbers_in(path)
    attributes = {k: _attribute(v, places) for k, v in module.__dict__.items() if k not in _OWN}
    tensors = {**module._parameters, **module._buffers}
    shapes = {k: None if t is None else (t.shape, t.dtype, t.device) for k, t in tensors.items()}
    return type(module), tuple(attributes.items()), tuple(shapes.items()), tuple(module._modules)


def _numbers_in(path: str) -> frozenset[int]:
    return frozenset(int(part) for part in path.split(".") if part.isdigit())


def _is_number(value: Any, places: frozenset[int]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in places


def _attribute(value: Any, places: frozenset[int] = frozenset()) -> Hashable:
    if _is_number(value, places):
        return "the layer's own number"
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_attribute(item) for item in value)
    if isinstance(value, (dict, set)) and not value:
        return type(value)  # no hooks
    if isinstance(value, (bool, int, float, str, type(None), type)) or callable(value):
        return value
    return id(value)  # a config: the same object, or another model's


def _operations(call: Call, recording: Recording) -> Hashable:
    inside = recording.inside(call)
    numbers = {node: index for index, node in enumerate(inside)}
    return tuple((str(node.target), _value(recording, numbers, (node.args, node.kwargs))) for node in inside)


def _value(recording: Recording, numbers: dict[fx.Node, int], value: Any) -> Hashable:
    value = recording.now(value)
    if isinstance(value, fx.Node):
        meta = value.meta.get("tensor_meta")
        return numbers.get(value), value.op, meta and (meta.shape, meta.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_value(recording, numbers, item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _value(recording, numbers, item)) for key, item in value.items())
    if isinstance(value, slice):
        return tuple(_value(recording, numbers, part) for part in (value.start, value.stop, value.step))
    return id(value) if isinstance(value, Tensor) else repr(value)
