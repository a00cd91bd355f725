"""A module's forward, rewritten: for glue that no submodule holds (attention written out, fc2(act(fc1(x)))).

The owner is recorded again on its own, with symbolic sizes, and the fusion is put into that graph. What comes
out is a function of the forward's tensors for training and one for evaluation, with the guards under which
each is the forward (guards.py): the same arguments given, sizes in the relations the recording met,
attributes and children unchanged. A size that makes a difference, 1 or a length that fills a whole buffer,
gets a path of its own.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import textwrap
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from te_transform import rewrite
from te_transform.alike import likeness, own_numbers
from te_transform.attributes import touched
from te_transform.causal import use_causal_flag
from te_transform.guards import Mask, Missing, Mode, Path, Rewritten, same, source_of
from te_transform.inputs import Inputs
from te_transform.normalise import normalise
from te_transform.slots import takes_subclasses
from te_transform.trace import Call, Passed, Recording, TraceError, example_of, record

Sizes = Mapping[tuple[str, int], int]  # (argument, dimension) -> size


class Refusal(Exception):
    """The owner's forward cannot be rewritten; the message is the reason for the report."""


@dataclass(frozen=True, eq=False)
class Owner:
    """A module whose forward is to be rewritten, as the whole model's normalised recording saw it called.

    `norm` is the call of a norm outside the owner that belongs to the fusion, and `joins_norm` whether the
    fused module takes it over; `fuse` puts the fusion into the owner's own normalised recording, as a call of
    `fused`.
    """

    call: Call
    recorded: Recording
    norm: Call | None
    joins_norm: bool
    fuse: Callable[[Recording], None]
    signature: inspect.Signature
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        return self.call.module

    @property
    def normalised(self) -> str | None:
        """The argument that is the output of `norm`.

        Raises:
            Refusal: there is none.
        """
        if self.norm is None:
            return None
        out = self.recorded.now(self.norm.output)
        names = [
            n
            for n, value in self.given.items()
            if isinstance(value, fx.Node) and self.recorded.now(value) is out
        ]
        if len(names) != 1:
            raise Refusal(
                "the norm's output reaches the module by no argument of its own, the fused module needs it "
                "there"
            )
        return names[0]


@dataclass(eq=False)
class Draft:
    """The paths of a forward in one mode, without the module: what modules called alike can share."""

    paths: list[Path] = field(default_factory=list)
    # modules that the rewritten forward does not call, by their path below the owner
    gone: tuple[str, ...] = ()
    # buffers proved to be causal, as bool where that says it all
    masks: dict[str, Tensor] = field(default_factory=dict)
    # attributes that the recorded forward read: the module, by its number in the family, and the name
    read: frozenset[tuple[int, str]] = frozenset()

    def family(self, owner: Owner) -> list[nn.Module]:
        """The modules whose part the rewritten forward plays, the owner first."""
        norms = [owner.norm.module] if owner.norm and owner.joins_norm else []
        return [owner.module, *(owner.module.get_submodule(path) for path in self.gone), *norms]

    def of(self, owner: Owner, training: bool) -> Mode:
        """The mode of this very module."""
        family = self.family(owner)
        gone = family[1:]
        children = [(p, {name: c for name, c in p._modules.items() if c in gone}) for p in family]
        read = [(family[i], name) for i, name in sorted(self.read)]
        return Mode(
            paths=self.paths,
            watched=[(m, name, training if name == "training" else getattr(m, name)) for m, name in read],
            children=[(parent, named) for parent, named in children if named],
            masks=[Mask.of(owner.module, path, value) for path, value in self.masks.items()],
        )


# training and evaluation, by likeness and, where the forward reads it, the layer's own number
Drafts = dict[Hashable, tuple[Draft, Draft]]


def rewrite_forward(
    call: Call, recorded: Recording, norm: Call | None, joins_norm: bool, fuse: Callable, known: Drafts
) -> Rewritten:
    """The forward of `call`'s module with a fusion in it; the arguments are those of Owner.

    `known` are the drafts of modules that may have been called alike; a new one is added.

    Raises:
        Refusal: in training mode the forward could not be recorded or rewritten.
    """
    signature = inspect.signature(call.module.forward)
    owner = Owner(call, recorded, norm, joins_norm, fuse, signature, _arguments(call, signature))
    drafts = _known_drafts(owner, known)
    training, evaluation = _modes(owner, drafts)
    if not all(
        mask.holds() for mask in (*training.masks, *evaluation.masks)
    ):  # alike, but for the values of a mask
        training, evaluation = _modes(owner, _drafts(owner))
    return Rewritten(training, evaluation)


def _modes(owner: Owner, drafts: tuple[Draft, Draft]) -> tuple[Mode, Mode]:
    training, evaluation = drafts
    return training.of(owner, training=True), evaluation.of(owner, training=False)


def _known_drafts(owner: Owner, known: Drafts) -> tuple[Draft, Draft]:
    key = likeness(owner.call, owner.recorded, owner.norm)
    numbers = own_numbers(owner.call, owner.norm)
    own_key = key, tuple(numbers.items())
    if key not in known and own_key not in known:
        drafts = _drafts(owner)
        read = {(draft.family(owner)[i], name) for draft in drafts for i, name in draft.read}
        known[own_key if read & numbers.keys() else key] = drafts
    return known[own_key] if own_key in known else known[key]


def _drafts(owner: Owner) -> tuple[Draft, Draft]:
    with warnings.catch_warnings(
        action="ignore", category=UserWarning
    ):  # sizes stay symbolic until they become nodes
        training, evaluation = _draft(owner, train=True), Draft()
        with contextlib.suppress(Refusal):  # evaluation then runs the original forward
            evaluation = _draft(owner, train=False)
    return training, evaluation


def _draft(owner: Owner, train: bool) -> Draft:
    """The paths at any size and at the sizes that make a difference, in one mode."""
    passed = _handed_on(owner.module) - {owner.normalised}  # which has to be checked, not only handed on
    if passed:
        with contextlib.suppress(Refusal):
            return _draft_with(owner, train, passed)
    return _draft_with(owner, train, frozenset())


def _draft_with(owner: Owner, train: bool, passed: frozenset[str]) -> Draft:
    draft = Draft()
    modules = {*owner.module.modules(), *({owner.norm.module} if owner.norm else ())}
    watched = {module for module in modules if takes_subclasses(type(module))}
    with touched(watched) as attributes:
        for sizes in _rewritten(owner, _recorded(owner, train, {}, passed), passed, draft):
            with contextlib.suppress(Refusal):
                _rewritten(owner, _recorded(owner, train, sizes, passed), passed, draft)
    family = draft.family(owner)
    if unseen := sorted({type(module).__name__ for module in family if module not in watched}):
        raise Refusal(
            f"{', '.join(unseen)} refuses to be subclassed, a rewritten forward belongs to a subclass, and "
            "what it goes by is seen through one"
        )
    if written := sorted({name for module, name in attributes.written if module in family}):
        raise Refusal(
            f"the forward sets the attribute {', '.join(written)}, a rewritten forward does nothing but "
            "compute its result"
        )
    numbers = {module: number for number, module in enumerate(family)}
    draft.read = frozenset((numbers[m], name) for m, name in attributes.read if m in numbers)
    return draft


class _After(nn.Module):
    """norm, then owner: so that a fusion that begins with the norm is seen whole."""

    def __init__(self, norm: nn.Module, owner: nn.Module, normalised: str):
        super().__init__()
        self.norm, self.owner, self.normalised = norm, owner, normalised

    def forward(self, **kwargs: Any) -> Any:
        return self.owner(**{**kwargs, self.normalised: self.norm(kwargs[self.normalised])})


def _recorded(owner: Owner, train: bool, sizes: Sizes, passed: frozenset[str]) -> Recording:
    """The owner's own recording, on tensors like those it was called with, with the `sizes` given instead of
    theirs."""
    example = {name: _example(name, value, sizes, passed) for name, value in owner.given.items()}
    root = _After(owner.norm.module, owner.module, owner.normalised) if owner.norm else owner.module
    free = frozenset(owner.recorded.inputs.sizes() - set(sizes.values()))
    try:
        with _quietly():
            return record(root, Inputs((), example), train=train, free_sizes=free, owner=owner.module)
    except (TraceError, RuntimeError) as error:
        cause = error.__cause__ or error
        raise Refusal(
            f"the forward of {type(owner.module).__name__} could not be recorded with free sizes "
            f"({type(cause).__name__}), a rewritten forward has to run at any size"
        ) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without PyTorch's own account of a fake operation that failed: the report says what came of it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _rewritten(owner: Owner, recording: Recording, passed: frozenset[str], draft: Draft) -> list[Sizes]:
    """Add the path of this recording to `draft`; returns the sizes that it excludes."""
    casting = {node.meta["call"].module for node in recording.graph.nodes if _names_dtype(node)}
    normalise(recording)
    masks = use_causal_flag(recording)
    owner.fuse(recording)
    own = next(call for call in recording.calls if call.module is owner.module)
    again = rewrite.collapse(recording, own)
    # called in the original forward but not in the rewritten one: taken by the fusion, or without effect when
    # recorded
    gone = [c for c in recording.calls if c is not own and not any(c.within(kept) for kept in again)]
    inside = [call.path.removeprefix(own.path).lstrip(".") for call in gone if call.within(own)]
    rewrite.rename_attributes(recording, lambda name: _own_name(own, name))
    # where no cast is left, none was dropped that another dtype would need
    any_float = casting <= {call.module for call in gone} - {recording.root}
    draft.paths.append(_path(owner, recording, passed, any_float))
    draft.gone = tuple(dict.fromkeys((*draft.gone, *inside)))
    draft.masks |= {_own_name(own, name): _compact(tensor) for name, tensor in masks.items()}
    return _special_sizes(recording, passed)


def _compact(mask: Tensor) -> Tensor:
    return mask.bool() if torch.equal(mask.bool().to(mask.dtype), mask) else mask.clone()


def _path(owner: Owner, recording: Recording, handed_on: frozenset[str], any_float: bool) -> Path:
    placeholders = [node for node in recording.graph.nodes if node.op == "placeholder"]
    tensors = {n.target: n.meta["tensor_meta"] for n in placeholders if n.target not in handed_on}
    passed = tuple(node.target for node in placeholders if node.target in handed_on)
    if missing := [
        n for n, v in owner.given.items() if isinstance(v, fx.Node) and n not in (*tensors, *passed)
    ]:
        raise Refusal(f"the arguments {missing} are one tensor, a rewritten forward takes each tensor once")
    symbols = _symbols(recording, handed_on)
    _materialise_sizes(recording, symbols)
    constants = {name: value for name, value in owner.given.items() if name not in (*tensors, *passed)}
    code = recording.graph.python_code("self")
    sizes = _size_guard(recording, handed_on, symbols)
    source, names = _arguments_source(owner, tensors, passed, constants, any_float, sizes)
    return Path(code.src + source, code.globals | names)


def _arguments_source(
    owner: Owner,
    tensors: dict[str, TensorMetadata],
    passed: tuple[str, ...],
    constants: dict[str, Any],
    any_float: bool,
    sizes: str,
) -> tuple[str, dict[str, Any]]:
    """The source of a path's arguments(), and what it refers to: literals where it can, as they need no guard
    of a compiler."""
    names: dict[str, Any] = {"_Tensor": Tensor, "_missing": Missing, "_same": same, "_source_of": source_of}
    deferred = owner.normalised if owner.joins_norm else None
    lines = []
    for name, value in constants.items():
        if value is None or isinstance(value, bool):
            lines.append(f"if {name} is not {value}: return None")
        else:
            names[f"_constant_{name}"] = value
            lines.append(f"if not _same({name}, _constant_{name}): return None")
    for name, meta in tensors.items():
        is_float = f"{name}.is_floating_point()" if any_float and meta.dtype.is_floating_point else "False"
        names[f"_dtype_{name}"] = meta.dtype
        lines += [f"_deferred, {name} = {name}, _source_of({name}, _norm)"] if name == deferred else []
        lines += [
            f"if not isinstance({name}, _Tensor) or {name}.dim() != {len(meta.shape)}: return None",
            f"if {name}.dtype != _dtype_{name} and not {is_float}: return None",
        ]
    given = ", ".join(f"{name!r}: {name}" for name in (*tensors, *passed))
    lines.append(f"if _more or _rest or not {sizes}: return None")
    lines += ["_deferred.taken = True"] if deferred else []  # now that nothing stands against it
    lines.append(f"return {{{given}}}")
    head = f"def arguments(_norm, {_parameters(owner, names)}):"
    return "\n".join(["", head, *(f"    {line}" for line in lines), ""]), names


def _parameters(owner: Owner, names: dict[str, Any]) -> str:
    """The parameters of the owner's forward, each with a default, which `names` gets."""
    before, after = [], []
    for name, parameter in owner.signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        names[f"_default_{name}"] = Missing if parameter.default is parameter.empty else parameter.default
        (after if parameter.kind is parameter.KEYWORD_ONLY else before).append(f"{name}=_default_{name}")
    more = [f"{name}=_missing" for name in owner.given if name not in owner.signature.parameters]
    return ", ".join([*before, "*_more", *after, *more, "**_rest"])


def _own_name(own: Call, name: str) -> str:
    if not name.startswith(own.path and f"{own.path}.") or name.startswith("_constant_"):
        raise Refusal(
            "the forward reads a tensor that is no parameter, buffer or argument, its value could change "
            "unseen"
        )
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


def _handed_on(module: nn.Module) -> frozenset[str]:
    """The parameters of a forward that it ignores, or only hands on to its children as they are (a cache, a
    mask)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward))))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    parameters = {name for name in inspect.signature(module.forward).parameters if name != "self"}
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    handed = [name.id for call in ast.walk(tree) for name in _given_to_child(call, module)]
    return frozenset(name for name in parameters if used.count(name) == handed.count(name))


def _given_to_child(call: ast.AST, module: nn.Module) -> Iterator[ast.Name]:
    """The bare names among the arguments of `self.child(...)`."""
    function = call.func if isinstance(call, ast.Call) else None
    if (
        isinstance(function, ast.Attribute)
        and ast.unparse(function.value) == "self"
        and function.attr in module._modules
    ):
        for argument in (*call.args, *(keyword.value for keyword in call.keywords if keyword.arg)):
            if isinstance(argument, ast.Name):
                yield argument


def _example(name: str, value: Any, sizes: Sizes, passed: frozenset[str]) -> Any:
    if isinstance(value, fx.Node):
        meta = value.meta["tensor_meta"]
        shape = [sizes.get((name, dim), size) for dim, size in enumerate(meta.shape)]
        return example_of(value, shape)
    if isinstance(value, (tuple, list, dict)) and any(isinstance(v, fx.Node) for v in _leaves(value)):
        raise Refusal(
            "the forward takes tensors inside a container, a rewritten forward needs each by a name of its "
            "own"
        )
    return Passed(name, value) if name in passed else value


def _leaves(value: Any) -> list:
    found: list = []
    fx.node.map_aggregate(value, found.append)
    return found


def _names_dtype(node: fx.Node) -> bool:
    casts = ("float", "half", "bfloat16", "double", "type_as", "type")
    if getattr(node.target, "__name__", "") in casts:
        return True
    return any(isinstance(leaf, torch.dtype) for leaf in _leaves((node.args, dict(node.kwargs))))


def _special_sizes(recording: Recording, handed_on: frozenset[str]) -> list[Sizes]:
    """Sizes that the path excludes, one mapping for each, with the dimensions that would have them."""
    alike: dict[int, list[tuple[str, int]]] = {}  # by example size: batches, lengths
    symbols: dict[Any, int] = {}
    for name, dim, size in _input_sizes(recording, handed_on):
        if isinstance(size, torch.SymInt):
            alike.setdefault(size.node.hint, []).append((name, dim))
            symbols[size.node.expr] = size.node.hint
    unequal = [g.expr for g in recording.shapes.guards if g.expr.func is sympy.Ne and g.expr.lhs in symbols]
    special = {(symbols[e.lhs], int(e.rhs)) for e in unequal if e.rhs.is_Integer} | {
        (size, 1) for size in alike
    }
    alone = [(example, dict.fromkeys(alike[example], size)) for example, size in sorted(special)]
    # generation decodes one token of one sample, and fills the whole buffer with one sample
    return [sizes for _, sizes in alone] + [
        sizes | dict.fromkeys(alike[other], 1)
        for example, sizes in alone
        for other in alike
        if other != example
    ]


def _input_sizes(recording: Recording, handed_on: frozenset[str]) -> Iterator[tuple[str, int, Any]]:
    for node in recording.graph.nodes:
        if node.op == "placeholder" and node.target not in handed_on:
            for dim, size in enumerate(node.meta["tensor_meta"].shape):
                yield node.target, dim, size


def _symbols(recording: Recording, handed_on: frozenset[str]) -> dict[Any, tuple[str, int]]:
    """Each free symbol with the argument and dimension whose size it is."""
    found: dict[Any, tuple[str, int]] = {}
    for name, dim, size in _input_sizes(recording, handed_on):
        if isinstance(size, torch.SymInt) and size.node._expr.is_Symbol:
            found.setdefault(size.node._expr, (name, dim))
    return found


def _materialise_sizes(recording: Recording, symbols: dict[Any, tuple[str, int]]) -> None:
    """Put nodes that compute them from the inputs' sizes where the recording had symbolic sizes."""
    graph = recording.graph
    inputs = {n.target: n for n in graph.nodes if n.op == "placeholder"}
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
                places = {s: place for s, place in symbols.items() if s in expression.free_symbols}
                env = {
                    s: fx.Proxy(graph.call_method("size", (inputs[n], dim))) for s, (n, dim) in places.items()
                }
                if missing := expression.free_symbols - env.keys():
                    raise Refusal(
                        f"a size depends on {missing}, a rewritten forward needs it from its inputs' sizes"
                    )
                made[expression] = sympy_interp(PythonReferenceAnalysis, env, expression).node
        return made[expression]

    for node in list(graph.nodes):
        node.args = fx.node.map_aggregate(node.args, sized)
        node.kwargs = fx.node.map_aggregate(node.kwargs, sized)


def _size_guard(recording: Recording, handed_on: frozenset[str], symbols: dict[Any, tuple[str, int]]) -> str:
    """An expression of the tensors: whether they have sizes that the recording holds for."""
    expressions = {guard.expr for guard in recording.shapes.guards}
    if unknown := {s for e in expressions for s in e.free_symbols} - symbols.keys():
        raise Refusal(
            f"the forward branches on {unknown}, a rewritten forward can check its inputs' sizes only"
        )
    tests = [f"{symbol} > 1" for symbol in symbols]  # the recording took no free size for 0 or 1
    tests += [f"({PythonPrinter().doprint(expression)})" for expression in sorted(expressions, key=str)]
    tests += [
        f"{name}.shape[{dim}] == {size}"
        for name, dim, size in _input_sizes(recording, handed_on)
        if isinstance(size, int)
    ]
    values = ", ".join(f"{name}.shape[{dim}]" for name, dim in symbols.values())
    return f"(lambda {', '.join(map(str, symbols))}: {' and '.join(tests) or 'True'})({values})"
