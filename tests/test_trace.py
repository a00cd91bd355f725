"""A recording says what happened and leaves the model as it was."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import te_transform
from te_transform.inputs import InputError, as_inputs
from te_transform.trace import record
from tests.zoo import CASES, EXTRA, tensors, zero_dropout

ALL = CASES | EXTRA


def state_of(model: nn.Module) -> dict:
    """All of a model that a trace could disturb."""
    return {
        "tensors": {name: t.clone() for name, t in model.state_dict(keep_vars=False).items()},
        "identities": [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()],
        "attributes": [{k: id(v) for k, v in m.__dict__.items()} for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate()),
    }


def assert_same_state(model: nn.Module, before: dict) -> None:
    after = state_of(model)
    for name in ("identities", "attributes", "training", "hooks", "classes"):
        assert after[name] == before[name], name
    assert all(torch.equal(after["tensors"][name], t) for name, t in before["tensors"].items())
    assert torch.equal(after["random"][0], before["random"][0])
    assert after["random"][1] == before["random"][1]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_the_graph_computes_what_the_model_does(name: str, train: bool, monkeypatch) -> None:
    # torch.nn's attention has a kernel of its own for evaluation that rounds otherwise; a traced forward does
    # without
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    model = zero_dropout(ALL[name].build())
    inputs = ALL[name].sample(2, 12, 0, False)
    before = state_of(model)
    graph = te_transform.trace(model, inputs, train=train)
    assert_same_state(model, before)
    given = dict(as_inputs(model, inputs)[0].named_leaves(model, (), inputs))
    names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        expected = list(tensors(model.train(train)(**inputs)))
        actual = list(tensors(graph(*(given[n] for n in names))))
    assert len(actual) >= 1
    for a, e in zip(actual, expected, strict=False):
        assert torch.equal(a, e)


def test_nodes_know_their_module_and_parameters_their_name() -> None:
    graph = te_transform.trace(ALL["llama"].build(), ALL["llama"].sample(2, 12, 0, False)).graph
    (node,) = (n for n in graph.nodes if n.name == "model_layers_1_mlp_gate_proj_weight")
    assert node.target == "model.layers.1.mlp.gate_proj.weight"
    (linear,) = node.users
    assert linear.meta["path"] == "model.layers.1.mlp.gate_proj"
    assert linear.meta["class"] is nn.Linear
    assert list(linear.meta["nn_module_stack"])[-2:] == ["model.layers.1.mlp", "model.layers.1.mlp.gate_proj"]
    assert linear.meta["tensor_meta"].shape[-1] == linear.args[1].meta["tensor_meta"].shape[0]


def test_training_shows_the_dropouts_that_evaluation_hides() -> None:
    model, inputs = ALL["gpt2"].build(), ALL["gpt2"].sample(2, 12, 0, False)

    def dropouts(train: bool) -> int:
        nodes = te_transform.trace(model, inputs, train=train).graph.nodes
        return sum(
            n.target is F.dropout and n.args[2:3] != (False,) and n.kwargs.get("training") is not False
            for n in nodes
        )

    assert dropouts(train=True) > 0
    assert dropouts(train=True) > dropouts(train=False)


class Stateful(nn.Module):
    """Changes all it can in a forward, then fails if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []
        self.cache = None

    def forward(self, x, fail: bool = False):
        self.seen.append(len(self.seen))
        self.count += 1
        self.cache = x
        self.extra = random.random()
        x = self.norm(self.linear(x)) + torch.rand(4)
        if fail:
            raise ValueError("no")
        return x


def test_a_model_that_changes_itself_is_put_back() -> None:
    model, x = Stateful().eval(), torch.randn(3, 4)
    before = state_of(model)
    te_transform.trace(model, x)
    assert_same_state(model, before)
    assert model.seen == []


def test_a_failed_trace_puts_the_model_back_and_says_what_failed() -> None:
    model, x = Stateful(), torch.randn(3, 4)
    before = state_of(model)
    with pytest.raises(
        te_transform.TraceError, match=r"Stateful failed on the example inputs \(float32\[3, 4\], True\): Va"
    ):
        te_transform.trace(model, (x, True))
    assert_same_state(model, before)


def test_an_interrupted_trace_puts_the_model_back(monkeypatch) -> None:
    model, x = Stateful(), torch.randn(3, 4)
    before = state_of(model)
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        te_transform.trace(model, x)
    assert_same_state(model, before)


def test_inputs_written_in_place_stay_as_they_are() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x, states):
            states["a"].zero_()
            return x.mul_(self.scale * 2)

    x, states = torch.ones(2), {"a": torch.ones(3)}
    te_transform.trace(Writes(), (x, states))
    assert torch.equal(x, torch.ones(2))
    assert torch.equal(states["a"], torch.ones(3))


def test_a_model_larger_than_memory_is_traced_on_the_meta_device() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=4, hidden_size=8192, intermediate_size=28672)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    graph = te_transform.trace(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}).graph
    assert sum(n.target is F.linear for n in graph.nodes) == 4 * 7 + 1
    assert all(p.is_meta for p in model.parameters())


def test_free_sizes_become_symbols() -> None:
    model, x = ALL["nanogpt_manual"].build(), torch.zeros(2, 12, 64)
    attention = (
        model.transformer.h[0].attn
        if hasattr(model, "transformer")
        else next(m for m in model.modules() if type(m).__name__ == "CausalSelfAttention")
    )
    recording = record(attention, as_inputs(attention, x)[0], free_sizes=frozenset((2, 12)))
    (placeholder,) = (n for n in recording.graph.nodes if n.op == "placeholder")
    batch, length, width = placeholder.meta["tensor_meta"].shape
    assert isinstance(batch, torch.SymInt)
    assert isinstance(length, torch.SymInt)
    assert width == 64


def test_one_tensor_given_twice_is_one_placeholder() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    placeholders = [
        n.target for n in te_transform.trace(attention, (x, x, x)).graph.nodes if n.op == "placeholder"
    ]
    assert placeholders == ["query"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit", "torch_encoder_pre"])
def test_inputs_are_invented_where_the_model_says_what_it_reads(name: str) -> None:
    model = ALL[name].build()
    model = getattr(model, "encoder", model) if name == "torch_encoder_pre" else model
    assert len(te_transform.trace(model).graph.nodes) > 10


def test_inputs_that_cannot_be_invented_are_asked_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            self.last = y
            return self.linear(x) + y if x.sum() > 0 else y

    model = Two()
    before = state_of(model)
    with pytest.raises(
        InputError, match=r"none can be invented for Two \(its forward takes x, y\): pass example_inputs="
    ):
        te_transform.trace(model)
    assert_same_state(model, before)


def test_a_module_of_no_known_inputs_is_traced_symbolically_on_a_copy() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x, scale):
            return self.down(F.silu(self.gate(x)) * self.up(x)) * scale

    model, x = Gated(), torch.randn(2, 4)
    before = state_of(model)
    graph = te_transform.trace(model)
    assert_same_state(model, before)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["gate", "up", "down"]
    assert torch.equal(graph(x, 2), model(x, 2))


def test_a_list_of_samples_and_every_form_of_a_sample() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    codes = {te_transform.trace(model, form).code for form in (x, (x,), {"input": x}, [x, x])}
    assert len(codes) == 1
    with pytest.raises(InputError, match="example_inputs is an empty list"):
        te_transform.trace(model, [])
    with pytest.raises(InputError, match="example_inputs has a int, a tensor"):
        te_transform.trace(model, 3)


def test_a_copy_is_traced_like_the_original() -> None:
    model, inputs = ALL["gpt_neox"].build(), ALL["gpt_neox"].sample(2, 12, 0, False)
    assert te_transform.trace(copy.deepcopy(model), inputs).code == te_transform.trace(model, inputs).code
