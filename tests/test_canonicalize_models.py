"""Canonical graphs of whole models: they compute what was captured and have the ops that are in the model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_tensor_node, same_shape, shape_of, value
from tests.captures import BOUND, Captured, canonicalize, capture, error, executable, op_counts, run, targets
from tests.conversions import ALL, each
from tests.zoo import zero_dropout

_GATED = {"linear": 8, "rms_norm": 3, "rope": 2, "sdpa": 1, "silu": 1}
_TWO_GPT = {"linear": 9, "layer_norm": 5, "sdpa": 2}
_NANOGPT = _TWO_GPT | {"gelu": 2, "cross_entropy": 1}
_QUICKSTART = {"layer_norm": 4, "linear": 8, "sdpa": 2, "gelu_tanh": 2}
_FINITE_FILL = {"hidden_rows": 2, "kept": 2, "zero_hidden": 2}
_BERT = {"linear": 14, "layer_norm": 6, "sdpa": 2, "gelu": 3}
_MIXTURE = {"dispatch": 1, "group_ends": 1, "grouped_mm": 2, "combine": 1}
FOUND = {
    "quickstart_mask": _QUICKSTART | _FINITE_FILL,
    "nanogpt_flash": _NANOGPT,
    "nanogpt_manual": _NANOGPT,
    "gpt2": _TWO_GPT | {"gelu_tanh": 2},
    "llama": _GATED,
    "llama_eager": _GATED,
    "gemma3_text": {"linear": 15, "rms_norm": 13, "rope": 4, "sdpa": 2, "gelu_tanh": 2},
    "mixtral": _GATED | {"linear": 6} | _MIXTURE,
    "bert": _BERT,
    "t5": {"linear": 23, "rms_norm": 9, "sdpa": 4, "relu": 3},
    "falcon": {"linear": 9, "layer_norm": 3, "sdpa": 2, "gelu": 2, "rope": 4},
    "torch_encoder_pre": {"linear": 8, "layer_norm": 4, "sdpa": 2, "relu": 2},
    "torch_mha": {"linear": 2, "layer_norm": 1, "sdpa": 1},
    "torch_mha_bare": {"linear": 2},  # its attention weights are part of the answer
    "clip_text": {"linear": 12, "layer_norm": 5, "sdpa": 2, "quick_gelu": 2},
}
TRAINED = (
    "nanogpt_manual", "gpt2", "llama", "quickstart_mask", "torch_encoder_pre", "falcon", "gemma3_text", "t5",
)  # fmt: skip
WRITTEN = {torch.rsqrt, torch.softmax, torch.erf, torch.bmm, torch.addmm, F.layer_norm, "softmax"}


def check(captured: Captured) -> None:
    """The canonical graph, and the captured one as canonicalize() leaves it, compute what was captured."""
    expected = [run(captured.module, call) for call in captured.calls]
    module = executable(captured, canonicalize(captured.module.graph))
    captured.module.recompile()
    for call, wanted in zip(captured.calls, expected, strict=True):
        assert error(run(module, call), wanted) <= BOUND
        assert error(run(captured.module, call), wanted) <= 1e-6


# test_models_sites.py finds the sites of the others, on the same ops
@each(
    FOUND, later={*FOUND} - {"quickstart_mask", "nanogpt_manual", "llama", "torch_encoder_pre", "torch_mha"}
)
def test_computes_what_was_captured_and_finds_the_ops(name: str) -> None:
    """In evaluation at symbolic sizes, with a mask; some in training at fixed sizes, without one."""
    case, train = ALL[name], name in TRAINED
    model, padded = zero_dropout(case.build()), not train and ALL[name].padded_inputs is not None
    samples = [case.sample(seed=seed, padded=padded) for seed in (0, 1)]
    graphs = capture(model.train(train), *samples, dynamic=None if train else True)
    for captured in graphs:
        check(captured)
    (graph,) = (canonicalize(captured.module.graph) for captured in graphs)
    assert op_counts(graph) == FOUND[name]
    if name not in ("torch_mha_bare", "mixtral"):  # mixtral's router has a softmax of its own
        assert not targets(graph) & WRITTEN


DROPOUTS = {"gpt2": 5, "bert": 5, "torch_encoder_pre": 6}


@each(DROPOUTS, later=["gpt2", "bert"])
def test_dropout_is_an_op(name: str) -> None:
    (captured,) = capture(ALL[name].build(), ALL[name].sample())
    counts = op_counts(canonicalize(captured.module.graph))
    assert counts == FOUND[name] | {"dropout": DROPOUTS[name]}


@each(["quickstart_mask", "nanogpt_manual", "gemma3_text", "llama_eager"], later={*ALL} - {"quickstart_mask"})
def test_finds_the_same_in_bf16(name: str) -> None:
    case = ALL[name]
    sample = {k: v.bfloat16() if v.is_floating_point() else v for k, v in case.sample().items()}
    (captured,) = capture(zero_dropout(case.build()).bfloat16(), sample)
    expected = run(captured.module, captured.calls[0])
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == FOUND[name]
    assert error(run(executable(captured, graph), captured.calls[0]), expected) < 0.03


@each(["quickstart_mask", "gpt2", "llama_eager", "torch_mha_bare"], later=["gpt2", "llama_eager"])
def test_asking_leaves_no_guard(name: str) -> None:
    sample = ALL[name].sample(padded=name == "torch_mha_bare")
    (captured,) = capture(ALL[name].build(), sample, dynamic=True)
    sizes = [value(node) for node in captured.module.graph.nodes if isinstance(value(node), torch.SymInt)]
    shapes = sizes[0].node.shape_env
    before = len(shapes.guards), len(shapes.deferred_runtime_asserts), len(shapes.replacements)
    canonicalize(captured.module.graph)
    assert (len(shapes.guards), len(shapes.deferred_runtime_asserts), len(shapes.replacements)) == before


@each(["llama", "quickstart_mask", "torch_mha"], later=["llama"])
def test_nodes_know_where_they_come_from(name: str) -> None:
    (captured,) = capture(ALL[name].build(), ALL[name].sample())
    graph = canonicalize(captured.module.graph)
    by_name = {node.name: node for node in captured.module.graph.nodes}
    for node in graph.nodes:
        if "origin" in node.meta and is_tensor_node(node):
            origin = by_name[node.meta["origin"]]
            assert same_shape(shape_of(node), shape_of(origin))
            assert dtype_of(node) is dtype_of(origin)
        if node.target in (ops.linear, ops.layer_norm, ops.rms_norm, ops.sdpa):
            # or what is read of it alone has: the result of a linear that is turned behind it, not in front
            known = [node] if "origin" in node.meta else [*node.users]
            assert known, node
            assert all("origin" in user.meta for user in known), node


def test_ops_belong_to_the_module_that_spelled_them() -> None:
    (captured,) = capture(ALL["llama"].build(), ALL["llama"].sample())
    graph = canonicalize(captured.module.graph)
    paths = {op: [n.meta["path"] for n in graph.nodes if n.target is op] for op in targets(graph)}
    assert paths[ops.rms_norm][0] == "model.layers.0.input_layernorm"
    assert sorted(paths[ops.linear])[1] == "model.layers.0.mlp.down_proj"
    assert paths[ops.sdpa] == ["model.layers.0.self_attn"]


@each(["quickstart_mask", "llama_eager", "gpt2"], later=["llama_eager", "gpt2"])
def test_is_done_after_once(name: str) -> None:
    (captured,) = capture(ALL[name].build(), ALL[name].sample())
    once = canonicalize(captured.module.graph)
    assert str(canonicalize(once)) == str(once)


# Sizes


class Binds(nn.Module):
    """A size that the code binds to a number after a mask was made of it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = torch.arange(x.shape[1])
        mask = length[None] <= length[:, None]
        weights = [1 / (place + 1) for place in range(x.shape[1])]
        return F.scaled_dot_product_attention(x, x, x, mask) * sum(weights)


def test_a_mask_of_sizes_that_are_bound_later_is_made_of_numbers_alone() -> None:
    (captured,) = capture(Binds(), (torch.arange(6).view(1, 6),), dynamic=True)
    canonical = canonicalize(captured.module.graph)
    (attention,) = (node for node in canonical.nodes if node.target is ops.sdpa)
    made_of = [attention.args[3]]
    for node in made_of:
        made_of += node.all_input_nodes
    assert not any(node.op == "placeholder" for node in made_of)


# Multi-head attention, which dynamo captures as one call

X, Y = torch.randn(5, 7, 32), torch.randn(5, 9, 32)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)
PADDING = torch.zeros(5, 7, dtype=torch.bool).index_fill(1, torch.tensor([6]), True)
KEPT = {"need_weights": True, "average_attn_weights": False}
PLAIN = {"need_weights": False}
PADDED = {"attn_mask": CAUSAL < 0, "key_padding_mask": PADDING}
CAUSED = {"attn_mask": CAUSAL, "is_causal": True}
ADDED = {"add_bias_kv": True, "add_zero_attn": True}
_SELF, _CROSS, _ONE, _BIASED = (X, X, X), (X, Y, Y), (X[0],) * 3, torch.randn(20, 7, 9)
ATTENTIONS = {
    "self": (_SELF, PLAIN, {}, {"linear": 2, "sdpa": 1}),
    "causal": (_SELF, PLAIN | CAUSED, {}, {"linear": 2, "sdpa": 1}),
    "padded": (_SELF, PLAIN | PADDED, {}, {"linear": 2, "sdpa": 1}),
    "cross": (_CROSS, PLAIN, {"bias": False}, {"linear": 3, "sdpa": 1}),
    "a mask for each head": (_CROSS, PLAIN | {"attn_mask": _BIASED}, {}, {"linear": 3, "sdpa": 1}),
    "three inputs": ((X, Y, Y + 1), PLAIN, {}, {"linear": 4, "sdpa": 1}),
    "widths": ((X, Y[..., :16], Y[..., :24]), PLAIN, {"kdim": 16, "vdim": 24}, {"linear": 4, "sdpa": 1}),
    "weights": (_SELF, PADDED, {}, {"linear": 2, "dropout": 1}),
    "weights of heads": (_CROSS, KEPT | {"attn_mask": _BIASED}, {}, {"linear": 3, "dropout": 1}),
    "added keys": (_SELF, PLAIN, {"add_bias_kv": True}, {"linear": 2, "sdpa": 1}),
    "a key of zeros": (_CROSS, PLAIN, {"add_zero_attn": True}, {"linear": 3, "sdpa": 1}),
    "both added, padded": (_SELF, PLAIN | PADDED, ADDED, {"linear": 2, "sdpa": 1}),
    "both added, causal": (_SELF, PLAIN | CAUSED, ADDED, {"linear": 2, "sdpa": 1}),
    "both added, weights": (_SELF, PADDED, ADDED, {"linear": 2, "dropout": 1}),
    "no batch": (_ONE, PLAIN, {}, {"linear": 2, "sdpa": 1}),
    "no batch, padded": (
        _ONE,
        PLAIN | PADDED | {"key_padding_mask": PADDING[1]},
        ADDED,
        {"linear": 2, "sdpa": 1},
    ),
    "no batch, weights": (_ONE, KEPT | {"attn_mask": _BIASED[:4, :, :7]}, {}, {"linear": 2, "dropout": 1}),
}


@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(None, id="fixed"), pytest.param(True, marks=pytest.mark.integration, id="symbolic")],
)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_multi_head_attention_is_inlined_bitwise(name: str, dynamic: bool | None) -> None:
    inputs, masks, settings, found = ATTENTIONS[name]
    attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True, **settings)
    (captured,) = capture(_Wrapped(attention, masks), inputs, dynamic=dynamic)
    before = _outputs(captured.module, captured.calls[0])
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == found
    captured.module.recompile()
    assert all(map(torch.equal, _outputs(captured.module, captured.calls[0]), before))


class _Wrapped(nn.Module):
    def __init__(self, attention: nn.Module, masks: dict):
        super().__init__()
        self.attention, self.masks = attention, masks

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple:
        return self.attention(query, key, value, **self.masks)


def _outputs(module: nn.Module, args: tuple) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return [output for output in module(*args) if output is not None]
