"""Sites, skips and parameters go by the names of named_modules(), whichever way the forward takes there."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.execution.attach import runner_of
from tests.attacks import Block, Loops, Pair, X, call, with_input_gradient
from tests.models.tiny import WIDTH
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")


class Stack(nn.Module):
    def __init__(self, count: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Aliased(nn.Module):
    """Its layers have two names."""

    def __init__(self):
        super().__init__()
        self.inner = Stack()
        self.layers = self.inner.layers

    forward = Stack.forward


class HandsOn(nn.Module):
    """A wrapper whose modules dynamo reads from the __dict__."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = Stack(), nn.Parameter(torch.ones(WIDTH))

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x) * self.scale


class Property(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Stack()

    @property
    def found(self) -> nn.Module:
        return self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.found.forward(x)


class Listed(nn.Module):
    """Reads its layers of a list that is no module."""

    def __init__(self):
        super().__init__()
        self.inner = Stack()
        self.those = [*self.inner.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.those:
            x = layer(x)
        return x


WAYS = [Aliased, HandsOn, Property, Listed]


def paths(report: te_transform.Report) -> list[str]:
    return [site.path for site in report.fused]


@pytest.mark.parametrize("way", WAYS)
def test_the_report_has_the_models_own_names(way: type[nn.Module]) -> None:
    model = seeded(way)
    report = te_transform.inspect(model, X)
    assert paths(report) == ["inner.layers.0.mlp", "inner.layers.1.mlp"]
    parameters = {node.target for node in te_transform.trace(model, X).graph.nodes if node.op == "get_attr"}
    assert parameters <= {*dict(model.named_parameters())}
    plan = te_transform.inspect(model, X, backend="te", recipe="fp8-delayed").precision
    assert [*plan.sites] == ["inner.layers.0.mlp", "inner.layers.1.mlp"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", ["inner.layers.0", "inner.layers.0.*", "*0.mlp.fc1"])
def test_skipped_modules_are_left_alone(way: type[nn.Module], skip: str) -> None:
    pair = Pair.of(way, skip=skip)
    report = te_transform.report(pair.converted)
    assert "layernorm_mlp" not in {
        site.rule for site in report.fused if site.path.startswith("inner.layers.0")
    }
    assert report.counts["layernorm_mlp"] == 1
    assert any(f"skip={skip!r}" in reason for site in report.refused for reason in site.reasons)
    pair.agree(call)


class Deep(Stack):
    """Planned block by block."""

    def __init__(self):
        super().__init__(9)


class Repeats(Stack):
    """Captured block by block."""

    def __init__(self):
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("kind", [Deep, Repeats])
def test_blocks_that_skip_the_same_share_a_graph(kind: type[nn.Module]) -> None:
    pair = Pair.of(kind, skip=("layers.0", "layers.2.mlp.fc2"))
    fused = {site.path for site in te_transform.report(pair.converted).fused}
    assert "layers.1.mlp" in fused
    assert not {"layers.0.mlp", "layers.2.mlp"} & fused
    pair.agree(with_input_gradient)
    assert {site.path for site in te_transform.report(pair.converted).fused} == fused


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_blocks_of_a_copy_skip_what_they_skipped(copied: Callable[[nn.Module], nn.Module]) -> None:
    again = copied(Pair.of(Repeats, skip=("layers.0", "layers.2.mlp.fc2")).converted)
    with_input_gradient(again, X.clone())
    found = {
        graph.plan.modules: [site.name for site in graph.plan.sites] for graph in runner_of(again).graphs
    }
    assert found[("layers.0",)] == []
    assert found[("layers.1",)] == ["mlp.layernorm_mlp"]
    assert found[("layers.2",)] == ["mlp.fc1.layernorm_linear"]


def test_skipping_a_module_skips_all_modules_that_share_its_graph() -> None:
    pair = Pair.of(Loops, skip="parts.0.mlp.fc1")
    report = te_transform.report(pair.converted)
    assert not report.counts["layernorm_mlp"]
    reasons = {reason for site in report.refused for reason in site.reasons}
    skipped = "a module that shares its captured graph is skipped by skip='parts.0.mlp.fc1'"
    assert any(reason.startswith(skipped) for reason in reasons)
    pair.agree(call)


@torch.compiler.disable
def gather(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """End the graph, as the hooks of ZeRO 3 do."""


class Gathers(nn.Module):
    """Dynamo captures the linears by themselves."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for linear in (self.first, self.last):
            linear.register_forward_pre_hook(gather)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("skip", ["last", "first"])
def test_a_module_that_is_captured_by_itself_is_skipped(skip: str) -> None:
    assert paths(te_transform.report(Pair.of(Gathers).converted)) == ["first", "last"]
    report = te_transform.report(te_transform.convert(seeded(Gathers), X, skip=skip))
    assert not report.fused
    reasons = [reason for site in report.refused for reason in site.reasons]
    assert reasons
    assert all(f"that shares its captured graph is skipped by skip={skip!r}" in reason for reason in reasons)
