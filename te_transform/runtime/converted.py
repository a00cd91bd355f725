"""The converted model: what it carries beside its own, and how its calls run.

This and classes.py, which swaps its class for one whose forward is the captured one, are the only files that
touch the user's model, but for parallel.py, which puts DTensors in the places of the parameters where that
was asked for. Its modules, parameters and attributes stay as they are.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C import _disabled_torch_function_impl
from torch._dynamo.exc import SkipFrame
from torch.utils._pytree import tree_leaves

from te_transform.backends import gradients
from te_transform.backends.collectives import Ranks
from te_transform.backends.joined import held_elsewhere, lay, local
from te_transform.backends.scale_rows import keep_scales
from te_transform.backends.storages import sole_owners_needed
from te_transform.backends.tracing import in_backward
from te_transform.canonicalize import functions
from te_transform.graph.bound import bind
from te_transform.graph.capture import capture, code_of
from te_transform.graph.names import name_as_in
from te_transform.graph.nodes import called, replaced_function
from te_transform.graph.preserve import preserved
from te_transform.plan.assign import put_in_recipe
from te_transform.plan.match import Site, plan
from te_transform.plan.model import CONVERTED, ModelError, is_sharded
from te_transform.plan.options import Options
from te_transform.runtime.block_calls import BlockCalls
from te_transform.runtime.blocks import are_held_by_parts, blocks, parts, skipped_inside
from te_transform.runtime.captured import CapturedGraph, Observer
from te_transform.runtime.classes import Place, Role, own_class, parts_stay_out, restore_class, swap_class
from te_transform.runtime.layered import LayerPolicy, LayersNow
from te_transform.runtime.lower import Apart
from te_transform.runtime.modes import is_dispatch_mode_on, is_foreign_mode_on, set_aside
from te_transform.runtime.parallel import Parallel, ParallelError
from te_transform.runtime.precision import Precision
from te_transform.runtime.trials import Trial, Trials

log = logging.getLogger(__name__)

_RECOMPUTES = (
    "activation checkpoints are on in the forward and the model has no list of blocks to capture one by one: "
    "in that mode it runs as the user's own code"
)

_RECOMPUTES_INSIDE = (
    "activation checkpoints are on inside blocks, which are captured one by one: in that mode these run as "
    "the user's own code"
)

_WRITES = (
    "an autograd.Function in the forward writes in place to its argument, whose gradients dynamo captures as "
    "if it had not: it runs as the user's own code"
)

_REPLACED = (
    "somebody has replaced PyTorch's {} by another function, which PyTorch itself would call where it traces "
    "the one that the forward calls: what calls it runs as the user's own code"
)

_NESTS = (
    "nn.TransformerEncoder leaves out what is padded and hands back zeros there, but not where it is traced: "
    "evaluation runs as the user's own code"
)

_OVERRIDES = (
    "a {} is given, a tensor whose class sees each call of PyTorch's functions by a __torch_function__ of "
    "its own, of which dynamo captures some calls and not others: such calls run as the user's own code"
)

_GATHERED = (
    "fully_shard() gathers the parameters of a divided model anew for each call, CUDA graphs need them where "
    "they were: graphs run without CUDA graphs"
)

_calling: ContextVar[bool] = ContextVar("_calling", default=False)  # in a call of a converted model

# the path of the module whose call runs in training, None out of such calls; see layered.py
_trained: ContextVar[str | None] = ContextVar("_trained", default=None)

_Mode = tuple[type, bool, bool]  # a class, whether it trains, and whether gradients are recorded
Checker = Callable[[CapturedGraph, Sequence[Any]], dict[Site, str]]


@dataclass(eq=False)
class Converted:
    """What a converted model carries beside its own: one for the model and all its captured blocks.

    `original` runs the user's own code for as long as it is set; `checker` finds the wrong sites of a graph;
    `apart` and `observer` are for its graphs, see captured.py.
    """

    options: Options
    checker: Checker | None = None
    by_block: bool = False  # True if FSDP or checkpoints cut the forward: blocks are captured one by one
    is_around: bool = False  # whether what is around the blocks then, a head and a loss, is captured as well
    recomputes: set[_Mode] = field(default_factory=set)  # with checkpoints in what is captured as one
    nests: bool = False  # whether it makes nested tensors in evaluation where it is not traced
    entered: bool = False  # whether a call has come through the model's own forward, not its parts' alone
    leaving: set[type] = field(default_factory=set)  # the classes whose forward runs as it is in this call
    uncut: set[type] = field(default_factory=set)  # those of them that will in all calls of that mode
    # weak references to the model and its first block; None where nobody has looked yet
    model: Callable[[], nn.Module | None] | None = None
    first_block: Callable[[], nn.Module | None] | None = None
    graphs: list[CapturedGraph] = field(default_factory=list)
    apart: Apart = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # sentences: what runs as it was captured
    reasons: dict[str, None] = field(default_factory=dict)  # dynamo's, of what it did not capture
    observer: Observer | None = None
    original: bool = False
    report: Any = None  # of the room to the right
    # graphs of the next call, [] until then, if the report has to be made of that call; else None
    whole: list[CapturedGraph] | None = None
    precision: Precision | None = None
    parallel: Parallel | None = None
    uncaptured: set[type] = field(default_factory=set)  # of a divided model: dynamo gave up on their code
    runs: dict[type, Callable[..., Any]] = field(default_factory=dict)  # the captured forwards, by class
    trials: Trials = field(default_factory=Trials)
    layers: LayerPolicy | None = None  # decides on the layers of training calls; None if all of them run
    paths: dict[int, str] = field(default_factory=dict)  # of the model's modules by their ids, for `layers`
    names: dict[int, str] = field(default_factory=dict)  # of its parameters by their ids, for `layers`
    block_calls: BlockCalls = field(default_factory=BlockCalls)
    methods: dict[type, tuple] = field(default_factory=dict)  # what calls of the classes went through

    def backend(
        self, captured: fx.GraphModule, example_inputs: list[Any], kind: type = nn.Module
    ) -> Callable[..., Any]:
        """Rewrite one graph of the forward of `kind`, for dynamo; whatever fails in here, the graph runs as
        it was captured."""
        bind(captured)
        model = self.model and self.model()
        if has_checkpoints(captured):
            # run as an operation of a graph, a checkpoint would draw other random numbers when it is
            # repeated: the user's own code runs, in which the blocks are captured if there are any
            self.leaving.add(kind)
            found = [] if model is None else blocks(model)
            is_block = any(type(block) is kind for block in found)
            why = _RECOMPUTES_INSIDE if is_block else _RECOMPUTES
            if is_block or not found:
                self.uncut.add(kind)
                self.tell(why)
            elif self.is_around:  # a checkpoint is around a head too, which runs as the user's own code then
                self.is_around = False
            else:
                self.capture_blocks(model)
            raise SkipFrame(why)
        if (why := _why_uncaptured(captured)) is not None:
            self.tell(why)
            raise SkipFrame(why)
        if _has_layers_evaluated_whole(captured) and any(map(_makes_nested_tensors, self._modules())):
            self.leaving.add(kind)
            self.nests = True
            self.tell(_NESTS)
            raise SkipFrame(_NESTS)
        if model is not None:
            self.methods |= {kind: _methods_called(kind) for kind in _own_classes(model)}
        root = None if model is None else name_as_in(model, captured, example_inputs)
        fuse = partial(self._fused, modules=("",) if root is None else _sharing(model, root))
        return fuse(captured) if self.parallel is None else self.parallel.graph(captured, fuse)

    def _fused(self, captured: fx.GraphModule, modules: tuple[str, ...] = ("",)) -> Callable[..., Any]:
        try:
            self._choose_backend()
            made = plan(captured, self.options, modules)
            if self.options.recipe is not None:
                put_in_recipe(made, self.options)
            graph = CapturedGraph(made, self)
        except Exception as error:
            log.warning("a graph of the model runs as it was captured", exc_info=error)
            self.failures.append(f"{type(error).__name__}: {error}")
            return captured.forward
        self.graphs.append(graph)
        held = weakref.ref(graph)  # dynamo lets go of nothing that it was ever given
        # nor does it always ask whose it was: where it makes no new graphs, any that fits the call is called
        alone = code_of(captured)
        return lambda *arguments: (held() or alone)(*arguments)

    def _choose_backend(self) -> None:
        """Take the backend that "auto" is for the model as it is now: Trainer and accelerate move to the GPU
        what was converted before. The report is then of what runs, of the first call from here on."""
        model = self.model and self.model()
        if model is None or self.parallel is not None:
            return
        options = self.options.now(model)
        if options is self.options:
            return
        self.options, self.whole = options, []

    def options_now(self) -> Options:
        """The options, without CUDA graphs where fully_shard() divides a divided model's parameters again: it
        gathers them elsewhere in each call, on each rank by itself."""
        if self.parallel is None or not self.options.graphs:
            return self.options
        first = self.first_block and self.first_block()
        if not any(map(is_sharded, (self.model and self.model(), first))):
            return self.options
        self.tell(_GATHERED)
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
        trained = None if self.layers is None else self._trained_path(place, module)
        token, before, trained_token = _calling.set(True), len(self.graphs), _trained.set(trained)
        try:
            out = self._call(place, forward, module, args, kwargs)
        finally:
            _calling.reset(token)
            _trained.reset(trained_token)
        if trained is not None and place.role is Role.BLOCK:
            self.block_calls.learn(module, args, kwargs, out)
        if place.is_root and self.whole == []:
            self.whole = self.graphs[before:]
        return out

    def decide_on_layers(self, model: nn.Module, policy: LayerPolicy | None) -> None:
        """Ask `policy` about the layers of the model's training calls from now on; None runs all of them."""
        self.layers, self.block_calls = policy, BlockCalls()
        is_asked = policy is not None
        self.paths = {id(module): path for path, module in model.named_modules() if is_asked}
        named = model.named_parameters(remove_duplicate=False)
        self.names = {id(parameter): name for name, parameter in named if is_asked}
        for block in blocks(model) if self.by_block else ():
            self._intercept(block)

    def _intercept(self, block: nn.Module) -> None:
        """Send calls of a block, hooks included, through _call_block() while there is a policy."""
        own = vars(block).get("_compiled_call_impl")
        if self.layers is not None and own is None:
            block._compiled_call_impl = partial(self._call_block, block)
        elif self.layers is None and getattr(own, "func", None) == self._call_block:
            block._compiled_call_impl = None

    def _call_block(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block, or leave it out if the step drops it and FSDP would gather its parameters."""
        place = vars(block).get(CONVERTED)
        path = None if place is None or not is_sharded(block) else self._trained_path(place, block)
        policy = self.layers if path is not None and self.layers is not None and self.layers.is_on() else None
        is_dropped = policy is not None and policy.factor(path) is None
        if is_dropped and (passed := self.block_calls.passed(block, args, kwargs)) is not None:
            if self.precision is not None:
                keep_scales(block.parameters())
            return passed[0]
        return block._call_impl(*args, **kwargs)

    def layers_now(self) -> LayersNow | None:
        """Return what decides on the layers of this call, or None if all of them run as captured."""
        path = _trained.get()
        if self.layers is None or path is None or not self.layers.is_on():
            return None
        return LayersNow(self.layers, path, self.names)

    def _trained_path(self, place: Place, module: nn.Module) -> str | None:
        """Return the path of a module that is called in training, else None.

        A block in a call of the model trains if the model does: a reentrant checkpoint calls it without
        gradients.
        """
        if place.role is Role.BLOCK and _calling.get():
            is_trained = _trained.get() is not None
        else:
            is_trained = module.training and torch.is_grad_enabled()
        return self.paths.get(id(module)) if is_trained else None

    def _call(
        self, place: Place, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        is_own = self._runs_as_it_is(module, args, kwargs)
        trial = None if is_own else self._trial(place, module, args, kwargs)
        chosen = None if trial is None else self.trials.choice(trial)
        if is_own or chosen:
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
            if self.by_block and not is_block and not self._runs_around(place):
                with self._with_whole_parameters(module, but_blocks=True):
                    return forward(module, *args, **kwargs)
            if trial is None or chosen is not None:
                return self._run_captured(place, forward, module, args, kwargs)
            return self.trials.run(
                trial,
                partial(forward, module, *args, **kwargs),
                partial(self._run_captured, place, forward, module, args, kwargs),
                self.graphs,
            )

    def _trial(self, place: Place, module: nn.Module, args: tuple, kwargs: dict) -> Trial | None:
        """What tells whether a call of the model runs the user's own code; None where it does not."""
        options = self.options
        if not place.is_root or options.recipe is not None or options.compile or options.graphs:
            return None
        if self.by_block or self.parallel is not None or self.observer is not None:
            return None
        if self.layers_now() is not None:  # which the user's own code knows nothing of
            return None
        if options.backend.recipe_now() is not None:  # the user's own, for which products run in FP8
            return None
        return self.trials.of(module, args, kwargs)

    def _run_captured(
        self, place: Place, forward: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """A call in which dynamo captures the forward, or finds the graphs that it has."""
        kind, is_around = type(module), self._runs_around(place)
        run = self._captured(kind, forward, is_around)
        run.turned_off = False
        self.uncut.discard(kind)  # of a call that has raised
        try:
            with parts_stay_out(is_around), set_aside(), self._with_stand_ins(module), suppress(_OnStandIns):
                out = run(module, *args, **kwargs)
            if kind in self.uncut:
                self.recomputes.add(_mode(module))
            if self.parallel is not None and (run.turned_off or kind in self.leaving):
                # a part of its code ran on stand-ins; blocks are captured by now, if there are any
                self.leaving.discard(kind)
                self.uncaptured |= {kind} if run.turned_off else set()
                with self._with_whole_parameters(module, but_blocks=self.by_block):
                    out = forward(module, *args, **kwargs)
            return out
        except Exception as error:
            if run.turned_off:  # a call that the model does not take: begin anew with the next one
                self.runs.pop(kind, None)
            if self.parallel is None and _may_fail_again(error, module, (args, kwargs)):
                with preserved(module):
                    forward(module, *args, **kwargs)  # raises what the caller may expect
                    raise
            raise
        finally:
            if self.nests and kind in self.leaving:  # training is captured still
                self.runs.pop(kind, None)
            self.leaving.discard(kind)

    def _runs_around(self, place: Place) -> bool:
        """Whether this is a call of the model of which what is around its blocks is captured."""
        return self.is_around and place.is_root and self.parallel is None

    def _captured(
        self, kind: type, forward: Callable[..., Any], is_around: bool = False
    ) -> Callable[..., Any]:
        """The forward of a class, which is captured in its calls; of what is around blocks, parts end the
        graphs, which is no reason that anybody is told."""
        if kind not in self.runs:
            held = weakref.ref(self)  # see _fused()
            dynamic = None if self.parallel is None else False  # shards are of sizes that are known
            self.runs[kind] = capture(
                forward,
                lambda captured, inputs: held().backend(captured, inputs, kind),
                lambda: kind in held().leaving,
                dynamic,
                None if is_around else self.reasons,
                # a divided model would run the user's code on stand-ins first
                None if self.parallel is not None else lambda why: held().tell(why),
            )
        return self.runs[kind]

    def tell(self, why: str) -> None:
        """Add a sentence to the report, once."""
        if why not in self.failures:
            self.failures.append(why)

    def _runs_as_it_is(self, module: nn.Module, args: tuple, kwargs: dict) -> bool:
        """Whether a call runs the user's own code."""
        idle = self.original or self.options.as_it_is or is_foreign_mode_on()
        idle = idle or _has_no_strides(args, kwargs) or self._decodes(args, kwargs)
        idle = idle or self._is_overridden(args, kwargs)
        idle = idle or type(module) in self.uncaptured or (self.nests and _is_evaluated(module))
        return idle or _mode(module) in self.recomputes

    def _is_overridden(self, args: tuple, kwargs: dict) -> bool:
        """Whether tensors are given whose class changes what PyTorch's functions do."""
        kinds = (type(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        found = next((kind for kind in kinds if kind is not Tensor and _overrides(kind)), None)
        if found is None:
            return False
        why = _OVERRIDES.format(found.__name__)
        self.tell(why)
        return True

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
        if torch.is_grad_enabled() and _mode(module) in self.recomputes:
            raise ParallelError(
                "activation checkpoints are on in a model that is divided among ranks, inside its blocks or "
                "without a list of blocks to capture one by one, a forward without them is needed: turn them "
                "off, or have whole blocks repeated"
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
            self.by_block = True
        if self.by_block and first is not None and CONVERTED not in vars(first):
            self.capture_blocks(model)

    def capture_blocks(self, model: nn.Module) -> None:
        """Capture the blocks of `model` one by one from now on."""
        was_around, self.by_block = self.is_around, True
        self.is_around = are_held_by_parts(model)
        if self.is_around != was_around:  # what was captured has the parts in it, or has not
            self.runs.pop(type(model), None)
        skipped = skipped_inside(model, self.options.skip)
        for block in blocks(model):
            swap_class(block, Place(self, Role.BLOCK, skipped.get(id(block), frozenset())))
            self._intercept(block)

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
            graph.release()

    def lay_again(self, model: nn.Module) -> None:
        """Lay parameters next to each other that had to be copied, those that are the model's own: FSDP's
        stand-ins are not, whose memory it frees."""
        groups = {tuple(r() for r in group) for group in self.apart}
        own = {id(local(parameter)) for parameter in model.parameters()}
        self.apart.clear()
        own_groups = [group for group in groups if all(id(tensor) in own for tensor in group)]
        self.note_scattered(model, [group for group in own_groups if not lay(group)])

    def note_scattered(self, model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> None:
        """Tell the report which parameters are joined by a copy in each call because their memory is held."""
        held = {id(tensor) for group in groups for tensor in held_elsewhere(group)}
        names = [name for name, parameter in model.named_parameters() if id(local(parameter)) in held]
        if names:
            self.tell(sole_owners_needed(names))

    def __deepcopy__(self, memo: dict) -> Converted:
        twin = memo[id(self)] = Converted(self.options, self.checker, self.by_block)
        twin.is_around, twin.report = self.is_around, self.report
        twin.parallel = copy.deepcopy(self.parallel, memo)
        twin.precision, twin.whole = copy.deepcopy(self.precision, memo), self._no_graphs()
        return twin

    def __reduce__(self) -> tuple:
        cuts = self.by_block, self.is_around
        held = self.options, cuts, self.checker, self.report, self.precision
        if self.parallel is not None:
            return self.parallel.__reduce__()
        return _restored, (*held, self._no_graphs())

    def _no_graphs(self) -> list[CapturedGraph] | None:
        """Return [] if a copy has to make its report of its own next call, else None."""
        return None if self.whole is None else []


def _restored(
    options: Options,
    cuts: tuple[bool, bool],
    checker: Checker | None,
    report: Any,
    precision: Precision | None,
    whole: list[CapturedGraph] | None,
) -> Converted:
    made = Converted(options, checker, *cuts, report=report, precision=precision)
    made.whole = whole
    return made


class _OnStandIns(Exception):
    """Ends a call of a divided model that is going to be made again: FP8 would note what stand-ins give."""


def _has_no_strides(args: tuple, kwargs: dict) -> bool:
    """Whether nested tensors of the older kind are given, which have neither sizes nor strides: dynamo's
    guards ask for them, and end the process."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return any(value.is_nested and value.layout is torch.strided for value in given)


def _overrides(kind: type[Tensor]) -> bool:
    """Whether a class of tensors has a __torch_function__ of its own, and is neither PyTorch's nor made of
    tensors, as compilers know how to take them apart."""
    own = kind.__torch_function__
    usual = Tensor.__torch_function__.__func__, _disabled_torch_function_impl
    is_known = kind.__module__.startswith("torch.") or hasattr(kind, "__tensor_flatten__")
    return not is_known and getattr(own, "__func__", own) not in usual


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
    swap_class(model, Place(converted, Role.MODEL))
    for part in parts(model):
        with suppress(ModelError):  # it runs as it is where it is called by itself
            swap_class(part, Place(converted, Role.PART))


def leave(model: nn.Module) -> None:
    """Give every module in `model` its own class and forward back; nothing else was ever changed."""
    if (converted := converted_of(model)) is not None:
        converted.release()
        if converted.parallel is not None:
            converted.parallel.collect()
            converted.parallel = None
    for module in model.modules():
        restore_class(module)
    for parameter in model.parameters():
        parameter.__dict__.pop(CONVERTED, None)


def is_divided(model: nn.Module) -> bool:
    """Whether te_transform.parallelize() has divided it, or a part of it, among ranks."""
    states = map(converted_of, model.modules())
    return any(state.parallel is not None for state in states if state is not None)


def converted_of(model: nn.Module) -> Converted | None:
    """What a model carries that was converted, None where it was not."""
    place = vars(model).get(CONVERTED)
    return place.converted if place is not None else None


def all_layers(model: nn.Module) -> AbstractContextManager[None]:
    """Run all layers of the converted models in `model`, whatever decides on them."""
    return _with_setting(model, "layers", None)


def original_forward(model: nn.Module) -> AbstractContextManager[None]:
    """Run the user's own code of all converted models in `model`."""
    return _with_setting(model, "original", True)


@contextmanager
def _with_setting(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all converted models in `model`, and put it back."""
    found = {id(c): c for c in map(converted_of, model.modules()) if c is not None}.values()
    before = [(converted, getattr(converted, name)) for converted in found]
    try:
        for converted in found:
            setattr(converted, name, value)
        yield
    finally:
        for converted, held in before:
            setattr(converted, name, held)


def _mode(module: nn.Module) -> _Mode:
    return type(module), module.training, torch.is_grad_enabled()


def _sharing(model: nn.Module, root: nn.Module) -> tuple[str, ...]:
    """The paths of the modules that run a graph of the forward of one of them, its own first."""
    if root is model:
        return ("",)
    alike = [(path, module) for path, module in model.named_modules() if type(module) is type(root)]
    return tuple(path for path, module in sorted(alike, key=lambda found: found[1] is not root))


def _own_classes(model: nn.Module) -> set[type]:
    return {own_class(module) for module in model.modules()}


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


def _may_fail_again(error: Exception, module: nn.Module, given: Any) -> bool:
    """Return True if the user's own code may be run once more, to raise its own error.

    A compiled graph raises a RuntimeError for an id out of range, and a captured one may leave out a check of
    the user's code. On a GPU errors come later, other ranks would wait for the collectives of this one, and
    an argument that the forward changes, as a cache, would be changed twice.
    """
    first = next(module.parameters(), None)
    on_cpu = first is None or first.device.type == "cpu"
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    is_plain = all(isinstance(held, (Tensor, int, float, str, NoneType)) for held in tree_leaves(given))
    return isinstance(error, RuntimeError) and on_cpu and alone and is_plain and not in_backward()
