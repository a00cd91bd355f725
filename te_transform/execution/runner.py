"""The runner of a converted model, which the forward of its class calls.

Only this file, attach.py and classes.py touch the user's model. The exceptions are parallel/ and
fp8_only/, which replace parameters on request. The model's modules, parameters and attributes do not
change.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import SkipFrame
from torch.utils._pytree import tree_leaves

from te_transform.backends.fp8 import gradient_sums
from te_transform.backends.fp8.precision import Precision
from te_transform.backends.tracing import of_checkpoint, saving_hooks
from te_transform.execution.blocks import blocks, skipped_inside
from te_transform.execution.call_context import ModuleCall
from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.execution.captures import Captures, Checker
from te_transform.execution.classes import ModuleRole, Role, parts_end_graphs, swap_class
from te_transform.execution.division import Division, RankGroup
from te_transform.execution.executors.user_code import UserCode
from te_transform.execution.extension import Extension
from te_transform.execution.gathered import run_gathered
from te_transform.execution.lower import ScatteredGroups
from te_transform.execution.material import ReportMaterial
from te_transform.execution.model_ref import ModelRef, held_groups_told
from te_transform.execution.modes import NOTHING, is_dispatch_mode_on, set_aside
from te_transform.execution.policy import (
    CHECKPOINTED,
    CapturePolicy,
    Cut,
    has_checkpoints,
    has_layers_evaluated_whole,
    makes_nested_tensors,
    why_uncaptured,
)
from te_transform.graph.bound import bind
from te_transform.graph.capture import capture, code_of
from te_transform.graph.errors import in_full
from te_transform.graph.names import name_as_in
from te_transform.graph.preserve import preserved, preserving
from te_transform.plan.assign import put_in_recipe
from te_transform.plan.match import Site, plan
from te_transform.plan.model import CONVERTED
from te_transform.plan.options import Options

log = logging.getLogger(__name__)

_GATHERED = (
    "fully_shard() gathers the parameters of a divided model to new addresses in each call, but CUDA graphs "
    "need the recorded addresses: graphs run without CUDA graphs"
)

_calling: ContextVar[ModuleCall | None] = ContextVar("_calling", default=None)  # the innermost call


class Runner:
    """The runner of the calls of one converted model, and of all its captured blocks.

    Attributes:
        options: of the conversion.
        model_ref: a weak reference to the model.
        policy: chooses the units that are captured, and the calls that run the user's own code.
        user_code: the executor of the user's own code.
        captures: the captured forwards.
        material: for the report.
        observer: observes the calls of graphs, or None.
        precision: the FP8 recipe of the model, or None.
        division: of the parameters among ranks, or None.
        extension: changes calls from outside of the core, or None.
    """

    def __init__(
        self,
        options: Options,
        checker: Checker | None = None,
        policy: CapturePolicy | None = None,
        material: ReportMaterial | None = None,
    ):
        self.options, self.model_ref, self.policy = options, ModelRef(), policy or CapturePolicy()
        self.material = material or ReportMaterial()
        self.user_code = UserCode(self.policy, self.material)
        self.captures = Captures(checker)
        self.observer: Observer | None = None
        self.precision: Precision | None = None
        self.division: Division | None = None
        self.extension: Extension | None = None

    # the path of a call

    def call(
        self, role: ModuleRole, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Run a call of the model, a part or a block. `forward` is the forward of the user's class."""
        if role.kind is Role.PART and _calling.get() is not None:
            questions, by_block = self.user_code.questions, self.policy.by_block
            with questions.answered(module, args, kwargs) if by_block else NOTHING:
                return forward(module, *args, **kwargs)
        call = ModuleCall(role, module, forward, args, kwargs, self.options, self.division)
        run = self._run_root if call.is_root else self._run
        if call.is_block and self.options.recipe is not None:
            run = partial(run_gathered, run=self._run, tell=self.tell)
        extension = self.extension
        token = _calling.set(call)
        try:
            return run(call) if extension is None else extension.run(call, run)
        finally:
            _calling.reset(token)

    def _run_root(self, call: ModuleCall) -> Any:
        """Run a call of the model itself, and note the graphs that it captures."""
        material, before = self.material, len(self.graphs)
        material.was_called = True
        out = self._run(call)
        if material.next_call == []:
            material.next_call = self.graphs[before:]
        return out

    def _run(self, call: ModuleCall) -> Any:
        """Run the user's own code or captured graphs."""
        user_code = self.user_code
        why = user_code.needed(call)
        if why is None and call.is_root and self._may_time():
            why = user_code.faster(call)
        if why is not None:
            user_code.count(call, why)
            return user_code.run(call, but_blocks=self.policy.by_block and not call.is_block)
        if call.is_block:
            call.role.has_run |= not call.in_backward
            if self.division is not None and self.policy.skip_this_call:
                raise _OnStandIns
            return self._run_captured(call)
        # a copy has no reference to its model if only its parts are called
        model = call.module if call.is_root else self.model_ref.model
        if model is not None:
            self._settle(model)
        with NOTHING if self.precision is None or model is None else self.precision.running(model):
            if self.policy.by_block and not self._is_around(call):
                return user_code.run(call, but_blocks=True)
            if call.trial is None:
                return self._run_captured(call)
            captured = partial(self._run_captured, call)
            return user_code.trials.run(call.trial, call.run_original, captured, self.graphs)

    def _may_time(self) -> bool:
        """Return True if the user's own code computes the same as the graphs, and may be faster."""
        options = self.options
        if options.recipe is not None or options.compile or options.graphs:
            return False
        if self.policy.by_block or self.division is not None or self.observer is not None:
            return False
        if self.extension is not None and self.extension.is_on():
            return False
        return options.backend.recipe_now() is None  # in a recipe of the user's, matrix products run in FP8

    def _is_around(self, call: ModuleCall) -> bool:
        """Return True if this call captures the head and the loss around the blocks of the model."""
        return self.policy.cut is Cut.BLOCKS_AND_HEAD and call.is_root and self.division is None

    def _run_captured(self, call: ModuleCall) -> Any:
        """Run a call by dynamo, which captures the forward in the first call."""
        kind, policy = type(call.module), self.policy
        run = self.captures.of(kind, call.forward, lambda: self._capture(call))
        run.turned_off = False
        policy.skip_this_mode.discard(kind)  # left over from a call that raised
        try:
            out = self._trace(call, run)
            if self.division is not None and (run.turned_off or kind in policy.skip_this_call):
                # a part of its code ran on stand-ins, so the call runs again; its blocks are captured by now
                policy.skip_this_call.discard(kind)
                policy.uncaptured |= {kind} if run.turned_off else set()
                out = self.user_code.run(call, but_blocks=policy.by_block)
            return out
        except Exception as error:
            if run.turned_off:  # the model rejects the arguments: capture anew in the next call
                self.captures.forget(kind)
            if self.division is None and _may_fail_again(error, call):
                with preserved(call.module):
                    call.run_original()  # raises the error of the user's own code
                    raise
            raise
        finally:
            if policy.makes_nested and kind in policy.skip_this_call:  # training may still be captured
                self.captures.forget(kind)
            policy.skip_this_call.discard(kind)

    def _trace(self, call: ModuleCall, run: Callable[..., Any]) -> Any:
        """Run a call by dynamo. A call of a divided model runs on stand-ins, and may end early."""
        out, module, division = None, call.module, self.division
        with set_aside():
            if division is None:
                out = run(module, *call.args, **call.kwargs)
            else:
                with division.standing_in(module.modules()), suppress(_OnStandIns):
                    out = run(module, *call.args, **call.kwargs)
        if self.policy.skip_this_mode:
            self.policy.end_call(call)
        return out

    def _settle(self, model: nn.Module) -> None:
        """Apply the results of the last call of the model before the next call."""
        model_ref = self.model_ref
        model_ref.meet(model)
        # a mode would see the copies as operations, and memory with other holders is never moved
        if model_ref.scattered and not is_dispatch_mode_on() and not preserving.get():
            self.make_adjacent(model)
        self.captures.forget_replaced()
        first, by_block = model_ref.first_block, model_ref.has_sharded_blocks or self.policy.by_block
        if by_block and first is not None and CONVERTED not in vars(first):
            self.capture_blocks(model)

    # captures by dynamo

    def _capture(self, call: ModuleCall) -> Callable[..., Any]:
        """Return the forward of a class as a function that dynamo captures in its calls."""
        runner = weakref.ref(self)  # dynamo never releases the objects that it was given
        kind, is_around, divided = type(call.module), self._is_around(call), self.division is not None
        return capture(
            call.forward,
            backend=lambda captured, inputs: runner().backend(captured, inputs, kind),
            leaves=lambda: kind in runner().policy.skip_this_call,
            dynamic=False if divided else None,  # the sizes of shards are constant
            # around blocks, calls of parts end the graphs, and these breaks are not reported
            reasons=None if is_around else self.material.breaks,
            # a divided model would first run the user's code on stand-ins
            tell=None if divided else lambda why: runner().tell(why),
            within=partial(parts_end_graphs, is_around),
        )

    def backend(
        self, captured: fx.GraphModule, example_inputs: list[Any], kind: type = nn.Module
    ) -> Callable[..., Any]:
        """Rewrite one graph of the forward of `kind`, for dynamo.

        If the rewrite fails, the graph runs as captured.
        """
        bind(captured)
        model = self.model_ref.model
        self._check_capture(captured, kind, model)
        if model is not None:
            self.captures.note_methods(model)
        root = None if model is None else name_as_in(model, captured, example_inputs)
        fuse = partial(self._fused, modules=("",) if root is None else _sharing(model, root))
        return fuse(captured) if self.division is None else self.division.graph(captured, fuse)

    def _check_capture(self, captured: fx.GraphModule, kind: type, model: nn.Module | None) -> None:
        """Raise if a graph must not replace its forward.

        Raises:
            SkipFrame: to run the user's own code.
        """
        call = _calling.get()
        if call is not None and of_checkpoint(saving_hooks()) != of_checkpoint(call.hooks):
            self.tell(why := self.policy.after_hooks(kind))
            raise SkipFrame(why)
        if has_checkpoints(captured):
            was = self.policy.cut
            if why := self.policy.after_checkpoint(kind, model):
                self.tell(why)
            elif was is not Cut.BLOCKS_AND_HEAD:
                self.capture_blocks(model)
            raise SkipFrame(why or CHECKPOINTED)
        if (why := why_uncaptured(captured)) is not None:
            self.tell(why)
            raise SkipFrame(why)
        modules = () if model is None else model.modules()
        if has_layers_evaluated_whole(captured) and any(map(makes_nested_tensors, modules)):
            self.tell(why := self.policy.after_nested(kind))
            raise SkipFrame(why)

    def _fused(self, captured: fx.GraphModule, modules: tuple[str, ...] = ("",)) -> Callable[..., Any]:
        try:
            self._choose_backend()
            planned = plan(captured, self.options, modules)
            if self.options.recipe is not None:
                put_in_recipe(planned, self.options)
            graph = CapturedGraph(planned, self)
        except Exception as error:
            log.warning("a graph of the model runs as captured", exc_info=error)
            self.material.notes.append(in_full(error))
            return captured.forward
        self.graphs.append(graph)
        reference = weakref.ref(graph)  # dynamo never releases the objects that it was given
        # dynamo does not always guard the model: without new graphs, it may call any graph that fits
        alone = code_of(captured)
        return lambda *arguments: (reference() or alone)(*arguments)

    def _choose_backend(self) -> None:
        """Choose the backend of "auto" again, for the current state of the model.

        Trainer and accelerate move converted models to the GPU. If the backend changes, the next call makes a
        new report.
        """
        model = self.model_ref.model
        if model is None or self.division is not None:
            return
        options = self.options.now(model)
        if options is self.options:
            return
        self.options, self.material.next_call = options, []

    # services for captured graphs, see captured_graph.GraphOwner

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs that were captured so far."""
        return self.captures.graphs

    @property
    def scattered(self) -> ScatteredGroups:
        """The groups of parameters that graphs join and that are not adjacent in memory."""
        return self.model_ref.scattered

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks of a divided model, or None."""
        return None if self.division is None else self.division.ranks

    def options_now(self) -> Options:
        """Return the options, without CUDA graphs if FSDP also shards the parameters of a divided model.

        FSDP gathers them to new addresses in each call, independently on each rank.
        """
        if self.division is None or not self.options.graphs or not self.model_ref.is_sharded:
            return self.options
        self.tell(_GATHERED)
        return replace(self.options, graphs=False)

    def check(self, graph: CapturedGraph, arguments: Sequence[Any]) -> dict[Site, str]:
        """Return the sites that compute wrong values in the first call of the graph, with the reasons.

        They are checked in the model's own dtype.
        """
        checker = self.captures.checker
        if checker is None:
            return {}
        with NOTHING if self.precision is None else self.precision.paused(), gradient_sums.paused():
            wrong = checker(graph, arguments)
        if self.material.report is not None:  # the report has the sites that were wrong in the conversion
            later = "rolled back in a later call"
            self.material.notes += (f"{later}: {site.name}, {why}" for site, why in wrong.items())
        return wrong

    def tell(self, why: str) -> None:
        """Add a sentence to the report, once."""
        self.material.tell(why)

    # services for other packages

    def capture_blocks(self, model: nn.Module) -> None:
        """Capture the blocks of `model` one by one from now on."""
        before = self.policy.cut
        self.policy.cut_into_blocks(model)
        was_around, is_around = (cut is Cut.BLOCKS_AND_HEAD for cut in (before, self.policy.cut))
        if is_around != was_around:  # captures with and without parts differ
            self.captures.forget(type(model))
        skipped = skipped_inside(model, self.options.skip)
        for block in blocks(model):
            swap_class(block, ModuleRole(self, Role.BLOCK, skipped.get(id(block), frozenset())))
            if self.extension is not None:
                self.extension.attach(block)

    def divide(self, division: Division | None) -> None:
        """Run on shards of the parameters from now on, or on whole parameters if `division` is None."""
        self.division = division
        self.release()
        self.graphs.clear()
        self.scattered.clear()

    def release(self) -> None:
        """Free compiled code and recordings, because dynamo may hold the graphs forever."""
        self.captures.clear()
        for graph in self.graphs:
            graph.release()

    def make_adjacent(self, model: nn.Module) -> None:
        """Make parameters adjacent in memory that a call had to copy."""
        self.note_scattered(model, self.model_ref.make_adjacent(model))

    def note_scattered(self, model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> None:
        """Report the parameters that each call joins by a copy because their memory has other holders."""
        if (why := held_groups_told(model, groups)) is not None:
            self.tell(why)

    def __deepcopy__(self, memo: dict) -> Runner:
        copies = (copy.deepcopy(each, memo) for each in (self.policy, self.material))
        twin = memo[id(self)] = Runner(self.options, self.captures.checker, *copies)
        twin.division = copy.deepcopy(self.division, memo)
        twin.precision = copy.deepcopy(self.precision, memo)
        return twin

    def __reduce__(self) -> tuple:
        if self.division is not None:
            return self.division.__reduce__()
        arguments = self.options, self.captures.checker, self.policy, self.material
        return Runner, arguments, {"precision": self.precision}


# If dynamo cannot trace a forward, it traces the functions that the forward calls. Runner.call() is not the
# user's code, so the report needs no reason for it.
skip_code(Runner.call.__code__)


class _OnStandIns(Exception):
    """The end of a call of a divided model that will be repeated. FP8 must not see values of stand-ins."""


def _sharing(model: nn.Module, root: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that share a graph of the forward of `root`, with `root` first."""
    if root is model:
        return ("",)
    alike = [(path, module) for path, module in model.named_modules() if type(module) is type(root)]
    return tuple(path for path, module in sorted(alike, key=lambda item: item[1] is not root))


def _may_fail_again(error: Exception, call: ModuleCall) -> bool:
    """Return True if the user's own code may run once more, to raise its own error.

    A compiled graph raises a RuntimeError for an id out of range, and a captured graph may leave out a check
    of the user's code. A second run is excluded in four cases:

    - on a GPU, where errors come later;
    - with several ranks, which would wait for the collectives of this rank;
    - in a transform of torch.func, in which tensors have no memory to restore;
    - if the forward might change an argument twice, such as a cache.
    """
    first = next(call.module.parameters(), None)
    on_cpu = first is None or first.device.type == "cpu"
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    leaves = tree_leaves((call.args, call.kwargs))
    is_plain = all(isinstance(leaf, (Tensor, int, float, str, NoneType)) for leaf in leaves)
    is_apart = call.in_backward or call.is_transformed
    return isinstance(error, RuntimeError) and on_cpu and alone and is_plain and not is_apart
