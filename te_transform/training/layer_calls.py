"""Layers that a policy leaves out of the training calls of a converted model: an extension of its runner."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from te_transform.backends.fp8.scale_table import keep_scales
from te_transform.backends.ranks import is_sharded, waits_for_all_gradients
from te_transform.backends.tracing import in_backward
from te_transform.execution.blocks import blocks
from te_transform.execution.call_context import CallContext, ModuleCall
from te_transform.execution.captured_graph import CapturedGraph
from te_transform.execution.classes import ModuleRole, Role
from te_transform.execution.runner import Runner
from te_transform.graph.context import set_to
from te_transform.plan.model import CONVERTED
from te_transform.training.block_calls import BlockCalls
from te_transform.training.forwards import TrainingForwards
from te_transform.training.layered import Decision, Draws, Layered, layered_plan

LayerPolicy = Callable[[], Draws]

_ALL_LAYERS_OBSERVED = "verify() or the conversion looks at the call, in which all layers run"
_WHOLE = "all layers run in this call"
_NO_LAYERS = "no layer of the graph can be left out"

_PLANNING = threading.Lock()  # fake tensors belong to one thread at a time
_NOT_IN_CALL: Any = object()
# the path of the module in a training call, None in other calls, and _NOT_IN_CALL outside of calls
_trained_layers: ContextVar[Any] = ContextVar("_trained_layers", default=_NOT_IN_CALL)


class LayerCalls:
    """The calls of a model whose layers a policy decides on.

    Args:
        model: the converted model.
        runner: of the model.
        policy: returns the draws of the current step.
    """

    def __init__(self, model: nn.Module, runner: Runner, policy: LayerPolicy):
        self.policy, self.block_calls = policy, BlockCalls()
        self.forwards = TrainingForwards()
        self.runner = weakref.ref(runner)
        self.paths = {id(module): path for path, module in model.named_modules()}
        named = model.named_parameters(remove_duplicate=False)
        self.names = {id(parameter): name for name, parameter in named}
        self.graphs: weakref.WeakKeyDictionary[CapturedGraph, LayeredGraph] = weakref.WeakKeyDictionary()
        for block in blocks(model) if runner.policy.by_block else ():
            self.attach(block)

    def is_on(self) -> bool:
        """Return True if this step may leave a layer out."""
        return self.policy().is_on()

    def decision(self) -> Decision | None:
        """Return the decision for this forward, or for the forward that a backward repeats.

        None lets all layers run.
        """
        if in_backward():
            return self.forwards.repeated()
        return Decision(self.policy(), waits_for_all_gradients())

    def run(self, call: ModuleCall, run: Callable[[ModuleCall], Any]) -> Any:
        """Run a call. Note the path of the called module if the call trains, and the forward's decision.

        Learn the form of a dropped block's output.
        """
        path = self._trained_path(call.role, call.module)
        is_forward = path is not None and not in_backward()
        with (
            set_to(_trained_layers, path),
            self.forwards.noted_as(self.decision()) if is_forward else nullcontext(),
        ):
            out = run(call)
        if call.is_block and self._drops(call.role, call.module):
            self.block_calls.learn(call.module, tuple(call.args), dict(call.kwargs), out)
        return out

    def executor(self, graph: CapturedGraph) -> LayeredGraph:
        """Return the executor that runs a captured graph in layers."""
        if graph not in self.graphs:
            self.graphs[graph] = LayeredGraph(graph, self)
        return self.graphs[graph]

    def attach(self, block: nn.Module) -> None:
        """Send calls of a block, hooks included, through _call_block() from now on."""
        if vars(block).get("_compiled_call_impl") is None:
            block._compiled_call_impl = partial(self._call_block, block)

    def detach(self, model: nn.Module) -> None:
        """Restore the blocks' own calls."""
        for block in model.modules():
            own = vars(block).get("_compiled_call_impl")
            if getattr(own, "func", None) == self._call_block:
                block._compiled_call_impl = None

    def _call_block(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a block, or leave it out if the step drops it and FSDP would gather its parameters."""
        role, runner = vars(block).get(CONVERTED), self.runner()
        is_ours = role is not None and runner is not None and runner.extension is self
        if is_ours and self._drops(role, block):
            passed = self.block_calls.passed(block, args, kwargs)
            if passed is not None:
                if runner.precision is not None:
                    keep_scales(block.parameters())
                return passed[0]
        return block._call_impl(*args, **kwargs)

    def _drops(self, role: ModuleRole, block: nn.Module) -> bool:
        """Return True if this step drops a block that FSDP shards."""
        path = self._trained_path(role, block) if is_sharded(block) else None
        decision = None if path is None else self.decision()
        return decision is not None and decision.draws.factor(path) is None

    def _trained_path(self, role: ModuleRole, module: nn.Module) -> str | None:
        """Return the path of a module that is called in training, else None.

        A block in a call of the model trains if the model does, and a repeated call if the forward did: a
        reentrant checkpoint calls both without gradients.
        """
        if role.kind is Role.BLOCK and _trained_layers.get() is not _NOT_IN_CALL:
            is_trained = _trained_layers.get() is not None
        else:
            is_trained = module.training and (torch.is_grad_enabled() or in_backward())
        return self.paths.get(id(module)) if is_trained else None


class LayeredGraph:
    """The executor that runs a captured graph without the layers that the policy leaves out.

    Args:
        graph: the captured graph.
        calls: the calls of the graph's model.
    """

    name = "in layers"

    def __init__(self, graph: CapturedGraph, calls: LayerCalls):
        self.graph, self.calls = weakref.ref(graph), weakref.ref(calls)
        self.layered: tuple[Layered | None] | None = None  # None before the first call

    def refuse(self, call: CallContext) -> str | None:
        """Return why all layers run, or None."""
        if call.is_observed:
            return _ALL_LAYERS_OBSERVED
        calls, path = self.calls(), _trained_layers.get()
        if path is None or path is _NOT_IN_CALL or calls is None:
            return _WHOLE
        decision = calls.decision()
        if decision is None or not decision.draws.is_on():
            return _WHOLE
        return _NO_LAYERS if self._planned() is None else None

    def run(self, call: CallContext) -> Any:
        """Run the layers that the policy keeps."""
        return self._planned()(self.calls().decision(), _trained_layers.get(), call.args)

    def _planned(self) -> Layered | None:
        with _PLANNING:
            if self.layered is None:
                graph = self.graph()
                planned = layered_plan(graph.plan, graph.options, graph.owner.tell)
                if planned is not None:
                    run = CapturedGraph(planned[0], graph.owner, is_extended=False)
                    planned = Layered(*planned, run, partial(graph.path_in, self.calls().names))
                    graph.forget_recordings()
                self.layered = (planned,)
            return self.layered[0]


def decide_on_layers(model: nn.Module, runner: Runner, policy: LayerPolicy | None) -> None:
    """Set the policy that decides on the layers of training calls. None runs all layers."""
    if isinstance(runner.extension, LayerCalls):
        runner.extension.detach(model)
    runner.extension = None if policy is None else LayerCalls(model, runner, policy)
