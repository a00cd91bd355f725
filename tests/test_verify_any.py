"""verify() compares any two modules: the same pass, the first difference is named, the rest is refused."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

import te_transform
from te_transform.verify import compare, replay
from te_transform.verify.names import renaming
from te_transform.verify.verification import Verification
from te_transform.verify.verify import verify
from tests.packages import LLAMA_IDS, llama

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = {"input_ids": torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the original three times more, not twenty times: errors in these tests are large."""
    for name in ("DRAWS", "NEAR_DRAWS"):
        monkeypatch.setattr(compare, name, 3)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale, self.reads_mask, self.p = None, True, 0.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = mask if self.reads_mask else torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, mask, self.p if self.training else 0.0, scale=self.scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc, self.proj, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), mask))
        return x + self.drop(self.proj(F.gelu(self.fc(self.norm2(x)))))


class Words(nn.Module):
    """A language model with a tied head, dropout and a mask for padding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask = mask if attention_mask is None else mask & attention_mask[:, None, None].bool()
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def words(tied: bool = True, of: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Words(tied)
    if of is not None:
        model.load_state_dict(of.state_dict())
    return model


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


# What is the same passes


def uncompiled(model: nn.Module) -> nn.Module:
    return model


class Recorded:
    """A backend of torch.compile that counts the calls of its graphs."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Tensor) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def compiled(model: nn.Module, backend: Any = "eager") -> nn.Module:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: nn.Module, backend: Any = "eager") -> nn.Module:
    model.compile(backend=backend)
    return model


@pytest.mark.parametrize("change", [copy.deepcopy, uncompiled])
def test_a_copy_is_the_same(change: Callable[[nn.Module], nn.Module]) -> None:
    model = words()
    result = verify(model, change(model), IDS)
    assert result, str(result)
    assert (result.guilty, result.dead, result.notes, result.skipped) == ((), (), (), ())
    assert {"gradient of words.weight", "gradient of blocks.1.proj.bias", "output"} <= {
        row.name for row in result.rows
    }
    labels = {row.inputs for row in result.rows}
    assert {"example inputs, training, autocast", "left-padded, training", "state_dict"} <= labels


@pytest.mark.parametrize("change", [pytest.param(compiled, marks=pytest.mark.integration), compiled_in_place])
def test_a_compiled_model_stays_compiled_in_all_cases(change: Callable[[nn.Module], nn.Module]) -> None:
    run = Recorded()
    result = verify(layers(), change(layers(), run), X)
    assert result, str(result)
    assert run.calls >= len({row.inputs for row in result.rows}) - 1  # all but the comparison of weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = words().to(dtype)
    assert verify(model, copy.deepcopy(model), IDS)


def test_gradients_of_tied_weights_are_sums() -> None:
    result = verify(words(), words(tied=False, of=words()), IDS)
    assert result
    assert result.notes == (
        "words.weight, head.weight are one parameter in the first model: the sum of their gradients is "
        "compared, but an optimizer moves them apart; tie them before training",
    )


@pytest.mark.usefixtures("as_given")
def test_a_tied_weight_that_the_original_trains_apart(few: None) -> None:
    result = verify(words(tied=False, of=words()), words(), IDS)
    assert not result
    assert (
        result.notes[-1]
        == "not compared: the gradients of head.weight, which the second model does not train"
    )


@pytest.mark.parametrize("first", ["eager", "sdpa"])
def test_attention_of_transformers_is_the_same_but_at_padding(first: str) -> None:
    second = {"eager": "sdpa", "sdpa": "eager"}[first]
    models = llama(), llama()
    for model, implementation in zip(models, (first, second), strict=True):
        model.set_attn_implementation(implementation)
    result = verify(*models, {"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2]})
    assert result, str(result)
    assert any(row.inputs == "left-padded, training" and row.name == "output loss" for row in result.rows)


def encoder_decoder(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    of_both = ("layers", "attention_heads", "ffn_dim")
    sizes = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in of_both}
    config = transformers.BartConfig(
        vocab_size=20, d_model=WIDTH, max_position_embeddings=16, attn_implementation=implementation, **sizes
    )
    return transformers.BartModel(config)


def test_an_encoder_and_its_decoder() -> None:
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    inputs = {**IDS, "attention_mask": mask, "decoder_input_ids": IDS["input_ids"]}
    assert verify(encoder_decoder("eager"), encoder_decoder("sdpa"), inputs)


@dataclass
class Result:
    hidden: Tensor
    steps: int = 3


class Returns(nn.Module):
    """A linear, and a function of its output."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.result = nn.Linear(WIDTH, WIDTH), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.linear(x))


RESULTS = {
    "tensor": lambda y: y, "tuple": lambda y: (y, None), "dict": lambda y: {"y": y}, "dataclass": Result
}  # fmt: skip


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_paired_by_order_if_no_name_agrees(kind: str, few: None) -> None:
    assert verify(Returns(RESULTS["dict"]), Returns(RESULTS[kind]), X)
    assert not verify(Returns(RESULTS["dict"]), Returns(lambda y: RESULTS[kind](1.01 * y)), X)


@pytest.mark.usefixtures("as_given", "few")
def test_nothing_is_left_behind() -> None:
    models = layers(), compiled_in_place(layers())
    before = [
        [(type(m), m.training, [*vars(m)], len(m._forward_hooks)) for m in model.modules()]
        for model in models
    ]
    weights = [[*model.parameters()] for model in models]
    models[1][0].eps = 0.1
    assert not verify(*models, X)
    assert before == [
        [(type(m), m.training, [*vars(m)], len(m._forward_hooks)) for m in model.modules()]
        for model in models
    ]
    assert all(
        a is b
        for held, model in zip(weights, models, strict=True)
        for a, b in zip(held, model.parameters(), strict=True)
    )
    assert all(p.grad is None for model in models for p in model.parameters())


# Names and weights


class Joined(nn.Module):
    """Attention as it is ported: q, k and v joined, the output transposed, the scale in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.out_bias = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
        return y.transpose(1, 2).flatten(2) @ self.out + self.out_bias


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join q (with the scale of width 4 per head), k and v."""
    factors = {"q": 0.5, "k": 1.0, "v": 1.0}
    parts = {n: torch.cat([f * state[f"{p}.{n}"] for p, f in factors.items()]) for n in ("weight", "bias")}
    qkv = {f"qkv.{name}": joined for name, joined in parts.items()}
    return {**qkv, "out": state["o.weight"].t(), "out_bias": state["o.bias"]}


MASK = torch.ones(5, 5, dtype=torch.bool).tril()


def test_weights_that_are_joined_transposed_and_scaled() -> None:
    torch.manual_seed(0)
    model, port = Attention(), Joined()
    port.load_state_dict(joined(model.state_dict()))

    result = verify(model, port, (X, MASK), weights=joined)

    assert result, str(result)
    assert result.title.startswith("Attention and Joined: verified, ")
    assert {f"gradient of {name}" for name, _ in model.named_parameters()} <= {
        row.name for row in result.rows
    }


WRONG_FUNCTIONS = {
    "without a gradient": (
        torch.no_grad()(joined),
        "expected a differentiable function for weights, got qkv",
    ),
    "another shape": (
        lambda state: {**joined(state), "out_bias": state["o.weight"]},
        r"expected the shape \[8\] for out_bias from the function for weights, got \[8, 8\]",
    ),
    "an unknown name": (
        lambda state: {**joined(state), "qkv.bais": state["o.bias"]},
        "got 'qkv.bais'; did you mean 'qkv.bias'?",
    ),
    "a missing name": (
        lambda state: {"out": state["o.weight"].t(), "out_bias": state["o.bias"]},
        "got qkv.weight, qkv.bias in the second only; pass names, ",
    ),
    "an error": (
        lambda state: {"qkv.weight": state["qkv"]},
        r"got an error from it \(KeyError: 'qkv'\) at .*test_verify_any.py:",
    ),
    "none": (
        None,
        "in the second only, and q.weight, .* in the first only; pass names, which map .* or weights, ",
    ),
}


@pytest.mark.parametrize("which", WRONG_FUNCTIONS)
def test_functions_of_weights_that_do_not_fit(which: str) -> None:
    function, sentence = WRONG_FUNCTIONS[which]
    with pytest.raises(ValueError, match=sentence):
        verify(Attention(), Joined(), (X, MASK), weights=function)


def test_names_are_a_mapping_or_a_function() -> None:
    model, port = Returns(RESULTS["tensor"]), nn.ModuleDict({"fc": Returns(RESULTS["tensor"]).linear})
    port.forward = lambda x: port["fc"](x)
    assert verify(model, port, X, names={"linear": "fc"})
    assert verify(model, port, X, names=lambda name: name.replace("linear", "fc"))
    assert verify(model.linear, model, X, names={"": "linear"})
    assert verify(model, model.linear, X, names={"linear": ""})
    with pytest.raises(ValueError, match="got 'liner', which the first does not have; did you mean 'linear'"):
        verify(model, port, X, names={"liner": "fc"})
    with pytest.raises(ValueError, match="got 'f', which the second does not have"):
        verify(model, port, X, names={"linear": "f"})
    with pytest.raises(ValueError, match=r"expected weights of one shape, got \[8, 8\] for linear.weight"):
        verify(model, nn.Linear(WIDTH, 9), X, names={"linear": ""})


class Adapted(nn.Module):
    """A frozen linear beside a trained one without effect, as an adapter is added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.adapter = (
            copy.deepcopy(base).requires_grad_(False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


def test_frozen_and_additional_weights_are_noted() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    result = verify(linear, Adapted(linear), X, names={"": "base"})
    assert result, str(result)
    assert result.notes == (
        "not compared: the gradients of weight, bias, which the second model does not train",
        "not compared: the gradients of adapter.weight, which the first model does not have",
    )


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("no backward")


def test_a_backward_that_raises(few: None) -> None:
    result = verify(Returns(RESULTS["tensor"]), Returns(NoBackward.apply), X)
    assert not result
    assert result.notes[0].endswith("the second model raises in it: NotImplementedError: no backward")


def test_the_longest_name_counts() -> None:
    renamed = renaming({"a": "x", "a.b": "y", "c": None})
    assert [renamed(name) for name in ("a", "a.b.weight", "a.c", "ab", "c.d", "")] == [
        "x", "y.weight", "x.c", "ab", None, ""
    ]  # fmt: skip


# What is wrong is named


def other_eps(model: Any) -> None:
    model.blocks[1].norm2.eps = 1e-2


def missing_scale(model: Any) -> None:
    model.blocks[1].attention.scale = 1.0


def no_mask(model: Any) -> None:
    model.blocks[0].attention.reads_mask = False


def in_bfloat16(model: Any) -> None:
    model.blocks[1].fc.register_forward_hook(lambda module, args, out: out.bfloat16().float())


def detached(model: Any) -> None:
    model.blocks[0].attention.v.register_forward_hook(lambda module, args, out: out.detach())


def another_gradient(model: Any) -> None:
    def scaled(module: nn.Module, args: tuple) -> tuple:
        return (1.01 * args[0] - 0.01 * args[0].detach(),)

    model.blocks[0].attention.q.register_forward_pre_hook(scaled)


def raises_in_training(model: Any) -> None:
    def fails(module: nn.Module, args: tuple) -> None:
        if module.training:
            raise NotImplementedError("no kernel")

    model.blocks[1].fc.register_forward_pre_hook(fails)


WRONG = {
    other_eps: ("blocks.1.norm2", "example inputs, training"),
    missing_scale: ("blocks.1.attention", "example inputs, training"),
    no_mask: ("blocks.0.attention", "left-padded, training"),
    in_bfloat16: ("blocks.1.fc", "example inputs, training"),
    detached: ("blocks.0.attention.v", "example inputs, training"),
    another_gradient: ("blocks.0.attention.q", "example inputs, training"),
    raises_in_training: ("blocks.1.fc", "example inputs, training"),
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_the_first_module_that_differs_is_named(
    change: Callable[[Any], None], few: None, request: pytest.FixtureRequest
) -> None:
    if change is not no_mask:
        request.getfixturevalue("as_given")
    model = words()
    port = words(of=model)
    change(port)
    result = verify(model, port, IDS)
    path, case = WRONG[change]
    assert not result
    assert result.guilty == (path,), str(result)
    assert result.notes[0].startswith(f"in {case}, ")
    assert {row.inputs for row in result.rows if not row.ok} >= {case}
    assert f"guilty: {path}" in str(result)


@pytest.mark.usefixtures("as_given")
def test_a_compiled_port_is_looked_at_uncompiled(few: None) -> None:
    port = layers()
    port[0].eps = 0.1
    assert verify(layers(), compiled(port), X).guilty == ("0",)


def test_weights_that_differ_are_named_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "forward", lambda self, input_ids: pytest.fail("the model was called"))
    model = words()
    port = words(of=model)
    with torch.no_grad():
        port.blocks[1].attention.o.weight.copy_(model.blocks[1].attention.o.weight.t().clone())
    result = verify(model, port, IDS)
    assert result.guilty == ("blocks.1.attention.o",)
    assert (
        "blocks.1.attention.o.weight is the original's transpose: transpose it, or pass weights"
        in result.title
    )
    assert (
        "has other values than the original's: load the original's weights first"
        in verify(model, Words(), IDS).title
    )


@pytest.mark.parametrize("change", [{"momentum": 0.2}, {"eps": 0.1}, {}], ids=str)
def test_state_that_a_forward_updates_is_compared(change: dict[str, float], few: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    before = copy.deepcopy(model.state_dict())
    port = copy.deepcopy(model)
    vars(port[1]).update(change)
    result = verify(model, port, torch.randn(6, WIDTH))
    assert bool(result) is not change
    assert bool(result) is (not change)
    assert result.guilty == (("1",) if change else ())
    assert "output buffer 1.running_mean" in {row.name for row in result.rows}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Int8(nn.Module):
    """A linear whose weight is held in int8, with a scale per row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


def quantized_dynamically(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)


def quantized_by_hand(model: nn.Module) -> nn.Module:
    return nn.Sequential(Int8(model[0]), nn.ReLU(), Int8(model[2]))


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning")
@pytest.mark.parametrize("quantized", [quantized_by_hand, quantized_dynamically])
def test_a_quantized_copy_is_run_as_it_is(quantized: Callable[[nn.Module], nn.Module], few: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    result = verify(model, quantized(model), X)
    assert result.guilty == ("0",)
    assert result.notes[-1].startswith("not compared: the gradients of 0.weight, ")


def test_a_quantized_copy_is_the_same_as_its_dequantized_weights() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    quantized = quantized_by_hand(model)
    with torch.no_grad():
        for place in (0, 2):
            model[place].weight.copy_(quantized[place].weight * quantized[place].scale)
    assert verify(model, quantized, X)


def test_a_dead_model_is_not_verified() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(model[1].weight)
    result = verify(model, copy.deepcopy(model), X)
    assert not result
    assert result.dead == ("0.weight", "0.bias")
    assert "NOT verified, output is the same for all inputs: train the model first" in result.title


def test_parameters_that_no_gradient_reaches_are_listed() -> None:
    model = Returns(RESULTS["tensor"])
    model.unused = nn.Linear(3, 3)
    result = verify(model, copy.deepcopy(model), X)
    assert result
    assert result.dead == ("unused.weight", "unused.bias")
    assert "dead: no gradient reaches unused.weight, unused.bias" in str(result)


# What cannot be compared is said


def differing() -> Iterator[tuple[Any, Any, str]]:
    one = Returns(RESULTS["tensor"])
    two = Returns(lambda y: {"y": y, "z": y})
    yield one, two, r"got a tensor \(float32\[2, 5, 8\]\) from Returns and y \(float32\[2, 5, 8\]\), z "
    yield one, Returns(str), "expected tensors from Returns, got a str; return a tensor, or a tuple"
    yield (
        one,
        F.relu,
        "expected a converted model as the second model, or any torch.nn.Module, got a function",
    )
    yield F.relu, one, "expected a converted model as the first model, or any torch.nn.Module, got a function"
    yield (
        one,
        Returns(lambda y: y[5]),
        "expected example inputs on which both models run, got .*; Returns raised Index",
    )


@pytest.mark.parametrize(("model", "other", "sentence"), [*differing()])
def test_pairs_that_cannot_be_compared(model: Any, other: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        verify(model, other, X)


def test_a_second_model_without_a_mask_is_compared_without_padding() -> None:
    class NoMask(Words):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids)

    port = NoMask()
    port.load_state_dict(words().state_dict())
    result = verify(words(), port, IDS)
    assert result
    assert result.skipped == ("left-padded, the second model takes no attention_mask",)


def test_assert_same_shows_the_comparison(few: None) -> None:
    model = Returns(RESULTS["tensor"])
    te_transform.assert_same(model, copy.deepcopy(model), X)
    with pytest.raises(AssertionError, match=r"(?s)Returns: NOT the same.*guilty: the model itself"):
        te_transform.assert_same(model, Returns(lambda y: 1.01 * y), X)
    assert isinstance(verify(model, model, X), Verification)


# What one comparison of outputs does not show


def kept_from_first_call(module: nn.Module, x: Tensor) -> Tensor:
    vars(module).setdefault("length", x.shape[1])
    return module.linear(x) * (1.0 if module.length == x.shape[1] else 1.1)


def kept_graph(module: nn.Module, x: Tensor) -> Tensor:
    vars(module).setdefault("doubled", 2 * module.linear.weight)
    return F.linear(x, module.doubled / 2, module.linear.bias)


class Calls(Returns):
    """A function of the module and its input."""

    def forward(self, x: Tensor) -> Any:
        return self.result(self, x)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("keeps", [kept_from_first_call, kept_graph])
def test_a_model_that_keeps_earlier_values_fails(keeps: Callable[[nn.Module, Tensor], Tensor]) -> None:
    result = verify(Returns(lambda y: y), Calls(keeps), X)
    assert not result
    assert all("after other calls" in row.inputs for row in result.rows if not row.ok)


DROPOUTS = {
    "another p": (lambda m: setattr(m.blocks[1].drop, "p", 0.1), "blocks.1.drop", "training"),
    "in evaluation": (
        lambda m: setattr(m.blocks[1].drop, "forward", partial(F.dropout, p=0.5)),
        "blocks.1.drop",
        "evaluation",
    ),
    "in attention": (lambda m: setattr(m.blocks[0].attention, "p", 0.2), "blocks.0.attention", "training"),
}


@pytest.mark.parametrize("which", DROPOUTS)
def test_dropouts_have_the_same_probabilities(which: str) -> None:
    change, path, mode = DROPOUTS[which]
    model = words()
    port = words(of=model)
    change(port)
    result = verify(model, port, IDS)
    assert not result
    assert result.guilty == (path,)
    assert result.notes[0].startswith(f"in example inputs, {mode}, output dropout with p=0.")


def test_the_dropouts_of_a_compiled_model_are_seen() -> None:
    port = layers()
    port[1].p = 0.1
    assert verify(layers(), compiled(port), X).guilty == ("1",)


def test_another_number_of_dropouts_is_noted() -> None:
    parts = Calls(lambda m, x: torch.cat([F.dropout(row, 0.5, m.training) for row in m.linear(x).split(1)]))
    result = verify(Calls(lambda m, x: F.dropout(m.linear(x), 0.5, m.training)), parts, X)
    assert result, str(result)
    assert result.notes == (
        "in training, the first model runs 1 dropouts and the second runs 2: check that none is missing",
    )


@pytest.mark.usefixtures("few")
def test_inputs_that_a_forward_writes_to() -> None:
    writes, reads = Calls(lambda m, x: m.linear(x.mul_(2))), Calls(lambda m, x: m.linear(2 * x))
    assert verify(writes, copy.deepcopy(writes), X)
    for models, told in (((writes, reads), "is missing"), ((reads, writes), "is not in the original")):
        failed = {str(row) for row in verify(*models, X).rows if not row.ok}
        assert f"output written input 0 {told}" in failed


class Cache:
    """What a model keeps for its next call; it refers to itself."""

    def __init__(self, keys: Tensor) -> None:
        self.layers, self.owner = [{"keys": keys}], self


def holds(scale: float, name: str = "cache") -> nn.Module:
    return Calls(lambda m, x: {"y": m.linear(x), name: Cache(scale * m.linear(x))})


NOT_TENSORS = {
    "a cache": (holds(1.0), holds(1.5), "output cache.layers.0.keys has an error of 5.0e-01"),
    "a number": (
        Calls(lambda m, x: (m.linear(x), 2)), Calls(lambda m, x: (m.linear(x), 3)), "output 1 has an error of"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NOT_TENSORS)
def test_caches_and_numbers_are_compared(kind: str, few: None) -> None:
    first, second, sentence = NOT_TENSORS[kind]
    assert verify(first, copy.deepcopy(first), X)
    result = verify(first, second, X)
    assert result.guilty == ("",)
    assert sentence in result.notes[0]


def test_a_cache_that_one_model_returns_is_noted() -> None:
    result = verify(holds(1.0), holds(1.0, "kept"), X)
    assert result, str(result)
    assert result.notes == (
        "not compared: values in the output cache, which the second model does not return",
        "not compared: values in the output kept, which the first model does not return",
    )


@pytest.mark.usefixtures("as_given")
def test_a_key_value_cache_of_transformers_is_compared(few: None) -> None:
    def scaled(model: nn.Module, args: Any, result: Any) -> None:
        layer = result.past_key_values.layers[0]
        layer.values = 1.5 * layer.values

    model, port = llama(), llama()
    port.register_forward_hook(scaled)
    result = verify(model, port, {"input_ids": LLAMA_IDS[:2], "use_cache": True})
    wrong = {row.name for row in result.rows if not row.ok}
    assert wrong == {"output past_key_values.layers.0.values"}


def test_a_batch_of_one_is_compared(few: None) -> None:
    port = Calls(lambda m, x: m.linear(x) * (2.0 if x.shape[0] == 1 else 1.0))
    result = verify(Calls(lambda m, x: m.linear(x)), port, X)
    assert wrong_inputs(result) == {ONE_LONGER_ROW}


ONE_LONGER_ROW = "size 1 instead of 2 and size 6 instead of 5"


def wrong_inputs(result: Verification) -> set[str]:
    return {row.inputs.partition(",")[0] for row in result.rows if not row.ok}


def test_a_longer_row_is_compared(few: None) -> None:
    port = Calls(lambda m, x: m.linear(x) * (2.0 if x.shape[1] > X.shape[1] else 1.0))
    assert wrong_inputs(verify(Calls(lambda m, x: m.linear(x)), port, X)) == {ONE_LONGER_ROW}


@pytest.mark.parametrize("of_model", [True, False])
def test_no_row_is_longer_than_a_table(of_model: bool, few: None) -> None:
    """On a GPU, an index beyond the end of a table ends the process."""

    def looked_up(module: nn.Module, x: Tensor) -> Tensor:
        assert x.shape[1] <= X.shape[1]
        return module.linear(x)

    models = [Calls(looked_up), Calls(looked_up)]
    models[not of_model].register_buffer("table", torch.zeros(X.shape[1], 1), persistent=False)
    result = verify(*models, X)
    assert result, str(result)
    assert result.skipped == ()
    assert "size 1 instead of 2, training" in {row.inputs for row in result.rows}


def test_a_model_that_rejects_longer_rows_is_compared_on_one_row(few: None) -> None:
    def short(module: nn.Module, x: Tensor) -> Tensor:
        assert x.shape[1] <= X.shape[1]
        return module.linear(x)

    result = verify(Calls(short), Calls(short), X)
    assert result, str(result)
    assert "size 1 instead of 2, training" in {row.inputs for row in result.rows}


def test_autocast_in_evaluation_is_compared(few: None) -> None:
    def wrong(module: nn.Module, x: Tensor) -> Tensor:
        is_wrong = torch.is_autocast_enabled("cpu") and not module.training
        return module.linear(x) * (2.0 if is_wrong else 1.0)

    result = verify(Calls(lambda m, x: m.linear(x)), Calls(wrong), X)
    assert {row.inputs for row in result.rows if not row.ok} == {
        "example inputs, evaluation, no gradients, autocast"
    }


class Positions(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.start, self.table = start, nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(self.start, self.start + x.shape[1]))


def test_wrong_positions_are_a_fault_of_their_caller(few: None) -> None:
    first, second = nn.Sequential(Positions(0)), nn.Sequential(Positions(1))
    second.load_state_dict(first.state_dict())
    result = verify(first, second, X)
    assert result.guilty == ("0",)
    assert "what enters 0.table differs" in result.notes[0]


def test_a_forward_that_writes_to_its_weights_is_refused() -> None:
    model = Calls(lambda m, x: m.linear(x))
    port = Calls(lambda m, x: (m.linear(x), m.linear.weight.detach().mul_(1))[0])
    with pytest.raises(ValueError, match="expected a forward that does not write to its parameters"):
        verify(model, port, X)


def test_buffers_that_only_the_second_model_updates(few: None) -> None:
    models = [Calls(lambda m, x: m.linear(x)), Calls(lambda m, x: m.linear(x + 0 * m.count.add_(1)))]
    for model in models:
        model.register_buffer("count", torch.zeros(()))
    result = verify(*models, X)
    assert "output buffer count is not in the original" in result.notes[0]


class Scaled(torch.autograd.Function):
    """An identity whose gradient is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.1 * gradient


def test_complex_outputs_and_weights_are_compared(few: None) -> None:
    def product(factors: Callable[[Tensor], Tensor]) -> nn.Module:
        made = Calls(lambda m, x: factors(m.turn) * torch.fft.fft(m.linear(x)))
        made.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.arange(float(WIDTH))))
        return made

    model = product(lambda turn: turn)
    assert verify(model, product(lambda turn: torch.view_as_complex(torch.view_as_real(turn))), X)
    wrong = verify(model, product(Scaled.apply), X)
    assert "gradient of turn has an error of" in wrong.notes[0]


def test_a_model_without_finite_numbers_is_not_verified() -> None:
    model = Returns(lambda y: y * float("nan"))
    result = verify(model, copy.deepcopy(model), X)
    assert not result
    assert "NOT verified, output has no finite number for any inputs" in result.title


@pytest.mark.usefixtures("few")
def test_padding_on_the_right_is_compared() -> None:
    model = words()
    port = words(of=model)
    forward = port.forward
    port.forward = lambda input_ids, attention_mask=None: forward(
        input_ids, None if attention_mask is None else attention_mask.sort(-1).values
    )
    result = verify(model, port, IDS)
    assert not result
    assert {row.inputs.partition(",")[0] for row in result.rows if not row.ok} == {"right-padded"}


def test_a_small_gradient_must_not_get_lost_and_bool_outputs_do_not_disturb(few: None) -> None:
    def small(bias: Callable[[nn.Module], Tensor]) -> nn.Module:
        made = Calls(lambda m, x: (m.linear(x) + 1e-3 * bias(m), x > 0)).bfloat16()
        made.small = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        return made

    model = small(lambda m: m.small)
    assert verify(model, small(lambda m: 1 * m.small), X.bfloat16())
    wrong = verify(model, small(lambda m: m.small.detach()), X.bfloat16())
    assert "gradient of small has an error of" in str(wrong.notes)
    assert "more than half of its own norm" in str(wrong.notes)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "script", [lambda m: torch.jit.trace(m, X), torch.jit.script], ids=["trace", "script"]
)
def test_a_module_of_torch_jit(script: Callable[[nn.Module], nn.Module], few: None) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    port = copy.deepcopy(model)
    port[0].eps = 1e-2
    assert verify(model, script(copy.deepcopy(model)), X)
    assert not verify(model, script(port), X)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_a_module_of_torch_jit_cannot_draw_random_numbers(probability: float, few: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(probability))
    scripted = torch.jit.script(copy.deepcopy(model))
    if not probability:
        assert verify(model, scripted, X)
        return
    sentence = "expected modules of torch.jit without random numbers, got a RecursiveScriptModule that draws"
    for pair in ((model, scripted), (scripted, model)):
        with pytest.raises(ValueError, match=sentence):
            verify(*pair, X)


def exported(model: nn.Module, dim: Any = torch.export.Dim.AUTO) -> nn.Module:
    return torch.export.export(model, (X,), dynamic_shapes=((dim, dim, None),)).module()


def test_a_module_of_torch_export(few: None) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    port = copy.deepcopy(model)
    port[0].eps = 1e-2
    found = exported(model)
    with pytest.raises(NotImplementedError):
        found.eval()
    assert verify(model, found, X)
    assert verify(found, model, X)
    with pytest.raises(NotImplementedError):  # as before
        found.eval()
    assert not verify(model, exported(port), X)


def test_a_module_of_torch_export_has_the_dropouts_and_sizes_of_its_export(few: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))
    result = verify(model, exported(model, dim=None), X)
    reasons = {f"{row.inputs}: {row}" for row in result.rows if not row.ok}
    assert "example inputs, evaluation: output dropout with p=0.1 is not in the original" in reasons
    assert all("dropout" in reason and ", training" not in reason for reason in reasons)
    sizes = ("size 1 instead of 2", "size 3 instead of 2", "size 4 instead of 5")
    for size, sentence in zip(sizes, result.skipped, strict=True):
        assert sentence.startswith(f"{size}, the second model raised Asser")
        assert sentence.endswith("; pass dynamic_shapes= to torch.export")


@pytest.mark.parametrize("draw", [torch.randn_like, lambda x: torch.empty_like(x).uniform_()])
def test_random_numbers_are_the_same_in_fp64(draw: Callable[[Tensor], Tensor], few: None) -> None:
    model = Calls(lambda m, x: m.linear(x + draw(x)))
    assert verify(model, copy.deepcopy(model), X)
    assert not verify(model, Calls(lambda m, x: m.linear(x + 1.01 * draw(x))), X)


def test_after_a_failure_further_inputs_get_fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def counted(*arguments: Any, **how: Any) -> replay.Run:
        seeds.extend([how["rounding"]] if "rounding" in how else [])
        return replay.run(*arguments, **how)

    monkeypatch.setattr(compare, "run", counted)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    other = copy.deepcopy(model)
    other[0].eps = 0.1
    found = verify(model, other, X)

    failed = {row.inputs for row in found.rows if not row.ok}
    assert len(failed) > 5
    assert len(seeds) == compare.DRAWS + compare.SETTLED_DRAWS * (len(failed) - 1)


@pytest.mark.parametrize(
    ("inputs", "names", "told"),
    [
        (torch.zeros(0, 8), None, r"expected example inputs with values, got float32\[0, 8\]; pass a batch"),
        (torch.zeros(2, 8), 3, "expected a dict or a function from names .* of the second, got 3; leave it"),
    ],
)
def test_wrong_arguments_are_said(inputs: Tensor, names: Any, told: str) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=told):
        te_transform.verify(model, copy.deepcopy(model), inputs, names=names)
