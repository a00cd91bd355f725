"""Rotary embeddings in a fused kernel, in attention modules whose code calls apply_rotary_pos_emb by name.

Kernels want the angles, such code hands round their cosines and sines. Where the graph shows that a
module made both of the same angles, that module notes the angles on what it returns. The attention's
forward runs as it is written, but for that one name: it stands for a function that looks for the note,
and without one calls the model's own. Cosines of anybody else, or changed since, have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from te_transform import vocabulary
from te_transform.slots import Made, takes_subclasses, traced
from te_transform.trace import Call, Recording

_NAME = "apply_rotary_pos_emb"  # in 160 of transformers' models
_COSINES, _SINES = (torch.cos, Tensor.cos), (torch.sin, Tensor.sin)


@dataclass(frozen=True, eq=False)
class _Note:
    """What a tensor holds: the cosines or the sines of `angles`, unless it was written to since."""

    angles: Tensor
    of: str
    version: int


class RotarySlot(Made):
    """A module that returns cosines and sines, and notes on them of which angles."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if traced():
            return super().forward(*args, **kwargs)
        with _Watch() as watch:
            cos, sin = super().forward(*args, **kwargs)
        scaled = getattr(self, "attention_scaling", 1.0) != 1.0
        if watch.once and not scaled and not (cos.is_inference() or sin.is_inference()):
            cos._te_transform_angles = _Note(watch.cosines[0], "cos", cos._version)
            sin._te_transform_angles = _Note(watch.cosines[0], "sin", sin._version)
        return cos, sin


class _Watch(TorchFunctionMode):
    """The tensors that cos and sin are taken of."""

    def __init__(self):
        super().__init__()
        self.cosines: list[Tensor] = []
        self.sines: list[Tensor] = []

    @property
    def once(self) -> bool:
        """Whether one cosine and one sine were taken, of the same tensor."""
        return len(self.cosines) == len(self.sines) == 1 and self.cosines[0] is self.sines[0]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _COSINES:
            self.cosines.append(args[0])
        if func in _SINES:
            self.sines.append(args[0])
        return func(*args, **(kwargs or {}))


def carry(tensor: Tensor, copy: Tensor) -> Tensor:
    """The copy, with the note that is on the tensor."""
    note = getattr(tensor, "_te_transform_angles", None)
    if note is not None and note.version == tensor._version:
        copy._te_transform_angles = _Note(note.angles, note.of, copy._version)
    return copy


def angles_of(cos: Tensor, sin: Tensor) -> Tensor | None:
    """The angles [batch or 1, length, width], fp32, whose cosines and sines these are, if that is known."""
    notes = [getattr(tensor, "_te_transform_angles", None) for tensor in (cos, sin)]
    if None in notes or notes[0].angles is not notes[1].angles:
        return None
    in_place = [note.version == tensor._version for note, tensor in zip(notes, (cos, sin), strict=True)]
    return notes[0].angles if all(in_place) and [note.of for note in notes] == ["cos", "sin"] else None


def rotary_of(attention: Call, recording: Recording) -> nn.Module | None:
    """The module whose cosines and sines rotate this attention's queries and keys; None where that is not
    proved."""
    ropes = [node for node in recording.inside(attention) if node.target is vocabulary.rope]
    sources = {_source(node.args[1], torch.cos) for node in ropes} | {
        _source(node.args[2], torch.sin) for node in ropes
    }
    calls = {node.meta["call"] for node in sources if node is not None}
    if len(ropes) != 2 or None in sources or len(sources) != 1 or len(calls) != 1:
        return None
    cosines = _source(ropes[0].args[1], None)
    maker = cosines.meta["call"]
    fits = maker is not None and recording.times[maker.module] == 1 and takes_subclasses(type(maker.module))
    return maker.module if fits and rotating(type(attention.module)) is not None else None


def _source(node: Any, function: Callable | None) -> fx.Node | None:
    """What `function` was taken of to make the node, or that call itself where it is None."""
    while isinstance(node, fx.Node) and node.target in (torch.unsqueeze, vocabulary.cast):
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if function is None:
        return node
    return node.args[0] if node.target is function else None


@cache
def rotating(kind: type) -> Callable | None:
    """An attention class's forward with the fused rotation in it; None where it calls none by name."""
    forward = kind.forward
    scope = getattr(forward, "__globals__", {})
    if inspect.unwrap(forward) is not forward or _NAME not in forward.__code__.co_names:
        return None
    if not _rotates(scope.get(_NAME)):
        return None

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        from te_transform.backends import te

        angles = None if args or kwargs else angles_of(cos, sin)
        turned = None if angles is None else te.rotate(query, key, angles)
        return scope[_NAME](query, key, cos, sin, *args, **kwargs) if turned is None else turned

    scope_with = {**scope, _NAME: rotated}
    made = FunctionType(
        forward.__code__, scope_with, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _rotates(function: Any) -> bool:
    """Whether the function is the rotation of the normal form, tried on random numbers in fp64."""
    if not callable(function):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    query, key, cos, sin = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    try:
        found = function(query, key, cos, sin)
    except Exception:  # another signature, whatever it is
        return False
    wanted = [vocabulary.rope(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (query, key)]
    return len(found) == 2 and all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
