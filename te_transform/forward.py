"""A module's forward, rewritten: for glue that no submodule holds (attention written out, fc2(act(fc1(x)))).

The owner is recorded again on its own, with symbolic sizes, and the fusion is put into that graph. What comes out is
one Path for training and one for evaluation: a function of the forward's tensors, and the guards under which it is the
forward: the same arguments given, sizes in the relations the recording met, attributes and children unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from te_transform import rewrite
from te_transform.causal import use_causal_flag
from te_transform.inputs import Inputs
from te_transform.slots import Deferred, Fusion
from te_transform.trace import Call, Recording, TraceError, record


class Refusal(Exception):
    """The owner's forward cannot be rewritten; the message is the reason for the report."""


@dataclass(eq=False)
class Mask:
    """A buffer that was proved to hold a causal mask, and that somebody may load over."""

    module: nn.Module
    name: str
    value: Tensor
    seen: tuple[weakref.ref, int] | None = None

    @classmethod
    def of(cls, owner: nn.Module, path: str, buffer: Tensor) -> Mask:
        """The mask at `path` below `owner`, with a copy of its value: as bool where that says it all."""
        parent, _, name = path.rpartition(".")
        small = buffer.bool()
        return cls(owner.get_submodule(parent), name, small if torch.equal(small.to(buffer.dtype), buffer) else buffer.clone())

    def holds(self) -> bool:
        """Whether the buffer is what it was; compared only where it is another tensor or was written to."""
        buffer = getattr(self.module, self.name)
        if torch.compiler.is_compiling() or (self.seen and self.seen[0]() is buffer and self.seen[1] == buffer._version):
            return True
        if not torch.equal(buffer.to(self.value.device), self.value.to(buffer.dtype)):
            return False
        self.seen = (weakref.ref(buffer), buffer._version)
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": None}


@dataclass(eq=False)
class Path:
    """One rewritten path through a forward, and when it holds."""

    parameters: tuple[str, ...]  # of the original forward, in order
    defaults: dict[str, Any]
    tensors: dict[str, tuple[int, torch.dtype]]  # name -> rank and dtype
    constants: dict[str, Any]
    source: str
    names: dict[str, Any]  # what the source refers to
    sizes: str  # the guards on sizes, as the source of a function of all the tensors' shapes
    any_float: bool
    deferred: str | None  # the tensor that must be the unread output of the fusion's norm
    watched: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    children: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compile()

    def _compile(self) -> None:
        scope = dict(self.names)
        exec(self.source, scope)
        self.run = scope["forward"]
        self.fits = eval(self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        modules = {name: value.__name__ for name, value in self.names.items() if isinstance(value, ModuleType)}
        names = {name: value for name, value in self.names.items() if name not in modules}
        return {k: v for k, v in self.__dict__.items() if k not in ("run", "fits")} | {"names": (names, modules)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names, modules = state["names"]
        self.__dict__.update(state, names=names | {name: import_module(path) for name, path in modules.items()})
        self._compile()

    def tensors_of(self, fusion: Fusion, args: tuple, kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The call's tensors in the path's order, or None where the call is not one that was recorded."""
        given = {**self.defaults, **dict(zip(self.parameters, args, strict=False)), **kwargs}
        if given.keys() != self.tensors.keys() | self.constants.keys() or len(args) > len(self.parameters):
            return None
        if any(given[name] is not value and given[name] != value for name, value in self.constants.items()):
            return None
        tensors = []
        for name, (rank, dtype) in self.tensors.items():
            tensor = given[name]
            if name == self.deferred:
                if not (isinstance(tensor, Deferred) and tensor.norm is fusion.norm and tensor.unread()):
                    return None
                tensor = tensor.source
            if not isinstance(tensor, Tensor) or tensor.dim() != rank:
                return None
            if tensor.dtype != dtype and not (self.any_float and tensor.is_floating_point() and dtype.is_floating_point):
                return None
            tensors.append(tensor)
        return tensors if self.fits(*[tensor.shape for tensor in tensors]) else None

    def unchanged(self, training: bool) -> bool:
        """Whether the attributes that the recording may have read are still what they were, and no hook waits inside."""
        for module, attributes in self.watched:
            if module.training is not training or any(getattr(module, k) != v for k, v in attributes.items()):
                return False
        for parent, name, child in self.children:
            if parent._modules.get(name) is not child or child._forward_hooks or child._forward_pre_hooks:
                return False
            if child._backward_hooks or child._backward_pre_hooks:
                return False
        return all(mask.holds() for mask in self.masks)


@dataclass(eq=False)
class Rewritten:
    """An owner's rewritten paths; a call that none of them fits runs the original forward."""

    training: tuple[Path, ...]
    evaluation: tuple[Path, ...]

    def ready(self, owner: nn.Module, fusion: Fusion, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The rewritten forward of this very call, or None where the original has to run."""
        for path in self.training if owner.training else self.evaluation:
            if path.unchanged(owner.training):
                tensors = path.tensors_of(fusion, args, kwargs)
                if tensors is not None:
                    return partial(path.run, owner, *tensors)
        return None


def rewrite_forward(call: Call, recorded: Recording, norm: Call | None, fuse: Callable[[Recording], set]) -> Rewritten:
    """The forward of `call`'s module with a fusion in it.

    Args:
        call: the owner's call in the whole model's recording.
        recorded: that recording, normalised.
        norm: the call of the norm that feeds the owner and belongs to the fusion, if there is one.
        fuse: puts the fusion into the owner's own normalised recording as `self.fused(...)`.

    Raises:
        Refusal: in training mode the forward could not be recorded or rewritten.
    """
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # sizes stay symbolic until they become nodes
        training = _paths(call, recorded, norm, fuse, train=True)
        try:
            evaluation = _paths(call, recorded, norm, fuse, train=False)
        except Refusal:
            evaluation = ()  # evaluation then runs the original forward
    return Rewritten(training, evaluation)


def _paths(*call: Any, **mode: Any) -> tuple[Path, ...]:
    """The path at any size and one at each size that makes a difference: 1, and a length that fills a whole buffer."""
    path, special = _path(*call, **mode)
    others = []
    for resized in special:
        with contextlib.suppress(Refusal):
            others.append(_path(*call, **mode, resized=resized)[0])
    return path, *others


class _After(nn.Module):
    """norm, then owner: so that a fusion that begins with the norm is seen whole."""

    def __init__(self, norm: nn.Module, owner: nn.Module, normalised: str):
        super().__init__()
        self.norm, self.owner, self.normalised = norm, owner, normalised

    def forward(self, **kwargs: Any) -> Any:
        return self.owner(**{**kwargs, self.normalised: self.norm(kwargs[self.normalised])})


def _path(
    call: Call, recorded: Recording, norm: Call | None, fuse: Callable, train: bool, resized: Mapping = MappingProxyType({})
) -> tuple[Path, list[dict[tuple[str, int], int]]]:
    owner = call.module
    signature = inspect.signature(owner.forward)
    given = _arguments(call, signature)
    deferred = _normalised_argument(recorded, norm, given) if norm else None
    example = {name: _example(name, value, resized) for name, value in given.items()}
    root = _After(norm.module, owner, deferred) if norm else owner
    try:
        free = frozenset(recorded.inputs.sizes() - set(resized.values()))
        recording = record(root, Inputs((), example), train=train, free_sizes=free)
    except (TraceError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise Refusal(
            f"the forward of {type(owner).__name__} could not be recorded with free sizes ({type(cause).__name__}), a "
            "rewritten forward has to run at any size"
        ) from error
    casting = {node.meta["call"].module for node in recording.graph.nodes if _names_dtype(node)}
    from te_transform.normalise import normalise

    normalise(recording)
    masks = use_causal_flag(recording)
    consumed = fuse(recording)
    own = next(c for c in recording.calls if c.module is owner)
    rewrite.collapse(recording, own)
    rewrite.rename_attributes(recording, lambda name: _own_name(own, name))
    tensors = {n.name: n for n in recording.graph.nodes if n.op == "placeholder"}
    any_float = casting <= consumed - {owner}  # no cast is left, so none was dropped that another dtype would need
    path = _compiled(own, recording, signature, given, tensors, deferred, any_float, consumed)
    path.masks = [Mask.of(owner, _own_name(own, name), tensor) for name, tensor in masks.items()]
    return path, _special_sizes(recording, tensors)


def _own_name(own: Call, name: str) -> str:
    if not name.startswith(own.path and f"{own.path}.") or name.startswith("_constant_"):
        raise Refusal("the forward reads a tensor that is no parameter, buffer or argument, its value could change unseen")
    return name.removeprefix(own.path).lstrip(".")


def _arguments(call: Call, signature: inspect.Signature) -> dict[str, Any]:
    bound = signature.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            if value:
                raise Refusal(f"the forward takes *{name}, a rewritten forward needs its arguments by name")
        else:
            given[name] = value
    return given


def _normalised_argument(recorded: Recording, norm: Call, given: dict[str, Any]) -> str:
    out = recorded.now(norm.output)
    names = [name for name, value in given.items() if isinstance(value, fx.Node) and recorded.now(value) is out]
    if len(names) != 1:
        raise Refusal("the norm's output reaches the module by no argument of its own, the fused module needs it there")
    return names[0]


def _example(name: str, value: Any, resized: Mapping[tuple[str, int], int]) -> Any:
    if isinstance(value, fx.Node):
        meta = value.meta["tensor_meta"]
        shape = [resized.get((name, dim), size) for dim, size in enumerate(meta.shape)]
        return torch.zeros(shape, dtype=meta.dtype)
    if isinstance(value, (tuple, list, dict)) and any(isinstance(v, fx.Node) for v in _leaves(value)):
        raise Refusal("the forward takes tensors inside a container, a rewritten forward needs each by a name of its own")
    return value


def _leaves(value: Any) -> list:
    found: list = []
    fx.node.map_aggregate(value, found.append)
    return found


def _names_dtype(node: fx.Node) -> bool:
    casts = ("float", "half", "bfloat16", "double", "type_as", "type")
    if getattr(node.target, "__name__", "") in casts:
        return True
    return any(isinstance(leaf, torch.dtype) for leaf in _leaves((node.args, dict(node.kwargs))))


def _compiled(
    own: Call,
    recording: Recording,
    signature: inspect.Signature,
    given: dict[str, Any],
    tensors: dict[str, fx.Node],
    deferred: str | None,
    any_float: bool,
    consumed: set,
) -> Path:
    symbols = _symbols(tensors)
    _materialise_sizes(recording, symbols)
    used = {node.name for node in tensors.values()}
    names = {n: (len(node.meta["tensor_meta"].shape), node.meta["tensor_meta"].dtype) for n, node in tensors.items()}
    if missing := [n for n, v in given.items() if isinstance(v, fx.Node) and n not in used]:
        raise Refusal(f"the arguments {missing} are one tensor, a rewritten forward takes each tensor once")
    code = recording.graph.python_code("self")
    owner = own.module
    return Path(
        parameters=tuple(
            name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ),
        defaults={n: p.default for n, p in signature.parameters.items() if p.default is not p.empty},
        tensors=names,
        constants={name: value for name, value in given.items() if name not in names},
        source=code.src,
        names=code.globals,
        sizes=_size_guard(recording, tensors, symbols),
        any_float=any_float,
        deferred=deferred,
        watched=[(module, _scalars(module)) for module in (owner, *consumed)],
        children=[
            (parent, name, child)
            for parent in (owner, *consumed)
            for name, child in parent._modules.items()
            if child in consumed
        ],
    )


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in module.__dict__.items()
        if isinstance(value, (bool, int, float, str)) and name != "training"
    }


def _special_sizes(recording: Recording, tensors: dict[str, fx.Node]) -> list[dict[tuple[str, int], int]]:
    """Sizes that the path excludes, one dictionary for each, with the dimensions that would have them."""
    alike: dict[int, list[tuple[str, int]]] = {}  # by example size: batches, lengths
    symbols: dict[Any, int] = {}
    for name, node in tensors.items():
        for dim, size in enumerate(node.meta["tensor_meta"].shape):
            if isinstance(size, torch.SymInt):
                alike.setdefault(size.node.hint, []).append((name, dim))
                symbols[size.node.expr] = size.node.hint
    unequal = [g.expr for g in recording.shapes.guards if g.expr.func is sympy.Ne and g.expr.lhs in symbols]
    special = {(symbols[e.lhs], int(e.rhs)) for e in unequal if e.rhs.is_Integer} | {(size, 1) for size in alike}
    alone = [dict.fromkeys(alike[example], size) for example, size in sorted(special)]
    # generation fills the whole buffer with one sample
    return alone + [
        dict.fromkeys(alike[example], size) | dict.fromkeys(alike[other], 1)
        for example, size in sorted(special)
        for other in alike
        if size > 1 and other != example
    ]


def _symbols(tensors: dict[str, fx.Node]) -> dict[Any, tuple[str, int]]:
    found: dict[Any, tuple[str, int]] = {}
    for name, node in tensors.items():
        for dim, size in enumerate(node.meta["tensor_meta"].shape):
            if isinstance(size, torch.SymInt) and size.node._expr.is_Symbol:
                found.setdefault(size.node._expr, (name, dim))
    return found


def _materialise_sizes(recording: Recording, symbols: dict[Any, tuple[str, int]]) -> None:
    """Put nodes that compute them from the inputs' sizes where the recording had symbolic sizes."""
    graph = recording.graph
    inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    made: dict[Any, Any] = {}

    def sized(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        if expression not in made:
            with graph.inserting_before(first):
                env = {s: fx.Proxy(graph.call_method("size", (inputs[name], dim))) for s, (name, dim) in symbols.items()
                       if s in expression.free_symbols}  # fmt: skip
                if missing := expression.free_symbols - env.keys():
                    raise Refusal(f"a size depends on {missing}, a rewritten forward needs it from its inputs' sizes")
                made[expression] = sympy_interp(PythonReferenceAnalysis, env, expression).node
        return made[expression]

    for node in list(graph.nodes):
        node.args = fx.node.map_aggregate(node.args, sized)
        node.kwargs = fx.node.map_aggregate(node.kwargs, sized)


def _size_guard(recording: Recording, tensors: dict[str, fx.Node], symbols: dict[Any, tuple[str, int]]) -> str:
    expressions = {guard.expr for guard in recording.shapes.guards}
    if unknown := {s for e in expressions for s in e.free_symbols} - symbols.keys():
        raise Refusal(f"the forward branches on {unknown}, a rewritten forward can check its inputs' sizes only")
    tests = [f"{symbol} > 1" for symbol in symbols]  # the recording took no free size for 0 or 1
    tests += [f"({PythonPrinter().doprint(expression)})" for expression in sorted(expressions, key=str)]
    tests += [f"{node.name}[{dim}] == {size}" for node in tensors.values()
              for dim, size in enumerate(node.meta["tensor_meta"].shape) if isinstance(size, int)]  # fmt: skip
    values = ", ".join(f"{name}[{dim}]" for name, dim in symbols.values())
    body = f"(lambda {', '.join(map(str, symbols))}: {' and '.join(tests) or 'True'})({values})"
    return f"lambda {', '.join(tensors)}: {body}"
