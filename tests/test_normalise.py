"""Normalising: the graph computes what it did, in the words of the vocabulary, whatever the spelling was."""

import math
import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform import vocabulary
from te_transform.inputs import Inputs, as_inputs
from te_transform.normalise import normalise
from te_transform.trace import Recording, record
from tests.zoo import CASES, EXTRA, Case, tensors, zero_dropout

ALL = CASES | EXTRA
WORDS = {f for f in vars(vocabulary).values() if getattr(f, "__module__", "") == vocabulary.__name__}
BOUND = 1e-5  # relative to the output's norm, in fp32
HIDDEN, HEADS, WIDTH, LENGTH, BATCH = 32, 4, 8, 6, 3


def run(recording: Recording, inputs: Inputs) -> list[Tensor]:
    given = dict(inputs.named_leaves(recording.root, *inputs.clone()))
    names = [node.target for node in recording.graph.nodes if node.op == "placeholder"]
    torch.manual_seed(0)
    with torch.no_grad():
        return list(tensors(recording.module()(*(given[name] for name in names))))


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance of an output from what it should be, relative to that one's norm."""
    pairs = zip(actual, expected, strict=True)
    return max(((a.double() - e.double()).norm() / e.double().norm()).item() for a, e in pairs)


def words(recording: Recording) -> Counter:
    """How often the graph says each word, but for casts and columns."""
    said = (node.target for node in recording.graph.nodes)
    return Counter(t.__name__ for t in said if t in WORDS - {vocabulary.cast, vocabulary.columns})


def targets(recording: Recording) -> set:
    return {node.target for node in recording.graph.nodes if node.op == "call_function"}


def the(recording: Recording, word: object):
    """The arguments of the only call of `word`."""
    (node,) = (n for n in recording.graph.nodes if n.target is word)
    return node.args


class Model(nn.Module):
    """A function of a model's parameters and its inputs, as a module."""

    def __init__(self, function, **parameters: Tensor):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            if name == "cache":
                self.register_buffer(name, value)
            else:
                setattr(self, name, nn.Parameter(value))

    def forward(self, *args):
        return self.function(self, *args)


def normalised(
    function, *args: Tensor, train: bool = True, bound: float = BOUND, **parameters: Tensor
) -> Recording:
    """The normalised recording of `function(parameters, *args)`, after a check that it computes the same."""
    inputs = Inputs(args)
    recording = record(Model(function, **parameters), inputs, train=train)
    before = run(recording, inputs)
    normalise(recording)
    recording.graph.lint()
    assert error(run(recording, inputs), before) <= bound
    return recording


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Whole models


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
def test_computes_what_was_recorded(case: Case, padded: bool, train: bool) -> None:
    if padded and not case.padded_inputs:
        pytest.skip("takes no mask")
    model = zero_dropout(case.build())
    seen, fresh = (as_inputs(model, case.sample(padded=padded, seed=seed))[0] for seed in (0, 1))
    recording = record(model, seen, train=train)
    before = run(recording, seen), run(recording, fresh)
    normalise(recording)
    recording.graph.lint()
    for inputs, expected in zip((seen, fresh), before, strict=True):
        assert error(run(recording, inputs), expected) <= BOUND


_TWO_GATED = {"linear": 15, "rms_norm": 5, "rope": 4, "sdpa": 2}
_TWO_GPT = {"linear": 9, "layer_norm": 5, "sdpa": 2, "dropout": 7}
FOUND = {
    "quickstart": {"layer_norm": 4, "linear": 8, "sdpa": 2, "gelu_tanh": 2, "dropout": 2},
    "quickstart_mask": {
        "layer_norm": 4,
        "linear": 8,
        "sdpa": 2,
        "gelu_tanh": 2,
        "dropout": 2,
        "kept": 2,
        "zero_hidden": 2,
    },
    "nanogpt_flash": _TWO_GPT | {"gelu": 2, "dropout": 5},
    "nanogpt_manual": _TWO_GPT | {"gelu": 2, "dropout": 5},
    "gpt2": _TWO_GPT | {"gelu_tanh": 2, "dropout": 5},
    "gpt2_eager": _TWO_GPT | {"gelu_tanh": 2, "dropout": 5},
    "llama": _TWO_GATED | {"silu": 2},
    "llama_eager": _TWO_GATED | {"silu": 2},
    "mistral": _TWO_GATED | {"silu": 2},
    "qwen2": _TWO_GATED | {"silu": 2},
    "qwen3": _TWO_GATED | {"silu": 2, "rms_norm": 9},
    "gemma": _TWO_GATED | {"gelu_tanh": 2},
    "gemma2": _TWO_GATED | {"gelu_tanh": 2, "rms_norm": 9},
    "gemma3_text": _TWO_GATED | {"gelu_tanh": 2, "rms_norm": 13},
    "phi3": _TWO_GATED | {"silu": 2, "linear": 9},
    "mixtral": _TWO_GATED | {"silu": 2, "linear": 11},
    "bert": {"linear": 14, "layer_norm": 6, "sdpa": 2, "gelu": 3, "dropout": 5},
    "distilbert": {"linear": 14, "layer_norm": 6, "sdpa": 2, "gelu": 3, "dropout": 3},
    "roberta": {"linear": 14, "layer_norm": 6, "sdpa": 2, "gelu": 3, "dropout": 5},
    "gpt_neox": {"linear": 9, "layer_norm": 5, "sdpa": 2, "gelu": 2, "rope": 4},
    "opt": {"linear": 13, "layer_norm": 5, "sdpa": 2, "relu": 2, "dropout": 4},
    "vit": {"linear": 13, "layer_norm": 5, "sdpa": 2, "gelu": 2},
    "t5": {"linear": 33, "rms_norm": 12, "sdpa": 6, "relu": 4, "dropout": 18},
    "falcon": {"linear": 9, "layer_norm": 3, "sdpa": 2, "gelu": 2, "rope": 4},
    "bloom": {"linear": 9, "layer_norm": 6, "sdpa": 2, "gelu_tanh": 2},
    "torch_encoder_pre": {"linear": 8, "layer_norm": 4, "sdpa": 2, "relu": 2, "dropout": 6},
    "torch_encoder_post": {"linear": 8, "layer_norm": 4, "sdpa": 2, "relu": 2, "dropout": 6},
    "torch_mha": {"linear": 2, "layer_norm": 1, "sdpa": 1},
    "torch_mha_bare": {"linear": 2, "dropout": 1},  # its attention weights are part of the answer
    "clip_text": {"linear": 12, "layer_norm": 5, "sdpa": 2, "quick_gelu": 2},
    "clip_vision": {"linear": 12, "layer_norm": 6, "sdpa": 2, "quick_gelu": 2},
}


@pytest.mark.parametrize("name", FOUND)
def test_finds_the_words(name: str) -> None:
    case = ALL[name]
    model = case.build()
    recording = normalise(record(model, as_inputs(model, case.sample())[0]))
    assert words(recording) == FOUND[name]
    if name not in ("torch_mha_bare", "mixtral"):  # the router of mixtral has a softmax of its own
        assert not targets(recording) & {
            torch.rsqrt,
            torch.softmax,
            torch.erf,
            torch.bmm,
            torch.addmm,
            F.layer_norm,
        }


@pytest.mark.parametrize(
    "name", ["quickstart_mask", "nanogpt_manual", "llama", "gemma2", "t5", "llama_eager"]
)
def test_says_the_same_in_bf16(name: str) -> None:
    case = ALL[name]
    model = zero_dropout(case.build())
    expected = words(normalise(record(model, as_inputs(model, case.sample())[0])))
    sample = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.sample().items()}
    inputs = as_inputs(model.bfloat16(), sample)[0]
    recording = record(model, inputs)
    before = run(recording, inputs)
    assert words(normalise(recording)) == expected
    assert error(run(recording, inputs), before) < 0.03


@pytest.mark.parametrize(
    "name", ["quickstart_mask", "nanogpt_manual", "gpt2", "llama", "llama_eager", "gemma", "t5", "torch_mha"]
)
def test_symbolic_recordings_say_the_same_and_gain_no_guard(name: str) -> None:
    case = ALL[name]
    model = case.build()
    inputs = as_inputs(model, case.sample())[0]
    recording = record(model, inputs, free_sizes=frozenset((2, 7, 12)))
    guards = len(recording.shapes.guards)
    assert words(normalise(recording)) == words(normalise(record(model, inputs)))
    assert len(recording.shapes.guards) == guards


def test_words_belong_to_the_module_that_spelled_them() -> None:
    model = ALL["llama"].build()
    recording = normalise(record(model, as_inputs(model, ALL["llama"].sample())[0]))
    by_word = {word: [n.meta["path"] for n in recording.graph.nodes if n.target is word] for word in WORDS}
    assert by_word[vocabulary.rms_norm][0] == "model.layers.0.input_layernorm"
    assert by_word[vocabulary.linear][0] == "model.layers.0.self_attn.q_proj"
    assert by_word[vocabulary.sdpa] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all("tensor_meta" in node.meta for node in recording.graph.nodes if node.target in WORDS)


def test_is_done_after_once() -> None:
    for name in ("quickstart_mask", "llama_eager", "gpt2", "falcon"):
        model = ALL[name].build()
        recording = normalise(record(model, as_inputs(model, ALL[name].sample())[0]))
        once = str(recording.graph)
        assert str(normalise(recording).graph) == once, name


# Linears

LINEARS = {
    "F.linear": lambda m, x: F.linear(x, m.w, m.b),
    "matmul T": lambda m, x: x @ m.w.T + m.b,
    "matmul t": lambda m, x: torch.matmul(x, m.w.t()) + m.b,
    "bias first": lambda m, x: m.b + torch.matmul(x, m.w.transpose(0, 1)),
    "in place": lambda m, x: (x @ m.w.mT).add_(m.b),
    "addmm": lambda m, x: torch.addmm(m.b, x.view(-1, HIDDEN), m.w.t()).view(*x.shape[:-1], -1),
    "einsum": lambda m, x: torch.einsum("bsi,oi->bso", x, m.w) + m.b,
}


@pytest.mark.parametrize("spelling", LINEARS.values(), ids=LINEARS)
def test_linear(spelling) -> None:
    parameters = {"w": torch.randn(20, HIDDEN), "b": torch.randn(20)}
    recording = normalised(spelling, torch.randn(2, 5, HIDDEN), **parameters)
    assert words(recording) == {"linear": 1}
    x, weight, bias = the(recording, vocabulary.linear)
    assert (x.op, weight.target, bias.target) == ("placeholder", "w", "b")


def test_linear_with_its_weight_transposed() -> None:
    parameters = {"w": torch.randn(HIDDEN, 20), "b": torch.randn(20)}
    for spelling in (
        lambda m, x: torch.addmm(m.b, x.view(-1, HIDDEN), m.w).view(2, 5, 20),
        lambda m, x: x @ m.w + m.b,
    ):
        _, weight, _ = the(normalised(spelling, torch.randn(2, 5, HIDDEN), **parameters), vocabulary.linear)
        assert weight.target is torch.t
        assert weight.args[0].target == "w"
        assert weight.meta["tensor_meta"].shape == (20, HIDDEN)


def test_a_linear_says_that_its_weight_is_computed() -> None:
    recording = normalised(
        lambda m, x: F.linear(x, m.w * 2), torch.randn(2, 5, HIDDEN), w=torch.randn(20, HIDDEN)
    )
    _, weight, _ = the(recording, vocabulary.linear)
    assert weight.target is torch.mul


NOT_LINEARS = {
    "a product with a computed weight": lambda m, x: x @ (m.w * 2),
    "the weight is an input": lambda m, x: x @ x.mT,
    "addmm scales": lambda m, x: torch.addmm(m.b, x[0], m.w, alpha=2),
}


@pytest.mark.parametrize("spelling", NOT_LINEARS.values(), ids=NOT_LINEARS)
def test_not_a_linear(spelling) -> None:
    recording = normalised(
        spelling, torch.randn(2, 5, HIDDEN), w=torch.randn(HIDDEN, HIDDEN), b=torch.randn(HIDDEN)
    )
    assert vocabulary.linear not in targets(recording)


def test_no_bias_that_is_not_one_number_per_column() -> None:
    recording = normalised(
        lambda m, x: x @ m.w.T + m.b, torch.randn(2, 5, HIDDEN), w=torch.randn(5, HIDDEN), b=torch.randn(5, 5)
    )
    assert words(recording) == {"linear": 1}
    assert torch.add in targets(recording)
    read_twice = normalised(
        lambda m, x: (y := x @ m.w.T) * (y + m.b),
        torch.randn(2, HIDDEN),
        w=torch.randn(5, HIDDEN),
        b=torch.randn(5),
    )
    assert the(read_twice, vocabulary.linear)[2] is None


# Norms


def _inverse(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


RMS_NORMS = {
    "llama": lambda m, x: m.w * (x.float() * _inverse(x.float())).to(x.dtype),
    "t5": lambda m, x: m.w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)),
    "meta": lambda m, x: (x.float() * _inverse(x.float())).type_as(x) * m.w,
    "litgpt": lambda m, x: (
        x.float() * torch.rsqrt(torch.mean(x.float() * x.float(), dim=-1, keepdim=True) + 1e-6) * m.w.float()
    ).to(x.dtype),
    "torchtune": lambda m, x: F.rms_norm(x.float(), m.w.shape, weight=m.w.float(), eps=1e-6).to(x.dtype),
    "F.rms_norm": lambda m, x: F.rms_norm(x, m.w.shape, m.w, 1e-6),
    "sqrt": lambda m, x: x / torch.sqrt(x.square().mean(-1, True) + 1e-6) * m.w,
    "one over sqrt": lambda m, x: m.w * (x * (1 / (x**2).mean(dim=(-1,), keepdim=True).add(1e-6).sqrt())),
    "pow": lambda m, x: x * (1e-6 + torch.mean(x * x, -1, True)) ** -0.5 * m.w,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", RMS_NORMS.values(), ids=RMS_NORMS)
def test_rms_norm(spelling, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and spelling is RMS_NORMS["t5"]:
        pytest.skip("rounds to bf16 in a cast that T5 has beside")
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    recording = normalised(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
    assert targets(recording) == {vocabulary.rms_norm}
    x, weight, eps, centred = the(recording, vocabulary.rms_norm)
    assert (x.op, weight.target, eps, centred) == ("placeholder", "w", 1e-6, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_zero_centred_gamma(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(HIDDEN, dtype=dtype)
    for spelling in (
        lambda m, x: (x.float() * _inverse(x.float()) * (1.0 + m.w.float())).type_as(x),
        lambda m, x: ((m.w.float() + 1) * (x.float() * _inverse(x.float()))).to(x.dtype),
    ):
        recording = normalised(spelling, x, w=w, bound=BOUND if dtype is torch.float32 else 0.02)
        assert targets(recording) == {vocabulary.rms_norm}
        assert the(recording, vocabulary.rms_norm)[2:] == (1e-6, True)


def test_rms_norm_without_eps_has_that_of_its_arithmetic() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = 1e-3 * torch.randn(4, HIDDEN, dtype=dtype)
        model = nn.RMSNorm(HIDDEN, dtype=dtype)
        recording = record(model, Inputs((x,)))
        before = run(recording, Inputs((x,)))
        assert words(normalise(recording)) == {"rms_norm": 1}
        assert error(run(recording, Inputs((x,))), before) <= BOUND


NOT_RMS_NORMS = {
    "no eps": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * m.w,
    "x-transformers": lambda m, x: F.normalize(x, dim=-1) * HIDDEN**0.5 * m.w,
    "another dimension": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6) * m.w,
    "a cube": lambda m, x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6) * m.w,
    "of something else": lambda m, x: x * _inverse(x + 1) * m.w,
    "two plus the weight": lambda m, x: x * _inverse(x) * (2 + m.w),
    "the weight is computed": lambda m, x: x * _inverse(x) * (m.w * 2),
    "the sum": lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * m.w,
}


@pytest.mark.parametrize("spelling", NOT_RMS_NORMS.values(), ids=NOT_RMS_NORMS)
def test_not_an_rms_norm(spelling) -> None:
    assert words(normalised(spelling, torch.randn(2, HIDDEN, HIDDEN), w=torch.randn(HIDDEN))) == {}


def test_a_cast_behind_a_norm_stays_if_it_widens() -> None:
    x, w = torch.randn(4, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()
    recording = normalised(lambda m, x: RMS_NORMS["llama"](m, x).float(), x, w=w, bound=0.02)
    assert targets(recording) == {vocabulary.rms_norm, vocabulary.cast}


def test_layer_norm() -> None:
    x, w, b = torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN), torch.randn(HIDDEN)
    for spelling, found in (
        (lambda m, x: F.layer_norm(x, (HIDDEN,), m.w, m.b, 1e-6), ("w", "b", 1e-6, False)),
        (lambda m, x: F.layer_norm(x, [HIDDEN]), (None, None, 1e-5, False)),
        (lambda m, x: torch.layer_norm(x, (HIDDEN,), m.w), ("w", None, 1e-5, False)),
        (lambda m, x: F.layer_norm(x, (HIDDEN,), 1 + m.w, m.b), ("w", "b", 1e-5, True)),
    ):
        args = the(normalised(spelling, x, w=w, b=b), vocabulary.layer_norm)[1:]
        assert tuple(getattr(a, "target", a) for a in args) == found


def test_not_a_layer_norm_of_the_last_dimension() -> None:
    x = torch.randn(2, 5, HIDDEN)
    recording = normalised(lambda m, x: F.layer_norm(x, (5, HIDDEN), m.w), x, w=torch.randn(5, HIDDEN))
    assert targets(recording) == {F.layer_norm}


def test_layer_norm_in_fp32() -> None:
    x, w, b = (torch.randn(*s, HIDDEN, dtype=torch.bfloat16) for s in ((2, 5), (), ()))
    recording = normalised(
        lambda m, x: F.layer_norm(x.float(), (HIDDEN,), m.w.float(), m.b.float()).type_as(x),
        x,
        w=w,
        b=b,
        bound=0.02,
    )
    assert targets(recording) == {vocabulary.layer_norm}


# Activations

_TANH = math.sqrt(2 / math.pi)
GELUS_TANH = {
    "F.gelu": lambda m, x: F.gelu(x, approximate="tanh"),
    "gpt2": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda m, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "bloom": lambda m, x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "products": lambda m, x: (1 + torch.tanh((0.044715 * x * x * x + x) * _TANH)) * (x * 0.5),
    "halved": lambda m, x: x * (1 + torch.tanh(_TANH * (x + x**3 * 0.044715))) / 2,
}
GELUS = {
    "F.gelu": lambda m, x: F.gelu(x),
    "esm": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "bert": lambda m, x: 0.5 * (x * (torch.erf(x * 0.7071067811865475) + 1)),
}
OTHERS = {
    "quick_gelu": [lambda m, x: x * torch.sigmoid(1.702 * x), lambda m, x: (x * 1.702).sigmoid() * x],
    "silu": [lambda m, x: F.silu(x), lambda m, x: x * x.sigmoid(), lambda m, x: F.sigmoid(x) * x],
    "relu": [lambda m, x: F.relu(x), lambda m, x: torch.relu(x), lambda m, x: (x + 1).relu_()],
    "dropout": [lambda m, x: F.dropout(x, 0.1, True), lambda m, x: torch.dropout(x, 0.1, True)],
}
SPELLINGS = {("gelu_tanh", k): v for k, v in GELUS_TANH.items()} | {("gelu", k): v for k, v in GELUS.items()}
SPELLINGS |= {(word, str(i)): s for word, spellings in OTHERS.items() for i, s in enumerate(spellings)}


@pytest.mark.parametrize(
    ("word", "spelling"), [(k[0], v) for k, v in SPELLINGS.items()], ids=map(" ".join, SPELLINGS)
)
def test_activation(word: str, spelling) -> None:
    recording = normalised(spelling, torch.randn(2, 5, HIDDEN))
    assert words(recording) == {word: 1}
    assert not targets(recording) & {torch.mul, torch.tanh, torch.erf}


NOT_ACTIVATIONS = {
    "the cube": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.0447 * torch.pow(x, 3.0)))),
    "the square": lambda m, x: 0.5 * x * (1.0 + torch.tanh(_TANH * (x + 0.044715 * torch.pow(x, 2.0)))),
    "the root": lambda m, x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "the half": lambda m, x: 0.6 * x * (1.0 + torch.erf(x / math.sqrt(2))),
    "the sign": lambda m, x: 0.5 * x * (1.0 - torch.erf(x / math.sqrt(2))),
    "the input": lambda m, x: 0.5 * (x + 1) * (1.0 + torch.erf(x / math.sqrt(2))),
    "not over root two": lambda m, x: 0.5 * x * (1.0 + torch.erf(x / 1.5)),
}


@pytest.mark.parametrize("spelling", NOT_ACTIVATIONS.values(), ids=NOT_ACTIVATIONS)
def test_not_an_activation(spelling) -> None:
    assert words(normalised(spelling, torch.randn(2, 5, HIDDEN))) == {}


def test_gates_come_first() -> None:
    def gated(m, x):
        up, gate = (x @ m.w.T).chunk(2, -1)
        return up * F.silu(gate)

    recording = normalised(gated, torch.randn(2, 5, HIDDEN), w=torch.randn(16, HIDDEN))
    gate, up = the(recording, torch.mul)
    assert (gate.target, up.target, up.args[1:]) == (vocabulary.silu, vocabulary.columns, (0, 8))


# Attention

QKV = [torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool).index_fill(3, torch.tensor([1]), True)
FULL_ROW = CAUSAL.clone().index_fill(0, torch.tensor([2]), True)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(WIDTH)


def _three_d(m, q, k, v, mask):
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
    s = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH)).view(BATCH, HEADS, LENGTH, LENGTH)
    p = s.masked_fill(mask, float("-inf")).softmax(-1).view(BATCH * HEADS, LENGTH, LENGTH)
    return torch.bmm(p, v).view(BATCH, HEADS, LENGTH, WIDTH)


def _headless(m, q, k, v, mask):
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
    return scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v


def _baddbmm(m, q, k, v, mask):
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
    empty = torch.zeros(BATCH * HEADS, LENGTH, LENGTH)
    s = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=WIDTH**-0.5).view(
        BATCH, HEADS, LENGTH, LENGTH
    )
    p = s.masked_fill(mask, float("-inf")).softmax(-1).view(BATCH * HEADS, LENGTH, LENGTH)
    return torch.bmm(p, v).view(BATCH, HEADS, LENGTH, WIDTH)


def _einsum_by_length(m, q, k, v, mask):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * WIDTH**-0.5
    return torch.einsum("bhij,bjhd->bihd", s.masked_fill(mask, float("-inf")).softmax(-1), v)


ATTENTIONS = {
    "nanogpt": lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v,
    "in place": lambda m, q, k, v, mask: scores(q, k).masked_fill_(mask, float("-inf")).softmax(-1) @ v,
    "where": lambda m, q, k, v, mask: torch.where(mask, -math.inf, scores(q, k)).softmax(-1) @ v,
    "where not": lambda m, q, k, v, mask: torch.where(~mask, scores(q, k), -math.inf).softmax(-1) @ v,
    "in a tensor": lambda m, q, k, v, mask: (
        torch.where(~mask, scores(q, k), torch.full([], -math.inf)).softmax(-1) @ v
    ),
    "fp32": lambda m, q, k, v, mask: (
        torch.softmax(scores(q, k).float().masked_fill(mask, -math.inf), -1, dtype=torch.float32).to(q.dtype)
        @ v
    ),
    "query scaled": lambda m, q, k, v, mask: (
        ((q * WIDTH**-0.5) @ k.mT).masked_fill(mask, -math.inf).softmax(-1) @ v
    ),
    "both scaled": lambda m, q, k, v, mask: (
        ((q * WIDTH**-0.25) @ (k * WIDTH**-0.25).transpose(2, 3)).masked_fill(mask, -math.inf).softmax(-1) @ v
    ),
    "permuted key": lambda m, q, k, v, mask: (
        (q @ k.permute(0, 1, 3, 2) * WIDTH**-0.5).masked_fill(mask, -math.inf).softmax(dim=3) @ v
    ),
    "einsum": lambda m, q, k, v, mask: torch.einsum(
        "bhij,bhjd->bhid",
        (torch.einsum("bhid,bhjd->bhij", q, k) / WIDTH**0.5).masked_fill(mask, -math.inf).softmax(-1),
        v,
    ),
    "einsum by length": _einsum_by_length,
    "3-D products": _three_d,
    "no heads": _headless,
    "baddbmm": _baddbmm,
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    recording = normalised(ATTENTIONS[name], *QKV, CAUSAL)
    assert words(recording) == {"sdpa": 1}
    assert not targets(recording) & {torch.softmax, torch.matmul, torch.bmm}
    query, key, value, mask, p, causal, scale, grouped = the(recording, vocabulary.sdpa)
    assert all(len(node.meta["tensor_meta"].shape) == 4 for node in (query, key, value))
    assert mask.meta["tensor_meta"].dtype is torch.bool
    assert (p, causal, grouped) == (0.0, False, False)
    assert scale == pytest.approx(WIDTH**-0.5)


@pytest.mark.parametrize(
    "hidden", [CAUSAL, CAUSAL[None, None], PADDING, CAUSAL | PADDING, FULL_ROW, PADDING | FULL_ROW]
)
@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float32).min])
def test_a_finite_fill_keeps_its_uniform_rows_and_gradients(hidden: Tensor, fill: float) -> None:
    recording = normalised(
        lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, fill).softmax(-1) @ v, *QKV, hidden
    )
    assert words(recording) == {"sdpa": 1, "kept": 1, "zero_hidden": 1}
    leaves = [t.clone().requires_grad_() for t in QKV]
    expected = scores(*leaves[:2]).masked_fill(hidden, fill).softmax(-1) @ leaves[2]
    actual = recording.module()(*leaves, hidden)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (actual, expected)]
    assert error(*gradients) <= BOUND


def test_masks_that_are_added() -> None:
    bias = torch.randn(1, HEADS, LENGTH, LENGTH)
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -math.inf)
    recording = normalised(lambda m, q, k, v, a: (scores(q, k) + a).softmax(-1) @ v, *QKV, causal)
    assert the(recording, vocabulary.sdpa)[3].op == "placeholder"
    recording = normalised(
        lambda m, q, k, v, a, b: (b + scores(q, k) + a).softmax(-1) @ v, *QKV, causal, bias
    )
    mask = the(recording, vocabulary.sdpa)[3]
    assert (mask.target, mask.meta["tensor_meta"].shape) == (torch.add, (1, HEADS, LENGTH, LENGTH))


def test_masks_over_heads_and_over_batches_of_heads() -> None:
    over_heads = torch.randn(HEADS, LENGTH, LENGTH)
    recording = normalised(lambda m, q, k, v, a: (scores(q, k) + a).softmax(-1) @ v, *QKV, over_heads)
    assert the(recording, vocabulary.sdpa)[3].op == "placeholder"

    def together(m, q, k, v, a):
        q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
        p = (torch.bmm(q, k.mT) + a).view(BATCH, HEADS, LENGTH, LENGTH).softmax(-1)
        return torch.bmm(p.view(BATCH * HEADS, LENGTH, LENGTH), v)

    for mask in (torch.randn(BATCH * HEADS, 1, LENGTH), torch.randn(1, LENGTH, LENGTH), torch.randn(LENGTH)):
        assert words(normalised(together, *QKV, mask)) == {"sdpa": 1}


@pytest.mark.parametrize("fill", [-1e4, -math.inf])
def test_a_bias_under_a_mask(fill: float) -> None:
    bias = torch.randn(1, HEADS, 1, LENGTH)
    mask = FULL_ROW if fill > -math.inf else CAUSAL
    recording = normalised(
        lambda m, q, k, v, a, mask: (scores(q, k) + a).masked_fill(mask, fill).softmax(-1) @ v,
        *QKV,
        bias,
        mask,
    )
    assert words(recording)["sdpa"] == 1


def test_attention_drops_out_in_the_word() -> None:
    def dropped(m, q, k, v):
        return F.dropout(scores(q, k).softmax(-1), 0.25, m.training) @ v

    recording = record(Model(dropped), Inputs(tuple(QKV)))
    assert words(normalise(recording)) == {"sdpa": 1}
    assert the(recording, vocabulary.sdpa)[3:5] == (None, 0.25)
    assert the(normalised(dropped, *QKV, train=False), vocabulary.sdpa)[4] == 0.0


def test_every_way_to_call_sdpa() -> None:
    sdpa = F.scaled_dot_product_attention
    for spelling, found in (
        (lambda m, q, k, v, mask: sdpa(q, k, v), (None, 0.0, False, None, False)),
        (
            lambda m, q, k, v, mask: sdpa(q, key=k, value=v, is_causal=True, scale=2.0),
            (None, 0.0, True, 2.0, False),
        ),
        (lambda m, q, k, v, mask: sdpa(q, k, v, None, 0.0, True), (None, 0.0, True, None, False)),
        (lambda m, q, k, v, mask: sdpa(q, k, v, attn_mask=mask)[..., :], ("mask", 0.0, False, None, False)),
    ):
        args = the(normalised(spelling, *QKV, ~CAUSAL), vocabulary.sdpa)[3:]
        assert args[1:] == found[1:]
        assert (args[0] is None) == (found[0] is None)


def _weights_read(m, q, k, v, mask):
    p = scores(q, k).softmax(-1)
    return p @ v, p.mean(1)


NOT_ATTENTIONS = {
    "the weights are read": _weights_read,
    "softmax over the queries": lambda m, q, k, v, mask: scores(q, k).softmax(-2) @ v,
    "filled with 0": lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, 0).softmax(-1) @ v,
    "filled with -5": lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, -5).softmax(-1) @ v,
    "scaled behind the softmax": lambda m, q, k, v, mask: ((q @ k.mT).softmax(-1) / WIDTH**0.5) @ v,
    "softcap": lambda m, q, k, v, mask: (torch.tanh(scores(q, k) / 5) * 5).softmax(-1) @ v,
    "scaled behind the mask": lambda m, q, k, v, mask: (
        ((q @ k.mT).masked_fill(mask, -1e4) / 4).softmax(-1) @ v
    ),
    "learned scale": lambda m, q, k, v, mask: (q @ k.mT * m.scale).softmax(-1) @ v,
    "masked behind the softmax": lambda m, q, k, v, mask: scores(q, k).softmax(-1).masked_fill(mask, 0) @ v,
    "transposed weights": lambda m, q, k, v, mask: scores(q, k).softmax(-1).mT @ v,
    "the mask is the larger": lambda m, q, k, v, mask: (scores(q[:1], k[:1]) + m.bias).softmax(-1) @ v,
}


@pytest.mark.parametrize("spelling", NOT_ATTENTIONS.values(), ids=NOT_ATTENTIONS)
def test_not_attention(spelling) -> None:
    parameters = {"scale": torch.ones(HEADS, 1, 1), "bias": torch.randn(BATCH, 1, LENGTH, LENGTH)}
    recording = normalised(spelling, *QKV, CAUSAL, **parameters)
    assert torch.softmax in targets(recording)
    assert vocabulary.sdpa not in targets(recording)


def _hugging_face_repeat(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, 2, s, d).reshape(b, h * 2, s, d)


def _meta_repeat(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    x = x.transpose(1, 2)  # as it comes from the projection
    return x[:, :, :, None, :].expand(b, s, h, 2, d).reshape(b, s, h * 2, d).transpose(1, 2)


REPEATS = {
    "meta": _meta_repeat,
    "hugging face": _hugging_face_repeat,
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "interleave": lambda x: x.repeat_interleave(2, dim=1),
    "torch": lambda x: torch.repeat_interleave(x, 2, 1),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_repeated_heads_are_grouped_queries(repeat) -> None:
    q, k, v = QKV[0], QKV[1][:, :2], QKV[2][:, :2]
    for spelling in (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True),
        lambda m, q, k, v: scores(q, repeat(k)).softmax(-1) @ repeat(v),
    ):
        recording = normalised(spelling, q, k, v)
        assert targets(recording) <= {vocabulary.sdpa, torch.transpose}
        _, key, value, *_, grouped = the(recording, vocabulary.sdpa)
        assert grouped is True
        assert key.meta["tensor_meta"].shape == value.meta["tensor_meta"].shape == (BATCH, 2, LENGTH, WIDTH)


def test_heads_repeated_as_a_block_are_not_grouped_queries() -> None:
    q, k, v = QKV[0], QKV[1][:, :2], QKV[2][:, :2]
    recording = normalised(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        q,
        k,
        v,
    )
    assert the(recording, vocabulary.sdpa)[7] is False


def test_one_key_head_for_all_is_grouped() -> None:
    recording = normalised(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v), QKV[0], QKV[1][:, :1], QKV[2][:, :1]
    )
    assert the(recording, vocabulary.sdpa)[7] is True


# Rotary


def _rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _rotate_chunks(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def test_rope() -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH)
    for spelling in (
        lambda m, x, cos, sin: x * cos + _rotate_half(x) * sin,
        lambda m, x, cos, sin: sin * _rotate_chunks(x) + cos * x,
    ):
        assert targets(normalised(spelling, QKV[0], cos, sin)) == {vocabulary.rope}


def test_not_rope() -> None:
    cos, sin = torch.randn(2, 1, 1, LENGTH, WIDTH)
    for spelling in (
        lambda m, x, cos, sin: x * cos - _rotate_half(x) * sin,
        lambda m, x, cos, sin: x * cos + torch.cat((x[..., 4:], -x[..., :4]), -1) * sin,
        lambda m, x, cos, sin: x * cos + torch.cat((-x[..., 6:], x[..., :6]), -1) * sin,
        lambda m, x, cos, sin: x * cos + _rotate_half(x + 1) * sin,
    ):
        assert vocabulary.rope not in targets(normalised(spelling, QKV[0], cos, sin))


# Noise and writes in place


def test_noise_goes() -> None:
    def noisy(m, x):
        x = x.to(x.dtype).mT.contiguous().contiguous().view(10) + 0
        x = F.dropout(x * 1.0, 0.0, True).view(x.shape).expand(x.shape).float()
        return F.dropout(x, 0.5, False).reshape(5, 2).reshape(x.shape)

    recording = normalised(noisy, torch.randn(2, 5))
    assert targets(recording) == {torch.t, torch.reshape}


def test_what_does_something_stays() -> None:
    recording = normalised(lambda m, x: x[:, :] * F.dropout(x, 0.5, True), torch.randn(2, 5))
    assert targets(recording) == {operator.getitem, vocabulary.dropout, torch.mul}
    integers = torch.arange(6)
    assert torch.mul in targets(normalised(lambda m, x: x * 1.0, integers))
    assert torch.reshape in targets(normalised(lambda m, x: x.reshape(2, 3), torch.randn(6)))


def _written_base(m, x):
    y = x + 1
    y.view(-1).mul_(2)
    return y


def _written_view(m, x):
    y = x + 1
    first = y[0]
    y.mul_(2)
    return first * y


def _written_copy(m, x):
    y = x + 1
    z = y.t().contiguous()  # a copy here, which it need not be
    y.mul_(2)
    return z.t() + y


def _read_before(m, x):
    y = x + 1
    z = y * 3
    y.mul_(2)
    return y + z


def _accumulated(m, x):
    y = x + 1
    y += x
    y *= 2
    y.sub_(1)
    return F.relu(y, inplace=True)


def _set(m, x):
    y = x + 1
    y[0] = 0
    return y * 2


def _cached(m, x):
    m.cache[:, :2] = x[:, :2]
    return m.cache[:, :4] * x[:, :4]


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        (_written_base, True),
        (_written_view, True),
        (_written_copy, True),
        (_read_before, False),
        (_accumulated, False),
        (_set, True),
        (_cached, True),
    ],
)
def test_writes_in_place_become_values_only_unseen(function, stays: bool) -> None:
    recording = normalised(function, torch.randn(2, 5), cache=torch.zeros(2, 5))
    names = {getattr(target, "__name__", "") for target in targets(recording)}
    assert any(name in names for name in ("mul_", "setitem")) is stays


def test_a_word_does_not_move_over_a_write() -> None:
    def written_between(m, x):
        y = x + 1
        gate = torch.sigmoid(y)
        view = y[0]
        y.mul_(2)
        return gate * y + view

    normalised(written_between, torch.randn(2, 5))
