"""A trace says what happens in a forward, runs by itself, and leaves the model as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

import te_transform
from te_transform import InputError, TraceError
from te_transform.graph.capture import capture
from tests.bitwise import untouched
from tests.zoo import CASES, EXTRA, Inputs, tensors, zero_dropout

ALL = CASES | EXTRA


def arguments(graph: fx.GraphModule, inputs: Inputs) -> Iterator[Any]:
    """Return the argument for each placeholder, whose name contains the argument's name."""
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            names = [name for name in inputs if f"_{name}_" in f"_{node.name}_"]
            yield inputs[max(names, key=len)]


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        "llama",
        *(pytest.param(n, marks=pytest.mark.integration) for n in ("nanogpt_manual", "vit")),
    ],
)
def test_the_graph_computes_what_the_model_does(name: str, train: bool) -> None:
    model, inputs = zero_dropout(ALL[name].build()), ALL[name].sample()
    with untouched(model):
        graph = te_transform.trace(model, inputs, train=train)
    with torch.no_grad():
        expected = list(tensors(model.train(train)(**inputs)))
        actual = list(tensors(graph(*arguments(graph, inputs))))
    assert expected
    for e in expected:
        assert any(a.shape == e.shape and torch.equal(a, e) for a in actual)


def test_nodes_know_their_module_and_parameters_their_name() -> None:
    graph = te_transform.trace(ALL["llama"].build(), ALL["llama"].sample()).graph
    (node,) = (n for n in graph.nodes if n.target == "model.layers.0.mlp.gate_proj.weight")
    assert node.op == "get_attr"
    (linear,) = node.users
    assert linear.meta["path"] == "model.layers.0.mlp.gate_proj"
    assert linear.meta["class"] == "Linear"
    assert linear.meta["example_value"].shape[-1] == node.meta["example_value"].shape[0]


@pytest.mark.parametrize("name", ["torch_encoder_pre", "torch_mha"])
def test_parameters_of_torchs_own_modules_have_their_names(name: str) -> None:
    model = ALL[name].build()
    nodes = te_transform.trace(model, ALL[name].sample()).graph.nodes
    assert {node.target for node in nodes if node.op == "get_attr"} == dict(model.named_parameters()).keys()


def test_training_shows_the_dropouts_that_evaluation_hides() -> None:
    model, inputs = ALL["nanogpt_manual"].build(), ALL["nanogpt_manual"].sample()

    def dropouts(train: bool) -> int:
        nodes = te_transform.trace(model, inputs, train=train).graph.nodes
        return sum(node.target is F.dropout and node.args[2] is True for node in nodes)

    assert dropouts(train=True) > 0
    assert dropouts(train=False) == 0


class Stateful(nn.Module):
    """Changes all it can in a forward, then fails if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []
        self.cache = None

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.seen.append(len(self.seen))
        self.count += 1
        self.cache = x
        self.extra = len(self.seen)
        x = self.norm(self.linear(x)) + torch.rand(4)
        if fail:
            raise ValueError("no")
        return x


def test_a_model_that_changes_itself_is_put_back() -> None:
    model, x = Stateful().eval(), torch.randn(3, 4)
    with untouched(model):
        te_transform.trace(model, x)
    assert model.seen == []


def test_a_failed_trace_puts_the_model_back_and_says_what_failed() -> None:
    model, sentence = (
        Stateful(),
        r"Stateful failed on the example inputs \(float32\[3, 4\], True\): ValueError: no",
    )
    x = torch.randn(3, 4)
    with untouched(model), pytest.raises(TraceError, match=sentence):
        te_transform.trace(model, (x, True))


def test_an_interrupted_trace_puts_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model, x = Stateful(), torch.randn(3, 4)
    monkeypatch.setattr(InstructionTranslator, "run", interrupted)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        te_transform.trace(model, x)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, states: dict[str, Tensor]) -> Tensor:
        states["a"].zero_()
        return x.mul_(self.scale * 2)


def test_inputs_written_in_place_stay_as_they_are() -> None:
    x, states = torch.ones(2), {"a": torch.ones(3)}
    te_transform.trace(Writes(), (x, states))
    assert torch.equal(x, torch.ones(2))
    assert torch.equal(states["a"], torch.ones(3))


def test_a_model_larger_than_memory_is_traced_on_the_meta_device() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=8192, intermediate_size=28672)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    graph = te_transform.trace(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}).graph
    assert sum(node.target is F.linear for node in graph.nodes) == 2 * 7 + 1
    assert all(parameter.is_meta for parameter in model.parameters())


def test_one_tensor_given_twice_is_one_placeholder() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    nodes = te_transform.trace(attention, (x, x, x)).graph.nodes
    assert sum(node.op == "placeholder" for node in nodes) == 1


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_inputs_are_invented_where_the_model_says_what_it_reads(name: str) -> None:
    assert len(te_transform.trace(ALL[name].build()).graph.nodes) > 10


class Looks(nn.Module):
    """Looks at a value half way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.linear(y if y.sum() > 0 else -y)


def test_trace_refuses_a_forward_with_graph_breaks() -> None:
    model = Looks()
    sentence = (
        "expected one graph for the forward of Looks, got 2 from dynamo; te_transform.inspect() lists the "
        "reasons in its breaks"
    )
    with untouched(model), pytest.raises(TraceError) as raised:
        te_transform.trace(model, torch.ones(2, 4))
    assert str(raised.value) == sentence


def test_a_list_of_samples_and_every_form_of_a_sample() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    graphs = [te_transform.trace(model, form) for form in (x, (x,), {"input": x}, [x, x])]
    assert all(torch.equal(graph(x)[0], model(x)) for graph in graphs)
    with pytest.raises(InputError, match="expected at least one sample in example_inputs, got an empty list"):
        te_transform.trace(model, [])
    form = r"expected example_inputs to be a tensor, a tuple \(args\), .* or a list of these, got int; "
    with pytest.raises(InputError, match=form):
        te_transform.trace(model, 3)


# What captures are given by: graph/capture.py


def test_a_backend_that_raises_leaves_the_forward_unchanged() -> None:
    def fails(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        raise ArithmeticError("no")

    class Turns(nn.Module):  # calls no function that other tests capture: dynamo gives all of them up
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() * 2

    model, x = Turns(), torch.randn(2, 4)
    assert torch.equal(capture(Turns.forward, fails)(model, x), model(x))


def test_two_captures_of_one_function_are_apart() -> None:
    seen: dict[str, int] = {"one": 0, "other": 0}

    def counting(name: str) -> Any:
        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
            seen[name] += 1
            return graph.forward

        return backend

    model, x = Looks(), torch.ones(2, 4)
    runs = {name: capture(Looks.forward, counting(name)) for name in seen}
    for _ in range(2):
        for run in runs.values():
            assert torch.equal(run(model, x), model(x))
    assert seen["one"] == seen["other"] > 0
