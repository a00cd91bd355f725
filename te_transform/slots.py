"""What runs in the user's own modules after conversion.

A converted module keeps its identity, its name and its class (a subclass of it, made here, under the same name); its
parameters become views of a fused one, and its forward does what it always did, faster when the caller allows it:

    a norm      hands out a Deferred, the normalised tensor that nobody has computed yet;
    a linear    takes its columns of the fused product, or multiplies by its own rows;
    an owner    runs its rewritten forward when the guards hold, its own when they do not.

None of them can lie: whoever else reads a Deferred gets the norm's value, and whatever tensor a linear is handed, it
returns that tensor's projection.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.weights import Layout

@dataclass(eq=False)
class Fusion:
    """One fused site at run time: the fused module, and the norm whose place it takes, if any.

    `enabled` False sends every slot of the site back to its own forward, on the same weights.
    """

    rule: str
    path: str
    fused: nn.Module
    layouts: dict[str, Layout]
    norm: nn.Module | None = None
    columns: tuple[tuple[int, int], ...] = ()  # the shares of the linears that read one product
    enabled: bool = True
    runs: int = 0  # how often the fused module ran in place of the original ones
    shared: _Shared | None = None
    originals: dict[str, weakref.ref] = field(default_factory=dict)  # the Parameters an optimizer may still hold

    def __getstate__(self) -> dict[str, Any]:
        # a product in flight and an optimizer belong to this model, not to a copy of it
        return {**self.__dict__, "shared": None, "originals": {}}


@dataclass(eq=False)
class Slot:
    """A converted module's part in its fusions: which of its parameters live where, and what its forward does."""

    views: dict[str, View] = field(default_factory=dict)
    order: tuple[str, ...] = ()  # its parameters in the order they had
    fusion: Fusion | None = None
    columns: tuple[int, int] | None = None  # a linear's share of the fused output
    rewritten: Any = None  # an owner's forwards, see guards.py
    config: Any = None  # what stood at the module's config before, see dispatch.py
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class View:
    """One original parameter: the piece called `name` of the fused module's parameter `target`."""

    fusion: Fusion
    target: str
    name: str

    @property
    def layout(self) -> Layout:
        return self.fusion.layouts[self.target]

    def read(self) -> Tensor:
        """The parameter itself where it moved as it was, else a view of its rows (a copy where rows are permuted)."""
        return self.layout.part(getattr(self.fusion.fused, self.target), self.name)

    def write(self, value: Tensor) -> None:
        """Put `value` where `read` reads."""
        fused = getattr(self.fusion.fused, self.target)
        if self.layout.order is None:
            self.layout.part(fused, self.name).copy_(value)
            return
        names = [piece.name for piece in self.layout.pieces]
        originals = {n: value if n == self.name else self.layout.part(fused, n) for n in names}
        fused.copy_(self.layout.join(originals))


class SlotModule(nn.Module):
    """What every converted module gains: its parameters read, saved and loaded as if they were still its own."""

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        with _own_parameters(self):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        with _own_parameters(self, write=True):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        slot: Slot = self._te_transform_slot
        view = slot.views.get(name)
        if view is None:
            super().__setattr__(name, value)
        elif view.layout.is_same and isinstance(value, nn.Parameter):
            setattr(view.fusion.fused, view.target, value)  # a tie made anew
        else:
            raise AttributeError(
                f"{name!r} is part of {type(view.fusion.fused).__name__}.{view.target} since te_transform.convert(), a "
                f"new tensor cannot take its place: write into it (module.{name}.copy_(...)) or revert() the model"
            )

    def extra_repr(self) -> str:
        slot: Slot = self._te_transform_slot
        held = sorted({f"{v.fusion.path}.{v.target}" for v in slot.views.values()})
        return ", ".join(filter(None, [super().extra_repr(), f"held by {', '.join(held)}" if held else ""]))

    def __reduce_ex__(self, protocol: int) -> Any:
        base, kind, names = type(self)._te_transform_made_of
        return _unpickled, (base, kind, names), self.__dict__


class NormSlot(SlotModule):
    """A norm whose result is computed by the fused module that reads it, or here when anybody else does."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fusion: Fusion = self._te_transform_slot.fusion
        if args or kwargs or not fusion.enabled or _traced() or type(x) is not Tensor or _would_change_dtype(self, x):
            return super().forward(x, *args, **kwargs)
        return defer(x, self)

    def now(self, x: Tensor) -> Tensor:
        """The normalised tensor, computed."""
        return super().forward(x)


class LinearSlot(SlotModule):
    """A linear that takes its columns of the fused product."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        slot: Slot = self._te_transform_slot
        if args or kwargs or not slot.fusion.enabled or _traced():
            return super().forward(x, *args, **kwargs)
        return _share(slot.fusion, x, slot.columns)


class OwnerSlot(SlotModule):
    """A module whose forward held the glue of a fusion: it runs rewritten when the guards hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._te_transform_slot
        ready = slot.rewritten.ready(self, slot.fusion, args, kwargs) if slot.fusion.enabled else None
        if ready is None:
            return super().forward(*args, **kwargs)
        slot.fusion.runs += 1
        return ready()


class HeldSlot(SlotModule):
    """A module whose parameters a fusion holds, and whose forward is its own: only other callers still use it."""


class Deferred(Tensor):
    """A norm's output before anybody has read it: its shape is known, its values are computed on first use.

    A fused module reads `source` instead, and does the norm itself.
    """

    source: Tensor
    norm: NormSlot
    value: Tensor | None
    stamp: tuple  # the source's version and the modes when the norm was called

    @staticmethod
    def __new__(cls, source: Tensor, norm: NormSlot) -> Deferred:
        deferred = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), dtype=source.dtype, device=source.device
        )
        deferred.source, deferred.norm, deferred.value = source, norm, None
        return deferred

    def now(self) -> Tensor:
        """The normalised tensor; computed once, as it would have been when the norm was called."""
        if self.value is None:
            if _version(self.source) != self.stamp[0]:
                raise RuntimeError(
                    f"{type(self.norm).__name__}'s input was changed in place before its output was read, te_transform "
                    "had put the computation off: convert with skip= for this norm, or change a copy of the input"
                )
            _, grad, autocast = self.stamp
            with torch.set_grad_enabled(grad), torch.autocast(self.source.device.type, enabled=autocast):
                self.value = self.norm.now(self.source)
        return self.value

    def unread(self) -> bool:
        """Whether a fused module may still take the norm over: nobody read it, nothing has changed since."""
        return self.value is None and self.stamp == _stamp(self.source)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _read((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = _read((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"Deferred({type(self.norm).__name__} of {list(self.shape)}, {'read' if self.value is not None else 'unread'})"


_SHAPE_ONLY = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point,
    Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.device.__get__, Tensor.dtype.__get__, Tensor.is_cuda.__get__,
    Tensor.layout.__get__, Tensor.is_sparse.__get__, Tensor.is_nested.__get__,
}  # fmt: skip


def defer(x: Tensor, norm: NormSlot) -> Tensor:
    """The norm of `x`, unread; code that looks behind PyTorch's back (an autograd.Function) gets its gradients too."""
    parameters = [p for p in (view.read() for view in norm._te_transform_slot.views.values()) if p.requires_grad]
    trained = torch.is_grad_enabled() and (x.requires_grad or parameters)
    deferred = _Defer.apply(norm, x, *parameters) if trained else Deferred(x, norm)
    deferred.stamp = _stamp(x)
    return deferred


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: NormSlot, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm, ctx.parameters = norm, parameters
        ctx.save_for_backward(x)
        return Deferred(x, norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.norm.now(x), (x, *ctx.parameters), grad)
        return (None, *grads)


@dataclass(eq=False)
class _Shared:
    """A fused product whose columns some linears have still to take."""

    source: weakref.ref
    stamp: tuple
    product: Tensor
    left: set[tuple[int, int]]

    def take(self, columns: tuple[int, int]) -> Tensor:
        self.left.discard(columns)
        return self.product[..., slice(*columns)]


def _share(fusion: Fusion, x: Tensor, columns: tuple[int, int] | None) -> Tensor:
    """This linear's columns of the fused product of `x`: of the product a sibling has just made, else of a new one."""
    shared = fusion.shared
    if shared is not None and columns in shared.left and shared.source() is x and shared.stamp == _stamp_of(fusion, x):
        out = shared.take(columns)
        fusion.shared = shared if shared.left else None
        return out
    product = _product(fusion, x)
    if columns is None:
        return product
    left = {span for span in fusion.columns if span != columns}
    fusion.shared = _Shared(weakref.ref(x), _stamp_of(fusion, x), product, left)
    return product[..., slice(*columns)]


def _product(fusion: Fusion, x: Tensor) -> Tensor:
    fusion.runs += 1
    if fusion.norm is None:
        return fusion.fused(x)
    if isinstance(x, Deferred) and x.norm is fusion.norm and x.unread():
        return fusion.fused(x.source)
    fusion.runs -= 1
    fused = fusion.fused  # already normalised, on a path of its own: the linear alone
    return torch.nn.functional.linear(_read(x), fused.weight, fused.bias)


def _read(value: Any) -> Any:
    """`value` with every Deferred in it computed."""
    if isinstance(value, Deferred):
        return value.now()
    if isinstance(value, (tuple, list)):
        items = [_read(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple takes fields
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    return value


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _stamp(x: Tensor) -> tuple:
    return _version(x), torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)


def _stamp_of(fusion: Fusion, x: Tensor) -> tuple:
    read = isinstance(x, Deferred) and x.value is not None
    return *_stamp(x.source if isinstance(x, Deferred) else x), read and _version(x.value), _version(fusion.fused.weight)


def _traced() -> bool:
    """Under a compiler or tracer the plain modules are what it can fuse best."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _would_change_dtype(norm: NormSlot, x: Tensor) -> bool:
    if torch.is_autocast_enabled(x.device.type):
        return True
    return any(view.read().dtype != x.dtype for view in norm._te_transform_slot.views.values())


@contextlib.contextmanager
def _own_parameters(module: nn.Module, write: bool = False) -> Iterator[None]:
    """The module's original parameters in its own dictionary again, for as long as nn.Module's code reads them."""
    slot: Slot = module._te_transform_slot
    own = dict(module._parameters)
    with torch.no_grad() if write else contextlib.nullcontext():
        views = {name: view.read() for name, view in slot.views.items()}
    module._parameters.clear()
    module._parameters.update({name: views.get(name, own.get(name)) for name in slot.order})
    try:
        yield
        if write:
            _write_back(slot, views, module._parameters)
    finally:
        module._parameters.clear()
        module._parameters.update(own)


def _write_back(slot: Slot, views: dict[str, Tensor], now: dict[str, Tensor | None]) -> None:
    for name, view in slot.views.items():
        value = now[name]
        if value is not views[name] and view.layout.is_same:  # load_state_dict(assign=True)
            setattr(view.fusion.fused, view.target, value)
        elif value is not views[name] or view.layout.order is not None:
            with torch.no_grad():
                view.write(value)


def hide(fused: nn.Module) -> None:
    """Keep a fused module out of state dicts: the modules whose parameters it holds save and load them."""
    fused._save_to_state_dict = _nothing
    fused._load_from_state_dict = _nothing


def _nothing(*_: Any) -> None:
    pass


@cache
def slot_class(base: type, kind: type, names: tuple[str, ...]) -> type:
    """A subclass of `base` under its own name, with `kind`'s behaviour and the parameters `names` read through views."""
    reads = {name: property(_reader(name)) for name in names}
    made_of = {"_te_transform_made_of": (base, kind, names), "__module__": base.__module__, "__doc__": base.__doc__}
    made = type(base.__name__, (kind, base), {**reads, **made_of})
    made.__qualname__ = base.__qualname__
    return made


def _reader(name: str) -> Any:
    return lambda self: self._te_transform_slot.views[name].read()


def _unpickled(base: type, kind: type, names: tuple[str, ...]) -> nn.Module:
    cls = slot_class(base, kind, names)
    return cls.__new__(cls)
