"""Rotary embeddings in a fused kernel, in attention modules whose code calls apply_rotary_pos_emb by name.

Kernels want the angles, such code hands round their cosines and sines. Where the graph shows that a
module made both of the same angles, that module notes, at every call, which tensors are the cosines and
sines of which. The attention's forward runs as it is written, but for that one name: it stands for a
function that looks for the note, and without one calls the model's own. Cosines of anybody else, scaled,
or changed since, have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from te_transform import vocabulary
from te_transform.backends.limits import small_attention
from te_transform.slots import Made, takes_subclasses, traced
from te_transform.trace import Call, Recording

_NAME = "apply_rotary_pos_emb"  # in 160 of transformers' models
_TAKEN = {torch.cos: "cos", Tensor.cos: "cos", torch.sin: "sin", Tensor.sin: "sin"}
_CASTS = (Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as)


@dataclass(frozen=True, eq=False)
class _Note:
    """What a tensor holds: the cosines or the sines of `angles`, unless one of them was written to since."""

    angles: Tensor
    of: str
    versions: tuple[int, int]

    def holds(self, tensor: Tensor) -> bool:
        return self.versions == (tensor._version, self.angles._version)


_NOTES = WeakIdKeyDictionary()  # by the tensor, not on it: copies, which may be changed, have none


class RotarySlot(Made):
    """A module that returns cosines and sines, and notes of which angles they are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if traced() or _is_small(args):
            return super().forward(*args, **kwargs)
        with _Watch():
            return super().forward(*args, **kwargs)


def _is_small(args: tuple) -> bool:
    """Whether no attention will look for the angles of these positions, see dispatch.py."""
    hidden = args[0] if args else None
    return type(hidden) is Tensor and small_attention(hidden) is not None


class _Watch(TorchFunctionMode):
    """Cosines and sines are noted where they are taken, and followed through casts and products with 1."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TAKEN and args:
            _note(out, args[0], _TAKEN[func])
        elif func in _CASTS or (func in (torch.mul, Tensor.mul) and _is_one(*args[1:])):
            carry(args[0], out)
        return out


def _is_one(*factors: Any) -> bool:
    return len(factors) == 1 and type(factors[0]) in (int, float) and factors[0] == 1


def _note(tensor: Tensor, angles: Tensor, of: str) -> None:
    # a kernel reads angles in fp32, and gives them no gradient
    fits = type(angles) is Tensor and angles.dtype == torch.float32 and not angles.requires_grad
    if fits and not (tensor.is_inference() or angles.is_inference()):  # to which writes are not counted
        _NOTES[tensor] = _Note(angles, of, (tensor._version, angles._version))


def carry(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy, with the note that there is on the tensor."""
    note = _NOTES.get(tensor)
    if note is not None and note.holds(tensor):
        _note(copy, note.angles, note.of)
    return copy


def angles_of(cos: Tensor, sin: Tensor) -> Tensor | None:
    """The angles [batch or 1, length, width], fp32, whose cosines and sines these are, if that is known."""
    if type(cos) is not Tensor or type(sin) is not Tensor or cos.requires_grad or sin.requires_grad:
        return None
    notes = _NOTES.get(cos), _NOTES.get(sin)
    if None in notes or [note.of for note in notes] != ["cos", "sin"]:
        return None
    angles = notes[0].angles
    same = angles is notes[1].angles and angles.device == cos.device == sin.device
    return angles if same and notes[0].holds(cos) and notes[1].holds(sin) else None


def rotary_of(attention: Call, recording: Recording) -> nn.Module | None:
    """The module whose cosines and sines rotate this attention's queries and keys; None where that is not
    proved."""
    ropes = [node for node in recording.inside(attention) if node.target is vocabulary.rope]
    angles = {_source(node.args[1], torch.cos) for node in ropes} | {
        _source(node.args[2], torch.sin) for node in ropes
    }
    if len(ropes) != 2 or len(angles) != 1 or None in angles or rotating(type(attention.module)) is None:
        return None
    maker = _source(ropes[0].args[1], None).meta["call"]
    # what has children, or is the attention itself, may get a slot of another kind
    fits = maker is not None and not maker.within(attention) and not maker.module._modules
    if not fits or recording.times[maker.module] != 1 or not takes_subclasses(type(maker.module)):
        return None
    return maker.module


def _source(node: Any, function: Callable | None) -> fx.Node | None:
    """What `function` was taken of to make the node, or that call itself where it is None."""
    while isinstance(node, fx.Node) and node.target in (torch.unsqueeze, vocabulary.cast):
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if function is None:
        return node
    return node.args[0] if node.target is function else None


_WITH_ROTATION: dict[Callable, Callable] = {}  # by the forward that it was made of


def rotating(kind: type) -> Callable | None:
    """An attention class's forward with the fused rotation in it; None where it calls none by name."""
    forward = kind.forward
    if forward not in _WITH_ROTATION:
        made = _with_rotation(forward)
        if made is None:  # today: somebody may have put another function under the name for a while
            return None
        _WITH_ROTATION[forward] = made
    return _WITH_ROTATION[forward]


def _with_rotation(forward: Callable) -> Callable | None:
    scope = getattr(forward, "__globals__", {})
    if inspect.unwrap(forward) is not forward or _NAME not in forward.__code__.co_names:
        return None
    if not _rotates(scope.get(_NAME)):
        return None
    # what was proved: the function, and those that it calls by name
    names = (_NAME, *getattr(getattr(scope[_NAME], "__code__", None), "co_names", ()))
    proved = {name: scope[name] for name in names if name in scope}

    def rotated(*args: Any, **kwargs: Any) -> Any:
        from te_transform.backends import te

        as_proved = all(scope.get(name) is value for name, value in proved.items())
        angles = angles_of(*args[2:]) if as_proved and len(args) == 4 and not kwargs else None
        turned = te.rotate(*args[:2], angles) if angles is not None and _alike(*args) else None
        return scope[_NAME](*args, **kwargs) if turned is None else turned

    made = FunctionType(
        forward.__code__,
        _Scope(scope, {_NAME: rotated}),
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


class _Scope(dict):
    """A module's globals, as they are whenever they are looked up, but for those given here."""

    def __init__(self, scope: dict[str, Any], instead: dict[str, Any]):
        super().__init__(instead)
        self.scope = scope

    def __missing__(self, name: str) -> Any:
        return self.scope[name]


def _alike(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the products with cosines and sines have the dtype and the shape of what is turned."""
    return query.dtype == key.dtype == cos.dtype == sin.dtype and query.shape[2:] == key.shape[2:]


def _rotates(function: Any) -> bool:
    """Whether the function is the rotation of the normal form, tried on random numbers in fp64."""
    if not callable(function):
        return False
    with unset_fake_temporarily():  # the model may be one of fake tensors
        generator = torch.Generator().manual_seed(0)
        shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
        query, key, cos, sin = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        try:
            found = function(query, key, cos, sin)
        except Exception:  # another signature, whatever it is
            return False
        wanted = [vocabulary.rope(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (query, key)]
        return len(found) == 2 and all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
