"""The converted model: its class, swapped for one whose forward is the captured one, and what belongs to it.

The only file that touches the user's model, but for parallel.py, which puts DTensors in the places of the
parameters where that was asked for. Its modules, parameters and attributes stay as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import SkipFrame
from torch._guards import CompileContext
from torch.nn.modules.module import _has_any_global_hook

from te_transform.backends import gradients
from te_transform.backends.collectives import Ranks
from te_transform.backends.joined import lay, local
from te_transform.canonicalize import functions
from te_transform.graph.capture import capture, is_capturing, is_compiling_here, is_our_capture
from te_transform.graph.nodes import called, replaced_function
from te_transform.plan.assign import put_in_recipe
from te_transform.plan.match import Site, plan
from te_transform.plan.model import CONVERTED, ModelError, is_sharded
from te_transform.plan.options import Options
from te_transform.runtime.captured import CapturedGraph
from te_transform.runtime.lower import Apart
from te_transform.runtime.modes import is_dispatch_mode_on, is_foreign_mode_on, set_aside
from te_transform.runtime.parallel import Parallel, ParallelError
from te_transform.runtime.precision import Precision

log = logging.getLogger(__name__)

_RECOMPUTES = (
    "activation checkpoints are on in the forward and the model has no list of blocks to capture one by one: "
    "with gradients it runs as the user's own code"
)

_WRITES = (
    "an autograd.Function in the forward writes in place to its argument, whose gradients dynamo captures as "
    "if it had not: it runs as the user's own code"
)

_REPLACED = (
    "somebody has replaced PyTorch's {} by a function that calls it, and a captured graph, which calls "
    "PyTorch's functions by name, would call both: what calls it runs as the user's own code"
)

_NESTS = (
    "nn.TransformerEncoder leaves out what is padded and hands back zeros there, but not where it is traced: "
    "evaluation runs as the user's own code"
)

_GATHERED = (
    "fully_shard() gathers the parameters of a divided model anew for each call, CUDA graphs need them where "
    "they were: graphs run without CUDA graphs"
)

_calling: ContextVar[bool] = ContextVar("_calling", default=False)  # in a call of a converted model

Checker = Callable[[CapturedGraph, Sequence[Any]], dict[Site, str]]

# The number of blocks from which on a model is planned and checked block by block: one captured graph serves
# all of them, while a capture of the whole takes 0.2 s a block. What runs later is captured whole, at its
# first call.
DEEP = 8


@dataclass(eq=False)
class Converted:
    """What a converted model carries beside its own: one for the model and all its captured blocks.

    `original` runs the user's own code for as long as it is set; `checker` finds the wrong sites of a graph;
    `apart`, `dry` and `watch` are for its graphs, see captured.py.
    """

    options: Options
    by_block: bool = False
    checker: Checker | None = None
    in_pieces: bool = False  # whether it has to be by block: where FSDP or checkpoints cut the forward
    recomputes: bool = False  # whether there are checkpoints in it, and no blocks to capture
    nests: bool = False  # whether it makes nested tensors in evaluation where it is not traced
    entered: bool = False  # whether a call has come through the model's own forward, not its parts' alone
    leaving: set[type] = field(default_factory=set)  # the classes whose forward runs as it is in this call
    # weak references to the model and its first block; None where nobody has looked yet
    model: Callable[[], nn.Module | None] | None = None
    first_block: Callable[[], nn.Module | None] | None = None
    graphs: list[CapturedGraph] = field(default_factory=list)
    apart: Apart = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # sentences: what runs as it was captured
    watch: Callable[..., Any] | None = None
    original: bool = False
    dry: bool = False
    report: Any = None  # of the room to the right
    # graphs of the first call of the whole, where the report is of blocks; None where it is not
    whole: list[CapturedGraph] | None = None
    precision: Precision | None = None
    parallel: Parallel | None = None
    uncaptured: set[type] = field(default_factory=set)  # of a divided model: dynamo gave up on their code
    runs: dict[type, Callable[..., Any]] = field(default_factory=dict)  # the captured forwards, by class
    methods: dict[type, tuple] = field(default_factory=dict)  # what calls of the classes went through

    def backend(
        self, captured: fx.GraphModule, example_inputs: list[Any], kind: type = nn.Module
    ) -> Callable[..., Any]:
        """Rewrite one graph of the forward of `kind`, for dynamo; whatever fails in here, the graph runs as
        it was captured."""
        if has_checkpoints(captured):
            # run as an operation of a graph, a checkpoint would draw other random numbers when it is
            # repeated: the user's own code runs, in which the blocks are captured if there are any
            self.leaving.add(kind)
            self.recomputes = self.first_block is None or self.first_block() is None
            if not self.recomputes:
                self.in_pieces = True
                self.capture_blocks(self.model())
            if self.recomputes and _RECOMPUTES not in self.failures:
                self.failures.append(_RECOMPUTES)
            raise SkipFrame(_RECOMPUTES)
        if (why := _why_uncaptured(captured)) is not None:
            self.failures += [why] * (why not in self.failures)
            raise SkipFrame(why)
        if _has_layers_evaluated_whole(captured) and any(map(_makes_nested_tensors, self._modules())):
            self.leaving.add(kind)
            self.nests = True
            self.failures += [_NESTS] * (_NESTS not in self.failures)
            raise SkipFrame(_NESTS)
        if self.recomputes and torch.is_grad_enabled():
            # torch.compile goes on to capture functions that the forward calls: where they run unfused, a
            # checkpoint finds as many saved tensors when it repeats them
            return captured.forward
        if (model := self.model and self.model()) is not None:
            self.methods |= {kind: _methods_called(kind) for kind in _own_classes(model)}
        return self._fused(captured) if self.parallel is None else self.parallel.graph(captured, self._fused)

    def _fused(self, captured: fx.GraphModule) -> Callable[..., Any]:
        try:
            made = plan(captured, self.options, is_part=self.by_block and not self.in_pieces)
            if self.options.recipe is not None:
                put_in_recipe(made, self.options)
            graph = CapturedGraph(made, self)
        except Exception as error:
            log.warning("a graph of the model runs as it was captured", exc_info=error)
            self.failures.append(f"{type(error).__name__}: {error}")
            return captured.forward
        self.graphs.append(graph)
        held = weakref.ref(graph)  # dynamo lets go of nothing that it was ever given
        return lambda *arguments: held()(*arguments)

    def options_now(self) -> Options:
        """The options, without CUDA graphs where fully_shard() divides a divided model's parameters again: it
        gathers them elsewhere in each call, on each rank by itself."""
        if self.parallel is None or not self.options.graphs:
            return self.options
        first = self.first_block and self.first_block()
        if not any(map(is_sharded, (self.model and self.model(), first))):
            return self.options
        self.failures += [_GATHERED] * (_GATHERED not in self.failures)
        return replace(self.options, graphs=False)

    @property
    def ranks(self) -> Ranks | None:
        """Those that the model is divided among."""
        return None if self.parallel is None else self.parallel.ranks

    def check(self, graph: CapturedGraph, arguments: Sequence[Any]) -> dict[Site, str]:
        """What is wrong with sites of the graph on the values of its first call, in the model's own dtype."""
        if self.checker is None:
            return {}
        with nullcontext() if self.precision is None else self.precision.paused(), gradients.paused():
            wrong = self.checker(graph, arguments)
        if self.report is not None:  # which has what was wrong in the calls of the conversion itself
            later = "taken back in a later call"
            self.failures += (f"{later}: {site.name}, {why}" for site, why in wrong.items())
        return wrong

    def call(
        self, place: Place, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """A call of the model, of a part of it, or of a block; `forward` is the one of its own class."""
        if place.role is Role.PART and _calling.get():
            return forward(module, *args, **kwargs)
        self.entered = self.entered or place.is_root
        token = _calling.set(True)
        try:
            return self._call(place, forward, module, args, kwargs)
        finally:
            _calling.reset(token)

    def _call(
        self, place: Place, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        if self._runs_as_it_is(module, args, kwargs):
            with self._with_whole_parameters(module):
                return forward(module, *args, **kwargs)
        is_block = place.role is Role.BLOCK
        if is_block and self.parallel is not None and self.leaving:
            raise _OnStandIns
        # a copy of which only parts are called, by themselves, knows no model
        model = None if is_block else module if place.is_root else self.model and self.model()
        if model is not None:
            self._settle(model)
        with nullcontext() if self.precision is None or model is None else self.precision.running(model):
            if self.by_block and not is_block:
                with self._with_whole_parameters(module, but_blocks=True):
                    return forward(module, *args, **kwargs)
            kind = type(module)
            run, before = self._captured(kind, forward), len(self.graphs)
            run.turned_off = False
            try:
                with set_aside(), self._with_stand_ins(module), suppress(_OnStandIns):
                    out = run(module, *args, **kwargs)
                if self.parallel is not None and (run.turned_off or kind in self.leaving):
                    # a part of its code ran on stand-ins; blocks are captured by now, if there are any
                    self.leaving.discard(kind)
                    self.uncaptured |= {kind} if run.turned_off else set()
                    with self._with_whole_parameters(module, but_blocks=self.by_block):
                        out = forward(module, *args, **kwargs)
                if place.is_root and self.whole == []:
                    self.whole = self.graphs[before:]
                return out
            except Exception:
                if run.turned_off:  # a call that the model does not take: begin anew with the next one
                    self.runs.pop(kind, None)
                raise
            finally:
                if self.nests and kind in self.leaving:  # training is captured still
                    self.runs.pop(kind, None)
                self.leaving.discard(kind)

    def _captured(self, kind: type, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a class, which is captured in its calls."""
        if kind not in self.runs:
            held = weakref.ref(self)  # see _fused()
            dynamic = None if self.parallel is None else False  # shards are of sizes that are known
            self.runs[kind] = capture(
                forward,
                lambda captured, inputs: held().backend(captured, inputs, kind),
                lambda: kind in held().leaving,
                dynamic,
            )
        return self.runs[kind]

    def _runs_as_it_is(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether a call runs the user's own code."""
        idle = self.original or self.options.as_it_is or is_foreign_mode_on() or self._decodes(args, kwargs)
        idle = idle or type(module) in self.uncaptured or (self.nests and _is_evaluated(module))
        return idle or (self.recomputes and torch.is_grad_enabled())

    def _modules(self) -> Iterator[nn.Module]:
        model = self.model and self.model()
        return iter(()) if model is None else model.modules()

    def _with_stand_ins(self, module: nn.Module) -> AbstractContextManager[None]:
        """For a call that is captured: the stand-ins of the parameters of a divided model."""
        return nullcontext() if self.parallel is None else self.parallel.standing_in(module.modules())

    def _with_whole_parameters(
        self, module: nn.Module, but_blocks: bool = False
    ) -> AbstractContextManager[None]:
        """For a call of the user's own code: the parameters of a divided model as a whole, but for those of
        blocks where these are captured.

        Raises:
            ParallelError: the backward would repeat parts of that code, when they are no longer whole.
        """
        if self.parallel is None:
            return nullcontext()
        if self.recomputes and torch.is_grad_enabled():
            raise ParallelError(
                "activation checkpoints are on in a model that is divided among ranks and has no list of "
                "blocks to capture one by one, a forward without them is needed: turn them off"
            )
        without = blocks(module) if but_blocks else ()
        inside = {id(part) for block in without for part in block.modules()}
        return self.parallel.whole(part for part in module.modules() if id(part) not in inside)

    def _decodes(self, args: tuple, kwargs: dict) -> bool:
        """Whether this is a step of a generation that the user's own code runs.

        Nothing is gained by fused kernels on so little, and a cache that grows would be captured over and
        over. One that does not may run as a CUDA graph.
        """
        return _is_decoding(args, kwargs) and not (self.options.graphs and _has_static_cache(args, kwargs))

    def _settle(self, model: nn.Module) -> None:
        """Before a call of the model: what the last one has shown."""
        if self.first_block is None:
            self.model = weakref.ref(model)
            self.first_block = next(map(weakref.ref, blocks(model)), type(None))
        if self.apart and not is_dispatch_mode_on():  # it would take that for a part of the forward
            self.lay_again(model)
        # dynamo guards the class of a module, not what the class has for a forward, nor who calls that
        if any(_methods_called(kind) != methods for kind, methods in self.methods.items()):
            self.runs.clear()
            self.methods.clear()
        first = self.first_block()
        if is_sharded(first):
            self.by_block = self.in_pieces = True
        if self.by_block and first is not None and CONVERTED not in vars(first):
            self.capture_blocks(model)

    def capture_blocks(self, model: nn.Module, one_by_one: bool = True) -> None:
        """Capture the blocks of `model` one by one, or the whole of it."""
        self.by_block = one_by_one
        for block in blocks(model):
            if one_by_one:
                _enter(block, Place(self, Role.BLOCK))
            else:
                _leave(block)

    def divide(self, parallel: Parallel | None) -> None:
        """Run on shards of the parameters from now on, or, with None, on whole ones."""
        self.parallel = parallel
        self.release()
        self.graphs.clear()
        self.apart.clear()

    def release(self) -> None:
        """Free what was compiled and recorded, whoever still holds the graphs: dynamo may."""
        self.runs.clear()
        for graph in self.graphs:
            graph.compiled = None

    def lay_again(self, model: nn.Module) -> None:
        """Lay parameters next to each other that had to be copied, those that are the model's own: FSDP's
        stand-ins are not, whose memory it frees."""
        groups = {tuple(r() for r in group) for group in self.apart}
        own = {id(local(parameter)) for parameter in model.parameters()}
        self.apart.clear()
        for group in groups:
            if all(id(tensor) in own for tensor in group):
                lay(group)

    def __deepcopy__(self, memo: dict) -> Converted:
        twin = memo[id(self)] = Converted(self.options, self.by_block, self.checker, report=self.report)
        twin.parallel = copy.deepcopy(self.parallel, memo)
        twin.precision, twin.whole = copy.deepcopy(self.precision, memo), self._no_graphs()
        return twin

    def __reduce__(self) -> tuple:
        held = self.options, self.by_block, self.checker, self.report, self.precision
        if self.parallel is not None:
            return self.parallel.__reduce__()
        return _restored, (*held, self._no_graphs())

    def _no_graphs(self) -> list[CapturedGraph] | None:
        """What a copy has of the first call of the whole, which it captures itself."""
        return None if self.whole is None else []


def _restored(
    options: Options,
    by_block: bool,
    checker: Checker | None,
    report: Any,
    precision: Precision | None,
    whole: list[CapturedGraph] | None,
) -> Converted:
    return Converted(options, by_block, checker, report=report, precision=precision, whole=whole)


class _OnStandIns(Exception):
    """Ends a call of a divided model that is going to be made again: FP8 would note what stand-ins give."""


class Role(Enum):
    """What a module of a converted model is that is captured for itself.

    A part holds blocks and is captured where it is called by itself: an encoder by generate(), a backbone by
    the trainers of TRL. A block is captured where blocks are captured one by one.
    """

    MODEL, PART, BLOCK = range(3)


@dataclass(eq=False)
class Place:
    """What a module of a converted model knows of it."""

    converted: Converted
    role: Role

    @property
    def is_root(self) -> bool:
        """Whether it is the model itself."""
        return self.role is Role.MODEL


def _is_decoding(args: tuple, kwargs: dict) -> bool:
    """Whether this is a step of a generation: one token of each sequence, without gradients."""
    if torch.is_grad_enabled():
        return False
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    first = given[0] if given else None
    return first is not None and (
        first.shape[1:] == (1,) if not first.is_floating_point() else first.dim() == 3 and first.shape[1] == 1
    )


def _is_evaluated(module: nn.Module) -> bool:
    """Whether it is called in evaluation, and nothing of it is trained."""
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
    return not module.training and not trains


def _has_layers_evaluated_whole(captured: fx.GraphModule) -> bool:
    """Whether layers of nn.TransformerEncoder are evaluated by a kernel of PyTorch's own."""
    return any(node.target is torch._transformer_encoder_layer_fwd for node in captured.graph.nodes)


def _makes_nested_tensors(module: nn.Module) -> bool:
    """Whether it is an nn.TransformerEncoder that makes a nested tensor of padded inputs."""
    return isinstance(module, nn.TransformerEncoder) and bool(getattr(module, "use_nested_tensor", False))


def _has_static_cache(args: tuple, kwargs: dict) -> bool:
    """Whether there is a cache of keys and values that does not grow, by what transformers calls it."""
    return any(getattr(value, "is_compileable", False) is True for value in (*args, *kwargs.values()))


def enter(model: nn.Module, converted: Converted) -> None:
    """Let `model`, its parts, or its blocks, run their captured forward."""
    _enter(model, Place(converted, Role.MODEL))
    for part in parts(model):
        with suppress(ModelError):  # it runs as it is where it is called by itself
            _enter(part, Place(converted, Role.PART))
    if converted.by_block:
        converted.capture_blocks(model)


def _enter(module: nn.Module, place: Place) -> None:
    module.__dict__[CONVERTED] = place
    module.__class__ = captured_class(type(module))


def leave(model: nn.Module) -> None:
    """Give every module in `model` its own class and forward back; nothing else was ever changed."""
    if (converted := converted_of(model)) is not None:
        converted.release()
        if converted.parallel is not None:
            converted.parallel.collect()
            converted.parallel = None
    for module in model.modules():
        _leave(module)
    for parameter in model.parameters():
        parameter.__dict__.pop(CONVERTED, None)


def _leave(module: nn.Module) -> None:
    module.__dict__.pop(CONVERTED, None)
    _give_class_back(module)


def _give_class_back(module: nn.Module) -> None:
    module.__class__ = _ORIGINALS.get(type(module), type(module))


def is_divided(model: nn.Module) -> bool:
    """Whether te_transform.parallelize() has divided it, or a part of it, among ranks."""
    states = map(converted_of, model.modules())
    return any(state.parallel is not None for state in states if state is not None)


def converted_of(model: nn.Module) -> Converted | None:
    """What a model carries that was converted, None where it was not."""
    place = vars(model).get(CONVERTED)
    return place.converted if place is not None else None


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Let every module in `model` be of its own class, whose forward is the user's."""
    found = [(module, type(module)) for module in model.modules() if type(module) in _ORIGINALS]
    give_classes_back(model)
    try:
        yield
    finally:
        for module, kind in found:
            module.__class__ = kind


def give_classes_back(model: nn.Module) -> None:
    """Let every module in `model` be of its own class: it runs as it is, and still has its report."""
    for module in model.modules():
        _give_class_back(module)


@contextmanager
def original_forward(model: nn.Module) -> Iterator[None]:
    """Let all converted models in `model` run the user's own code."""
    found = {id(c): c for c in map(converted_of, model.modules()) if c is not None}.values()
    before = [(converted, converted.original) for converted in found]
    try:
        for converted in found:
            converted.original = True
        yield
    finally:
        for converted, was in before:
            converted.original = was


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: what stands in the outermost lists of modules of one class."""
    return [*{id(block): block for block in _blocks(model).values()}.values()]


def is_deep(model: nn.Module) -> bool:
    """Whether it is planned and checked block by block."""
    return len(blocks(model)) > DEEP


def parts(model: nn.Module) -> list[nn.Module]:
    """What holds the layers, and what holds that: a backbone, an encoder and a decoder; not the model."""
    found: dict[int, nn.Module] = {}
    for path in _blocks(model):
        names = path.split(".")[:-1]
        holders = (model.get_submodule(".".join(names[:last])) for last in range(1, len(names)))
        found |= {id(holder): holder for holder in holders}
    return [part for part in found.values() if type(part).forward is not nn.Module.forward]


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The layers by their names; a list in a list is none, and neither is what it holds: nobody calls it."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList) and not inside:
            layers = [layer for layer in module if layer is not None]  # a list may have places left empty
            alike = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
            if alike and any(True for _ in layers[0].children()):
                found |= {f"{path}.{name}": child for name, child in module.named_children()}
    return {path: block for path, block in found.items() if type(block).forward is not nn.Module.forward}


def _own_classes(model: nn.Module) -> set[type]:
    return {_ORIGINALS.get(type(module), type(module)) for module in model.modules()}


def _methods_called(kind: type) -> tuple:
    """What calls of the modules of a class go through; a forward that is another object each time it is asked
    for, as a descriptor makes it, tells nothing."""
    forward = kind.forward if kind.forward is kind.forward else None
    return kind.__call__, kind._call_impl, forward


def _why_uncaptured(captured: fx.GraphModule) -> str | None:
    """Why a graph would compute something else than the forward, None where it does not."""
    if functions.write_to_what_they_are_given(captured):
        return _WRITES
    name = replaced_function(captured.graph)
    return None if name is None else _REPLACED.format(name)


def has_checkpoints(captured: fx.GraphModule) -> bool:
    """Whether activation checkpointing is on inside a graph: what is recomputed is a graph of its own in
    there."""
    return any("checkpoint" in called(node) for node in captured.graph.nodes if node.op == "call_function")


@torch._dynamo.assume_constant_result  # dynamo calls it while tracing, and no call of it is in the graph
def _tell_compilers() -> bool:
    # where dynamo gives up on a forward it traces what that calls: is_compiling_here() is true there
    traced = CompileContext.try_get() is not None
    if traced and not is_our_capture() and not torch.compiler.is_exporting():
        log.warning(
            "a converted model is compiled from outside, which compiles the user's own forward: to compile "
            "what te_transform made of it, pass compile=True to te_transform.convert()"
        )
    return True


skip_code(_tell_compilers.__code__)  # and what it asks is no part of the user's forward

_CLASSES: dict[type, type] = {}
_ORIGINALS: dict[type, type] = {}


def captured_class(kind: type) -> type:
    """A subclass of `kind` of the same name, whose forward is the captured one; there is one for each class,
    so that its code is captured once for all instances.

    Raises:
        ModelError: the class takes no subclass.
    """
    if kind in _ORIGINALS:
        return kind
    if kind not in _CLASSES:
        named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
        try:
            made = type(kind.__name__, (kind,), {**_methods(kind), "__reduce_ex__": _reduce, **named})
        except Exception as error:  # of a metaclass, or of the __init_subclass__ of a registry
            raise ModelError(
                f"{kind.__name__} refuses to be subclassed, a converted model is an instance of a subclass "
                f"of its class ({error}): convert a model that holds it, or let the class be derived from"
            ) from error
        _CLASSES[kind], _ORIGINALS[made] = made, kind
    return _CLASSES[kind]


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """What a module of a converted model does otherwise than one of `kind`."""
    is_plain = isinstance(inspect.getattr_static(kind, "forward"), (FunctionType, functools.partialmethod))

    def bound(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A forward that is a property, or another descriptor, as the class binds it to this module."""
        return super(captured_class(kind), self).forward(*args, **kwargs)

    @functools.wraps(kind.forward if is_plain else bound)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = kind.forward if is_plain else bound
        # dynamo does not guard hooks for all modules
        if is_capturing() or _has_any_global_hook() or (place := self.__dict__.get(CONVERTED)) is None:
            if is_compiling_here():
                _tell_compilers()
            return own(self, *args, **kwargs)
        return place.converted.call(place, own, self, args, kwargs)

    @functools.wraps(kind.train)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        place = self.__dict__.get(CONVERTED)
        if place is not None and place.is_root and place.converted.precision is not None:
            place.converted.precision.forget(self)
        return kind.train(self, mode)

    return {"forward": forward, "train": train}


def _reduce(self: nn.Module, protocol: int) -> Any:
    """As the class's own, but for the class, which a pickle finds by the name of the one it was made of.

    What a `__reduce__` of the user's own says is handed on: it makes what it says, of the user's class.
    """
    kind = next(base for base in type(self).__mro__ if base in _ORIGINALS)
    reduced = super(kind, self).__reduce_ex__(max(protocol, 2))
    if not isinstance(reduced, tuple) or reduced[1][:1] != (type(self),):
        return reduced
    make, (_, *args), *rest = reduced
    return (_made_again, (make, _ORIGINALS[type(self)], *args), *rest)


def _made_again(make: Callable[..., nn.Module], kind: type, *args: Any) -> nn.Module:
    return make(captured_class(kind), *args)
