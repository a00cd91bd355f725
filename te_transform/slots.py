"""What runs in the user's own modules after conversion.

A converted module keeps its identity, its name and its class (a subclass of it, made here, under the same
name). Parameters that are joined with others become views of the joined one; those that are not stay where
they are, and the fused module reads them there. A module's forward does what it always did, faster when the
caller allows it:

    a norm      computes its result in one kernel, or hands out a Deferred, the normalised tensor that nobody
                has computed yet, where the backend's fused modules do the norm themselves;
    a linear    takes its columns of the fused product, or multiplies by its own rows;
    an owner    runs its rewritten forward when the guards hold, its own when they do not.

None of them can lie: whoever else reads a Deferred gets the norm's value, and whatever tensor a linear is
handed, it returns that tensor's projection.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from te_transform.deferred import Deferred, autocast, defer, read, saving_hooks, stamp, unversioned
from te_transform.state import separated
from te_transform.weights import Layout, exact, is_quantised


@dataclass(eq=False)
class Fusion:
    """One fused site at run time: the fused module, and the norm whose place it takes, if any.

    `enabled` False sends every slot of the site back to its own forward, on the same weights.
    """

    rule: str
    path: str
    fused: nn.Module
    layouts: dict[str, Layout]
    norm: nn.Module | None = None  # None too where the norm runs in its own place
    columns: tuple[tuple[int, int], ...] = ()  # the shares of the linears that read one product
    enabled: bool = True
    runs: int = 0  # how often the fused module ran in place of the original ones
    shared: _Shared | None = None
    # the Parameters an optimizer may still hold
    originals: dict[str, weakref.ref] = field(default_factory=dict)

    def count_run(self) -> None:
        """Note that the fused module runs; not under a compiler, which would compile anew for each number."""
        if not torch.compiler.is_compiling():
            self.runs += 1

    def count_plain(self, why: str) -> None:
        """Note that the original modules ran, where the fused one keeps count of that."""
        if not torch.compiler.is_compiling() and hasattr(self.fused, "plain_calls"):
            self.fused.plain_calls[why] += 1

    def why_plain(self, x: Tensor) -> str | None:
        """Why the fused module would run in plain PyTorch on `x`, where it has anything else."""
        return self.fused.why_plain(x) if hasattr(self.fused, "why_plain") else None

    def weights(self) -> list[Tensor]:
        """The fused module's parameters, its own and those that it reads elsewhere."""
        return [getattr(self.fused, target) for target in self.layouts]

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
    left_to_compilers: bool = False  # whether what an owner gains is what a compiler finds by itself
    config: Any = None  # what stood at the module's config before, see dispatch.py
    scale: float | None = None
    dtypes: dict[torch.dtype, torch.dtype] = field(default_factory=dict)  # of a norm's result, by autocast's
    rotates: bool = False  # whether its queries and keys may be turned in a fused kernel, see rotary.py


@dataclass(frozen=True, eq=False)
class View:
    """One original parameter: the piece called `name` of the fused module's joined parameter `target`."""

    fusion: Fusion
    target: str
    name: str

    @property
    def layout(self) -> Layout:
        return self.fusion.layouts[self.target]

    @property
    def held(self) -> Tensor:
        """The joined parameter."""
        return getattr(self.fusion.fused, self.target)

    def fixed(self, attribute: str) -> str:
        """Why the attribute can get no new tensor."""
        return (
            f"{attribute!r} is part of {type(self.fusion.fused).__name__}.{self.target} since "
            "te_transform.convert(), a new tensor cannot take its place: write into it "
            f"(module.{attribute}.copy_(...)) or revert() the model"
        )

    def read(self) -> Tensor:
        """A view of the parameter's rows (a copy where rows are permuted, or quantised)."""
        return self.layout.part(exact(self.held), self.name)

    def write(self, value: Tensor) -> None:
        """Put `value` where `read` reads."""
        fused = self.held
        if self.layout.order is None and not is_quantised(fused):
            self.layout.part(fused, self.name).copy_(value)
            return
        now, names = exact(fused), [piece.name for piece in self.layout.pieces]
        originals = {n: value if n == self.name else self.layout.part(now, n) for n in names}
        fused.copy_(self.layout.join(originals))


@dataclass(frozen=True, eq=False)
class Loan:
    """An original parameter that stays where it is, and how a fused module reads it."""

    module: nn.Module
    attribute: str
    transposed: bool

    def read(self) -> Tensor:
        """The parameter itself, or its transpose."""
        parameter = getattr(self.module, self.attribute)
        return parameter.t() if self.transposed else parameter


class Made(nn.Module):
    """A module whose class was made here, out of its own class and one of this file's."""

    def __reduce_ex__(self, protocol: int) -> Any:
        base, kind, names = type(self)._te_transform_made_of
        return _unpickled, (base, kind, names), self.__getstate__()


def original_class(module: nn.Module) -> type:
    """The class that a module had before conversion, whatever has been made of it."""
    kind = type(module)
    while issubclass(kind, Made):
        kind = kind._te_transform_made_of[0]
    return kind


class Borrower(Made):
    """A fused module that reads the parameters which nothing was joined to in the modules they belong to."""

    @staticmethod
    def reader(name: str) -> Callable[[nn.Module], Tensor]:
        """How the parameter `name` is read."""
        return lambda self: self._te_transform_borrowed[name].read()


class SlotModule(Made):
    """What every converted module gains: joined parameters are read, saved and loaded as if they were still
    its own."""

    @staticmethod
    def reader(name: str) -> Callable[[nn.Module], Tensor]:
        """How the parameter `name` is read."""
        return lambda self: self._te_transform_slot.views[name].read()

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        with separated(self):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any, **kwargs: Any) -> None:
        with separated(self, write=True):
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        slot: Slot = self._te_transform_slot
        view = slot.views.get(name)
        if view is None:
            super().__setattr__(name, value)
        elif name in self._parameters:  # only while a state dict is loaded
            self._parameters[name] = value
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
            held = view.held
            own = all(any(v.name == piece.name for v in views.values()) for piece in view.layout.pieces)
            if not own and held.requires_grad != requires_grad:
                raise RuntimeError(
                    f"{name!r} is a share of {type(view.fusion.fused).__name__}.{view.target}, which is "
                    "trained as a whole or not at all: set requires_grad before te_transform.convert(), or "
                    "of the module above"
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


class NormSlot(SlotModule):
    """A norm written out in several operations, computed in one kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # which makes one kernel of it too
            return self._te_transform_original_forward(*args, **kwargs)
        x, fusion = _only(args, kwargs), self._te_transform_slot.fusion
        if x is None or not fusion.enabled or _would_change_dtype(self, x):
            return super().forward(*args, **kwargs)
        fusion.count_run()
        return fusion.fused.normalise(x)

    def __setattr__(self, name: str, value: Any) -> None:
        old = self.__dict__.get(name, value)
        if name != "training" and isinstance(old, (bool, int, float, str)) and old != value:
            self._te_transform_slot.fusion.enabled = False  # another eps: the fused module has the old one
        super().__setattr__(name, value)

    def now(self, x: Tensor) -> Tensor:
        """The normalised tensor, by the norm's own forward."""
        return super().forward(x)

    def own_parameters(self) -> list[Tensor]:
        """The norm's scale and bias."""
        return [parameter for parameter in self._parameters.values() if parameter is not None]


class DeferringNormSlot(NormSlot):
    """A norm whose result is computed by the fused module that reads it, or here when anybody else does."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, fusion = _only(args, kwargs), self._te_transform_slot.fusion
        if type(x) is not Tensor or not fusion.enabled or traced() or unversioned(x):
            return super(NormSlot, self).forward(*args, **kwargs)
        if self._is_computed_at_once() and (why := fusion.why_plain(x)):
            fusion.count_plain(why)
            return super().forward(*args, **kwargs)
        dtype = self._dtype_of(x)
        if dtype is None:
            return super(NormSlot, self).forward(*args, **kwargs)
        return defer(x, self, dtype)

    def _is_computed_at_once(self) -> bool:
        """Whether nothing is won by putting the norm off for a fused module that runs in plain PyTorch: it is
        where the parts of an MLP's weight would each have a gradient as large as the whole."""
        whole = len(getattr(self._te_transform_slot.fusion.fused, "weight_names", ())) == 1
        return whole or not torch.is_grad_enabled()

    def _dtype_of(self, x: Tensor) -> torch.dtype | None:
        """What the norm makes of `x`; None where a fused module would take it, or the parameters, for
        another dtype."""
        cast = autocast(x)
        if (cast or x.dtype) != x.dtype or any(p.dtype != x.dtype for p in self.own_parameters()):
            return None
        if cast is None:
            return x.dtype
        known = self._te_transform_slot.dtypes  # under autocast nn.LayerNorm gives fp32, others what they get
        if cast not in known:
            with torch.no_grad():
                known[cast] = self.now(x.detach().reshape(-1, x.shape[-1])[:1]).dtype
        return known[cast]


class LinearSlot(SlotModule):
    """A linear that takes its columns of the fused product."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, slot = _only(args, kwargs), self._te_transform_slot
        if x is None or not slot.fusion.enabled:
            return super().forward(*args, **kwargs)
        if slot.columns is None:
            out = _fused(slot.fusion, x)
            return super().forward(*args, **kwargs) if out is None else out
        if traced() or unversioned(x):
            return _rows(slot.fusion.fused, x, slice(*slot.columns))
        return _share(slot.fusion, x, slot.columns)


class OwnerSlot(SlotModule):
    """A module whose forward held the glue of a fusion: it runs rewritten when the guards hold."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot: Slot = self._te_transform_slot
        if slot.left_to_compilers and torch.compiler.is_compiling():
            return self._te_transform_original_forward(*args, **kwargs)
        ready = slot.rewritten.ready(self, slot.fusion.norm, args, kwargs) if slot.fusion.enabled else None
        if ready is None:
            if slot.fusion.enabled:
                slot.fusion.count_plain("a call that the rewritten forward was not made for")
            return super().forward(*args, **kwargs)
        slot.fusion.count_run()
        return ready()


class HeldSlot(SlotModule):
    """A module whose parameters a fusion holds, and whose forward is its own: only other callers still use
    it."""


@dataclass(eq=False)
class _Shared:
    """A fused product whose columns some linears have still to take."""

    source: weakref.ref
    stamp: tuple
    left: dict[tuple[int, int], Tensor]


def _share(fusion: Fusion, x: Tensor, columns: tuple[int, int]) -> Tensor:
    """This linear's columns of the fused product of `x`: of the product a sibling has just made, else of a
    new one."""
    shared = fusion.shared
    if (
        shared is None
        or columns not in shared.left
        or shared.source() is not x
        or shared.stamp != _stamp_of(fusion, x)
    ):
        # tensors of their own, no views: if one is changed in place, the others keep their version
        widths = [stop - start for start, stop in fusion.columns]
        parts = torch.unsafe_split_with_sizes(_product(fusion, x), widths, -1)
        shared = _Shared(weakref.ref(x), _stamp_of(fusion, x), dict(zip(fusion.columns, parts, strict=True)))
    out = shared.left.pop(columns)
    fusion.shared = shared if shared.left else None
    return out


def _rows(fused: nn.Module, x: Tensor, rows: slice) -> Tensor:
    """The product with some rows of the joined weight."""
    bias = None if fused.bias is None else fused.bias[rows]
    return F.linear(x, fused.weight[rows], bias)


def _fused(fusion: Fusion, x: Tensor) -> Tensor | None:
    """What the fused module makes of `x`; None where that is normalised already, on a path of its own."""
    if fusion.norm is None:
        fusion.count_run()
        return fusion.fused(read(x))
    if isinstance(x, Deferred) and x.norm is fusion.norm and x.unread():
        x.taken = True
        fusion.count_run()
        return fusion.fused(x.source)
    fusion.count_plain("an input that was normalised in its own place")
    return None


def _product(fusion: Fusion, x: Tensor) -> Tensor:
    out = _fused(fusion, x)
    return F.linear(read(x), fusion.fused.weight, fusion.fused.bias) if out is None else out


def _stamp_of(fusion: Fusion, x: Tensor) -> tuple:
    value = x.value if isinstance(x, Deferred) else None
    source = x.source if isinstance(x, Deferred) else x
    return stamp(source, *fusion.weights(), *([] if value is None else [value])), saving_hooks()


def traced() -> bool:
    """Under a compiler, a tracer or a function transform the plain modules are what is understood best."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _only(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """The one tensor that a call was given, by whatever name."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


def _would_change_dtype(norm: NormSlot, x: Tensor) -> bool:
    return autocast(x) is not None or any(parameter.dtype != x.dtype for parameter in norm.own_parameters())


@cache
def takes_subclasses(kind: type) -> bool:
    """Whether a class can have the subclass that a converted module is an instance of."""
    try:
        type(kind.__name__, (kind,), {})
    except Exception:  # whatever its __init_subclass__ or metaclass says
        return False
    return True


@cache
def slot_class(base: type, kind: type, names: tuple[str, ...]) -> type:
    """A subclass of `base` under its own name, with `kind`'s behaviour and its way to read the parameters
    `names`."""
    reads = {name: property(kind.reader(name)) for name in names}
    original = getattr(base, "_te_transform_original_forward", base.forward)
    made_of = {
        "_te_transform_made_of": (base, kind, names),
        # for compilers, which would guard the whole __mro__ for a super()
        "_te_transform_original_forward": original,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    made = type(base.__name__, (kind, base), {**reads, **made_of})
    if "forward" in vars(kind):
        made.forward = _signed(kind.forward, original)
    made.__qualname__ = base.__qualname__
    return made


def _signed(forward: Callable, original: Callable) -> Callable:
    """`forward` with the signature of the forward that it stands for, which callers look at."""

    @wraps(original)
    def signed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return signed


def _unpickled(base: type, kind: type, names: tuple[str, ...]) -> nn.Module:
    cls = slot_class(base, kind, names)
    return cls.__new__(cls)
