"""The executor of captured graphs: what it leaves out of them, at the size limits that users have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends import plain
from te_transform.execution.attach import runner_of
from te_transform.execution.call_context import CallContext
from te_transform.execution.captured_graph import Observer
from te_transform.execution.executors.captured import Captured
from te_transform.execution.graph_version import GraphVersion
from te_transform.graph import ops
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import CASES, EXTRA, seeded

pytestmark = pytest.mark.usefixtures("te")


def rows(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length))


def converted(model: nn.Module, sample: Tensor, **options: Any) -> nn.Module:
    return te_transform.convert(copy.deepcopy(model), sample, verify=False, **options)


@pytest.mark.parametrize(
    ("name", "layers", "op", "captured"),
    [
        ("llama", "num_hidden_layers", ops.rms_norm, torch.rsqrt),
        ("mixtral", "num_hidden_layers", ops.rms_norm, torch.rsqrt),  # of tokens that a reshape has flattened
        pytest.param("gpt2", "n_layer", ops.gelu_tanh, torch.tanh, marks=pytest.mark.integration),
    ],
)
def test_norms_and_activations_are_one_operation(
    name: str,
    layers: str,
    op: Callable,
    captured: Callable,
    ran: list[str],
) -> None:
    case = (CASES | EXTRA)[name]
    model, inputs = case.build(**{layers: 1}), case.sample()
    fused = te_transform.convert(copy.deepcopy(model), inputs, backend="torch", verify=False)
    ran.clear()
    for each in (model, fused):
        each.train(False)
    with torch.no_grad():
        out, wanted = fused(**inputs).logits, model(**inputs).logits
    assert ran == [Captured.name]
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    graph = runner_of(fused).graphs[-1].as_captured
    called = [node.target for node in graph.graph.__self__.graph.nodes]
    ones = [node for node in graph.version.plan.before.nodes if node.target is op]
    assert called.count(op) == len(ones) > 0
    assert captured not in called


@pytest.mark.parametrize(
    ("name", "fused"), [("gpt_neox", 2), pytest.param("llama", 0, marks=pytest.mark.integration)]
)
def test_rotations_are_fused_in_graphs_without_products_that_gain(name: str, fused: int) -> None:
    case = CASES[name]
    model = te_transform.convert(
        case.build(num_hidden_layers=1).bfloat16(), case.sample(), backend="te", verify=False
    )
    graph = runner_of(model).graphs[-1].as_captured.graph.__self__
    assert sum(isinstance(module, plain.Rotary) for module in graph.modules()) == fused


class WithABackwardOfItsOwn(nn.Module):
    class Relu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.relu()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (ctx.saved_tensors[0] > 0)

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.Relu.apply(self.up(self.norm(x))))


def test_an_activation_with_its_own_backward_is_one_operation(ran: list[str]) -> None:
    """PyTorch interprets both of its graphs node by node at each call."""
    model, x = seeded(WithABackwardOfItsOwn), rows(1, 3)
    fused = converted(model, x)
    ran.clear()
    for each in (model, fused):
        each(x).square().sum().backward()
    assert ran == [Captured.name]
    for own, found in zip(model.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(found.grad, own.grad)
    graph = runner_of(fused).graphs[-1].as_captured.graph.__self__.graph
    called = [node.target for node in graph.nodes]
    assert called.count(ops.relu) == 1
    assert torch.ops.higher_order.autograd_function_apply not in called


def test_a_graph_that_cannot_be_lowered_runs_as_dynamo_captured_it() -> None:
    original, x, seen, said = seeded(Tiny), rows(1, 3), [], []
    model = converted(original, x, backend="te")
    runner = runner_of(model)
    runner.observer = Observer(lambda graph, arguments: seen.append(arguments))
    model(x)
    graph = runner.graphs[-1]
    version = GraphVersion(graph.plan, frozenset(), graph.options, runner.scattered, said.append, None)
    executor = Captured(version)
    plan = SimpleNamespace(captured=graph.captured)  # too little of the plan to lower it
    executor.version = replace(version, plan=plan)
    (out,) = executor.run(CallContext(seen[-1]))
    assert torch.equal(out, original(x))
    assert said[0].startswith("AttributeError: ")
