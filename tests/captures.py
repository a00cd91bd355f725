"""Captured graphs for tests that look at graphs, of models and of functions of parameters and inputs."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from te_transform.canonicalize import canonicalize as rewritten
from te_transform.graph import ops
from te_transform.graph.capture import SETTINGS
from te_transform.graph.nodes import name_in_model, value
from te_transform.pipeline import PIPELINE
from te_transform.plan.options import Options
from tests.zoo import tensors

OPS = {f for f in vars(ops).values() if getattr(f, "__module__", "") == ops.__name__}
BOUND = 1e-5  # relative to the output's norm, in fp32
FORMS = Options.of(None, PIPELINE, backend="torch").forms
SIZES = (True, False)  # whether canonical() has them symbolic, the last for what it returns


@dataclass
class Captured:
    """One captured graph and the arguments of each call of it."""

    module: fx.GraphModule
    calls: list[tuple] = field(default_factory=list)
    inputs: tuple = ()  # the very objects of the last call

    def __call__(self, *args: Any) -> Any:
        self.inputs = args
        self.calls.append(tuple(_own(value) for value in args))
        return self.module.forward(*args)


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def capture(model: nn.Module, *samples: dict | tuple, dynamic: bool | None = None) -> list[Captured]:
    """The graphs that dynamo captures of a call of `model` with each of `samples`."""
    found: list[Captured] = []

    def backend(module: fx.GraphModule, example_inputs: list) -> Captured:
        found.append(Captured(module))
        return found[-1]

    torch._dynamo.reset()
    # Fake tensors look each operation up in a cache. At symbolic sizes it is rarely hit, and looking takes
    # half of a capture's time.
    own = {"suppress_errors": False, "fake_tensor_cache_enabled": False}
    with torch._dynamo.config.patch(SETTINGS | own):
        forward = torch.compile(model.forward, backend=backend, dynamic=dynamic)
        for sample in samples:
            args, kwargs = ((), sample) if isinstance(sample, dict) else (sample, {})
            forward(*args, **kwargs)
    return found


def canonicalize(graph: fx.Graph) -> fx.Graph:
    """The canonical graph, with the forms of the rules that run by default."""
    return rewritten(graph, FORMS)


def executable(captured: Captured, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(captured.module, graph)


def run(module: Any, args: tuple) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(tensors(module(*copy.deepcopy(args))))


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance of an output from what it should be, relative to that one's norm."""
    pairs = zip(actual, expected, strict=True)
    distances = [((a.double() - e.double()).norm() / e.double().norm()).item() for a, e in pairs]
    return max(distances, default=0.0)


class AsKnown(fx.Interpreter):
    """Runs a graph of fixed sizes, and sees that each tensor is of the shape and dtype that its node says."""

    def run_node(self, n: fx.Node) -> Any:
        found, known = super().run_node(n), value(n)
        if isinstance(found, Tensor) and isinstance(known, Tensor):
            assert (found.shape, found.dtype) == (known.shape, known.dtype), n.format_node()
        return found


class Model(nn.Module):
    """A function of a model's parameters and its inputs, as a module."""

    def __init__(self, function, **parameters: Tensor):
        super().__init__()
        self.function = function
        for name, tensor in parameters.items():
            if name == "cache":
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, nn.Parameter(tensor))

    def forward(self, *args):
        return self.function(self, *args)


def canonical(
    function, *args: Tensor, train: bool = True, bound: float = BOUND, **parameters: Tensor
) -> fx.Graph:
    """The canonical graph of `function(parameters, *args)`, after a check that it computes the same.

    And after one that it has the same ops where sizes are symbolic: all but widths, which are 8 and above.
    """
    graphs = []
    for dynamic in SIZES:
        for wide in (arg for arg in args if arg.dim() and arg.shape[-1] >= 8):
            torch._dynamo.mark_static(wide, wide.dim() - 1)
        (captured,) = capture(Model(function, **parameters).train(train), args, dynamic=dynamic)
        expected = [run(captured.module, call) for call in captured.calls]
        graphs.append(canonicalize(captured.module.graph))
        module = executable(captured, graphs[-1])
        runs = module.forward if dynamic else AsKnown(module).run
        for call, wanted in zip(captured.calls, expected, strict=True):
            assert error(run(runs, call), wanted) <= bound
    assert op_counts(graphs[0]) == op_counts(graphs[-1])
    return graphs[-1]


def op_counts(graph: fx.Graph) -> Counter:
    """Return how often the graph calls each op, without casts and columns."""
    called = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(t.__name__ for t in called if t in OPS - {ops.cast, ops.columns})


def targets(graph: fx.Graph) -> set:
    return {node.target for node in graph.nodes if node.op in ("call_function", "call_method")}


def the(graph: fx.Graph, op: object) -> tuple:
    """The arguments of the only call of `op`."""
    (node,) = (n for n in graph.nodes if n.target is op)
    return node.args


def named(value: Any) -> Any:
    """The name of a parameter of the model; other values as they are."""
    return (name_in_model(value) or value.op) if isinstance(value, fx.Node) else value
