"""What runs in the user's own modules after conversion.

A converted module keeps its identity, its name and its class (a subclass of it, made here, under the same
name); its parameters become views of a fused one, and its forward does what it always did, faster when the
caller allows it:

    a norm      hands out a Deferred, the normalised tensor that nobody has computed yet;
    a linear    takes its columns of the fused product, or multiplies by its own rows;
    an owner    runs its rewritten forward when the guards hold, its own when they do not.

None of them can lie: whoever else reads a Deferred gets the norm's value, and whatever tensor a linear is
handed, it returns that tensor's projection.
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
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

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
    originals: dict[str, weakref.ref] = field(
        default_factory=dict
    )  # the Parameters an optimizer may still hold

    def __getstate__(self) -> dict[str, Any]:
        # a product in flight and an optimizer belong to this model, not to a copy of it
        return {**self.__dict__, "shared": None, "originals": {}}


@dataclass(eq=False)
class Slot:
    """A converted module's part in its fusions: which of its parameters live where, and what its forward
    does."""

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

    def fixed(self, attribute: str) -> str:
        """Why the attribute can get no new tensor."""
        return (
            f"{attribute!r} is part of {type(self.fusion.fused).__name__}.{self.target} since "
            f"te_transform.convert(), a "
            f"new tensor cannot take its place: write into it (module.{attribute}.copy_(...)) or revert() "
            f"the model"
        )

    def read(self) -> Tensor:
        """The parameter itself where it moved as it was, else a view of its rows (a copy where rows are
        permuted)."""
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
    """What every converted module gains: its parameters read, saved and loaded as if they were still its
    own."""

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
        elif name in self._parameters:  # only while a state dict is loaded
            self._parameters[name] = value
        elif view.layout.is_same and isinstance(value, nn.Parameter):
            setattr(view.fusion.fused, view.target, value)  # a tie made anew
        else:
            raise AttributeError(view.fixed(name))

    def __delattr__(self, name: str) -> None:
        view = self._te_transform_slot.views.get(name)
        if view is not None:
            raise AttributeError(view.fixed(name))
        super().__delattr__(name)

    def requires_grad_(self, requires_grad: bool = True) -> SlotModule:
        """As nn.Module's, for the parameters that this module had.

        Raises:
            RuntimeError: it has a share of a joined parameter, which would have to change as a whole.
        """
        views = self._te_transform_slot.views
        for name, view in views.items():
            held = getattr(view.fusion.fused, view.target)
            own = all(any(v.name == piece.name for v in views.values()) for piece in view.layout.pieces)
            if not own and held.requires_grad != requires_grad:
                raise RuntimeError(
                    f"{name!r} is a share of {type(view.fusion.fused).__name__}.{view.target}, which is "
                    f"trained as a "
                    "whole or not at all: set requires_grad before te_transform.convert(), or of the module "
                    "above"
                )
            held.requires_grad_(requires_grad)
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.requires_grad_(requires_grad)
        for child in self.children():
            if child is not self._modules.get("fused"):
                child.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        slot: Slot = self._te_transform_slot
        held = sorted({f"{v.fusion.path}.{v.target}" for v in slot.views.values()})
        return ", ".join(filter(None, [super().extra_repr(), f"held by {', '.join(held)}" if held else ""]))

    def __reduce_ex__(self, protocol: int) -> Any:
        base, kind, names = type(self)._te_transform_made_of
        return _unpickled, (base, kind, names), self.__dict__


class NormSlot(SlotModule):
    """A norm whose result is computed by the fused module that reads it, or here when anybody else does."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        fusion: Fusion = self._te_transform_slot.fusion
        given = (*args, *kwargs.values())  # one tensor, by whatever name
        if len(given) != 1 or type(given[0]) is not Tensor or not fusion.enabled or _traced():
            return super().forward(*args, **kwargs)
        if _unversioned(given[0]) or _would_change_dtype(self, given[0]):
            return super().forward(*args, **kwargs)
        return defer(given[0], self)

    def now(self, x: Tensor) -> Tensor:
        """The normalised tensor, computed."""
        return super().forward(x)


class LinearSlot(SlotModule):
    """A linear that takes its columns of the fused product."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        slot: Slot = self._te_transform_slot
        given = (*args, *kwargs.values())
        if len(given) != 1 or not slot.fusion.enabled or _traced():
            return super().forward(*args, **kwargs)
        if slot.columns is not None and _unversioned(given[0]):
            return super().forward(*args, **kwargs)
        return _share(slot.fusion, given[0], slot.columns)


class OwnerSlot(SlotModule):
    """A module whose forward held the glue of a fusion: it runs rewritten when the guards hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._te_transform_slot
        ready = slot.rewritten.ready(self, slot.fusion, args, kwargs) if slot.fusion.enabled else None
        if ready is None:
            return super().forward(*args, **kwargs)
        slot.fusion.runs += 1
        for given in (*args, *kwargs.values()):
            if isinstance(given, Deferred):
                given.taken = True
        return ready()


class HeldSlot(SlotModule):
    """A module whose parameters a fusion holds, and whose forward is its own: only other callers still use
    it."""


class Deferred(Tensor):
    """A norm's output before anybody has read it: its shape is known, its values are computed on first use.

    A fused module reads `source` instead, and does the norm itself.
    """

    source: Tensor
    norm: NormSlot
    value: Tensor | None
    history: Any  # the autograd node that `value` stands for
    stamp: tuple  # of the source and the norm's parameters, when the norm was called
    saving: Any  # the saved tensors hooks of that moment
    taken: bool  # whether a fused module has taken the norm over
    version: int  # of `value` when it was computed

    @staticmethod
    def __new__(cls, source: Tensor, norm: NormSlot) -> Deferred:
        deferred = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), dtype=source.dtype, device=source.device
        )
        deferred.source, deferred.norm, deferred.value, deferred.taken = source, norm, None, False
        return deferred

    def now(self) -> Tensor:
        """The normalised tensor; computed once, as it would have been when the norm was called."""
        if self.value is None:
            self._compute()
        if self.history is not _node(
            self
        ):  # code below autograd has had it: the graph knows this tensor alone
            with _as_when(self), torch.enable_grad():
                self.value = _Reread.apply(self)
            self.history, self.version = _node(self), _version(self.value)
        return self.value

    def below(self) -> Tensor:
        """As now(), for code below autograd, where what is computed gets no graph."""
        if self.value is None:
            self._compute()
            self.history = Deferred  # none that autograd knows
        return self.value

    def _compute(self) -> None:
        if self.stamp[0] != _stamp(self.source, *_parameters(self.norm))[0]:
            raise RuntimeError(
                f"{type(self.norm).__name__}'s input or parameters were changed in place before its output "
                f"was "
                "read, te_transform had put the computation off: convert with skip= for this norm, or read "
                "its "
                "output earlier"
            )
        with _as_when(self):
            self.value = self.norm.now(self.source)
        self.version = _version(self.value)

    def unread(self) -> bool:
        """Whether a fused module may take the norm over: nobody read it, or one did before, and nothing has
        changed."""
        if self.value is not None and not (self.taken and _version(self.value) == self.version >= 0):
            return False
        return self.stamp == _stamp(self.source, *_parameters(self.norm))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SHAPE_ONLY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _WATCHING:
            _check_watched(args[0] if func is not torch.autograd.grad else [*args, kwargs.get("inputs")][1])
        read, kwargs = _read((args, kwargs))
        out = func(*read, **kwargs)
        unmoved = bool(args) and isinstance(args[0], Deferred) and out is args[0].value
        return args[0] if unmoved else out  # x.mul_(2) is x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(Deferred, Deferred.below, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        return repr(self.now())


_SHAPE_ONLY = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.shape.__get__,
    Tensor.ndim.__get__, Tensor.device.__get__, Tensor.dtype.__get__, Tensor.is_cuda.__get__,
    Tensor.layout.__get__, Tensor.is_sparse.__get__, Tensor.is_nested.__get__,
}  # fmt: skip


_WATCHING = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}


def _check_watched(tensors: Any) -> None:
    for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
        if isinstance(tensor, Deferred) and tensor.taken:
            raise RuntimeError(
                f"{type(tensor.norm).__name__}'s output was taken over by a fused module, its whole gradient "
                f"is "
                "not computed: ask for it before the output is used, or convert with skip= for this norm"
            )


def defer(x: Tensor, norm: NormSlot) -> Tensor:
    """The norm of `x`, unread; code that looks behind PyTorch's back (an autograd.Function) gets its
    gradients too."""
    parameters = _parameters(norm)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters))
    deferred = _Defer.apply(norm, x, *parameters) if trained else Deferred(x, norm)
    deferred.stamp, deferred.history = _stamp(x, *parameters), _node(deferred)
    deferred.saving = _saving_hooks()
    return deferred


def _parameters(norm: NormSlot) -> list[Tensor]:
    return [view.read() for view in norm._te_transform_slot.views.values()]


def _node(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def _saving_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextlib.contextmanager
def _as_when(deferred: Deferred) -> Iterator[None]:
    """The modes that were on when the norm was called; a checkpoint begun since does not count what is
    saved."""
    _, grad, inference, _ = deferred.stamp
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        if _autocast(deferred.source) is not None:
            stack.enter_context(torch.autocast(deferred.source.device.type, enabled=False))
        if _saving_hooks() != deferred.saving:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_itself, _itself))
        yield


def _itself(saved: Tensor) -> Tensor:
    return saved


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm: NormSlot, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.norm, ctx.parameters = norm, parameters
        ctx.save_for_backward(x, *parameters)  # the parameters, so that autograd sees if they are changed
        return Deferred(x, norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x, *_ = ctx.saved_tensors
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x.view_as(x) if x.requires_grad else x.detach()
            sources = (x, *ctx.parameters)
            trained = [tensor for tensor in sources if tensor.requires_grad]
            grads = iter(torch.autograd.grad(ctx.norm.now(x), trained, grad, create_graph=again))
        return (None, *(next(grads) if tensor.requires_grad else None for tensor in sources))


class _Reread(torch.autograd.Function):
    """A Deferred's value, with the history that autograd has of the Deferred itself."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred) -> Tensor:
        return deferred.value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@dataclass(eq=False)
class _Shared:
    """A fused product whose columns some linears have still to take."""

    source: weakref.ref
    stamp: tuple
    left: dict[tuple[int, int], Tensor]


class _Split(torch.autograd.Function):
    """Columns of a product as tensors of their own: if one is changed in place, the others keep their
    version."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, *columns: tuple[int, int]) -> tuple[Tensor, ...]:
        return tuple(part.data for part in _slices(product.data, *columns))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return torch.cat(grads, -1), *(None for _ in grads)


def _slices(product: Tensor, *columns: tuple[int, int]) -> tuple[Tensor, ...]:
    return tuple(product[..., slice(*span)] for span in columns)


def _share(fusion: Fusion, x: Tensor, columns: tuple[int, int] | None) -> Tensor:
    """This linear's columns of the fused product of `x`: of the product a sibling has just made, else of a
    new one."""
    if columns is None:
        return _product(fusion, x)
    shared = fusion.shared
    if (
        shared is None
        or columns not in shared.left
        or shared.source() is not x
        or shared.stamp != _stamp_of(fusion, x)
    ):
        product = _product(fusion, x)
        split = _Split.apply if torch.is_grad_enabled() else _slices
        parts = split(product, *fusion.columns)
        shared = _Shared(weakref.ref(x), _stamp_of(fusion, x), dict(zip(fusion.columns, parts, strict=True)))
    out = shared.left.pop(columns)
    fusion.shared = shared if shared.left else None
    return out


def _product(fusion: Fusion, x: Tensor) -> Tensor:
    fusion.runs += 1
    if fusion.norm is None:
        return fusion.fused(x)
    if isinstance(x, Deferred) and x.norm is fusion.norm and x.unread():
        x.taken = True
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
        return (
            type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        )  # a named tuple takes fields
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    return value


def _unversioned(x: Tensor) -> bool:
    """Whether PyTorch does not count the writes into `x`: nothing may then be put off or shared."""
    return not isinstance(x, Deferred) and x.is_inference()


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


def _stamp(*tensors: Tensor) -> tuple:
    """What a result computed from `tensors` now depends on: what they hold, and the modes."""
    held = [(id(tensor), -1 if tensor.is_inference() else tensor._version) for tensor in tensors]
    return held, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast(tensors[0])


def _stamp_of(fusion: Fusion, x: Tensor) -> tuple:
    value = x.value if isinstance(x, Deferred) else None
    source = x.source if isinstance(x, Deferred) else x
    weights = [parameter for parameter in fusion.fused._parameters.values() if parameter is not None]
    return _stamp(source, *weights, *([] if value is None else [value])), _saving_hooks()


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _traced() -> bool:
    """Under a compiler, a tracer or a function transform the plain modules are what is understood best."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _would_change_dtype(norm: NormSlot, x: Tensor) -> bool:
    if _autocast(x) is not None:
        return True
    return any(view.read().dtype != x.dtype for view in norm._te_transform_slot.views.values())


@contextlib.contextmanager
def _own_parameters(module: nn.Module, write: bool = False) -> Iterator[None]:
    """The module's original parameters in its own dictionary again, for as long as nn.Module's code reads
    them."""
    slot: Slot = module._te_transform_slot
    own = dict(module._parameters)
    with torch.no_grad() if write else contextlib.nullcontext():
        views = {name: view.read() for name, view in slot.views.items()}
    names = dict.fromkeys((*slot.order, *own))
    module._parameters.clear()
    module._parameters.update({name: views.get(name, own.get(name)) for name in names})
    try:
        yield
        if write:
            own.update({name: module._parameters[name] for name in own})
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
            if (value.dtype, value.device) != (views[name].dtype, views[name].device):
                raise RuntimeError(
                    f"{name!r} is {views[name].dtype} on {views[name].device} and joined with others, "
                    f"load_state_dict("
                    "assign=True) cannot make it another: move the model first, by to() or to_empty()"
                )
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
    """A subclass of `base` under its own name, with `kind`'s behaviour and the parameters `names` read
    through views."""
    reads = {name: property(_reader(name)) for name in names}
    made_of = {
        "_te_transform_made_of": (base, kind, names),
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    made = type(base.__name__, (kind, base), {**reads, **made_of})
    made.__qualname__ = base.__qualname__
    return made


def _reader(name: str) -> Any:
    return lambda self: self._te_transform_slot.views[name].read()


def _unpickled(base: type, kind: type, names: tuple[str, ...]) -> nn.Module:
    cls = slot_class(base, kind, names)
    return cls.__new__(cls)
