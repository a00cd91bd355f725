"""Canonical graphs: attention is one op, however it was written out."""

import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from te_transform.canonicalize import canonicalize
from te_transform.graph import ops
from te_transform.graph.nodes import called, dtype_of, shape_of
from tests import captures
from tests.captures import BOUND, Model, canonical, capture, error, executable, op_counts, targets, the

HIDDEN, HEADS, WIDTH, LENGTH, BATCH = 32, 4, 8, 6, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["fixed", pytest.param("symbolic", marks=pytest.mark.integration)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symbolic ones take most of the time, and reach nothing that those of the other tests do not."""
    if request.param == "fixed":
        monkeypatch.setattr(captures, "SIZES", (False,))


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


def _heads_between(m, q, k, v, mask):
    """DeepSeek's own: scores [batch, queries, heads, keys]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bshd,bthd->bsht", q, k) * WIDTH**-0.5
    p = s.masked_fill(mask.unsqueeze(1), float("-inf")).softmax(-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,bthd->bshd", p, v)


def _heads_last(m, q, k, v, mask):
    """Scores [batch, queries, keys, heads], whose softmax goes over the last dimension but one."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bqkh", q, k) * WIDTH**-0.5
    p = torch.where(~mask[None, :, :, None], s, -math.inf).softmax(dim=2)
    return torch.einsum("bqkh,bkhd->bqhd", p, v)


def _turned_for_the_softmax(m, q, k, v, mask):
    s = scores(q, k).permute(2, 3, 0, 1)  # [queries, keys, batch, heads]
    p = F.dropout(s.masked_fill(mask[:, :, None, None], -math.inf).softmax(1), 0.5, False)
    return p.permute(2, 3, 0, 1) @ v


def _by_hand(m, q, k, v, mask):
    s = scores(q, k).masked_fill(mask, -math.inf)
    e = torch.exp(s - s.max(-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True) @ v


def _detached(m, q, k, v, mask):
    s = torch.einsum("bhid,bhjd->bihj", q, k) * WIDTH**-0.5
    s = s.masked_fill(mask.unsqueeze(1), -math.inf)
    e = (s - s.amax(dim=-1, keepdim=True).detach()).exp()
    return torch.einsum("bihj,bhjd->bhid", e / e.sum(-1, keepdim=True), v)


def _normalized_by_log(m, q, k, v, mask):
    s = scores(q, k).masked_fill(mask, -math.inf)
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


def _shifted_in_fp32(m, q, k, v, mask):
    s = scores(q, k).masked_fill(mask, -math.inf)
    return (s - torch.amax(s, -1, True).detach()).float().softmax(-1) @ v


ATTENTIONS = {
    "softmax by hand": _by_hand,
    "by hand and turned": _detached,
    "by a log": _normalized_by_log,
    "exp of log_softmax": lambda m, q, k, v, mask: (
        F.log_softmax(scores(q, k).masked_fill(mask, -math.inf), dim=-1).exp() @ v
    ),
    "shifted": _shifted_in_fp32,
    "heads between": _heads_between,
    "heads last": _heads_last,
    "turned for the softmax": _turned_for_the_softmax,
    "nanogpt": lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, float("-inf")).softmax(-1) @ v,
    "in place": lambda m, q, k, v, mask: scores(q, k).masked_fill_(mask, float("-inf")).softmax(-1) @ v,
    "where": lambda m, q, k, v, mask: torch.where(mask, -math.inf, scores(q, k)).softmax(-1) @ v,
    "where not": lambda m, q, k, v, mask: torch.where(~mask, scores(q, k), -math.inf).softmax(-1) @ v,
    "in a tensor, by name": lambda m, q, k, v, mask: (
        torch.where(~mask, scores(q, k), torch.full([], fill_value=-math.inf)).softmax(-1) @ v
    ),
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
    "einsum of any rank": lambda m, q, k, v, mask: torch.einsum(
        "... i j, ... j d -> ... i d",
        (torch.einsum("...id,...jd->...ij", q, k) / WIDTH**0.5).masked_fill(mask, -math.inf).softmax(-1),
        v,
    ),
    "einsum by length": _einsum_by_length,
    "3-D products": _three_d,
    "no heads": _headless,
    "baddbmm": _baddbmm,
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    graph = canonical(ATTENTIONS[name], *QKV, CAUSAL)
    assert op_counts(graph) == {"sdpa": 1}
    assert not targets(graph) & {torch.softmax, torch.matmul, torch.bmm}
    query, key, value, mask, p, causal, scale, grouped, wide_scores = the(graph, ops.sdpa)
    assert all(len(shape_of(node)) == 4 for node in (query, key, value))
    assert dtype_of(mask) is torch.bool
    assert (p, causal, grouped, wide_scores) == (0.0, False, False, False)
    assert scale == pytest.approx(WIDTH**-0.5)


@pytest.mark.parametrize(
    "hidden", [CAUSAL, CAUSAL[None, None], PADDING, CAUSAL | PADDING, FULL_ROW, PADDING | FULL_ROW]
)
@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float32).min])
@pytest.mark.usefixtures("sizes")
def test_a_finite_fill_keeps_its_uniform_rows_and_gradients(hidden: Tensor, fill: float) -> None:
    function = lambda m, q, k, v, mask: scores(q, k).masked_fill(mask, fill).softmax(-1) @ v  # noqa: E731
    (captured,) = capture(Model(function), (*QKV, hidden))
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == {"sdpa": 1, "hidden_rows": 1, "kept": 1, "zero_hidden": 1}
    assert op_counts(canonical(function, *QKV, hidden)) == op_counts(graph)
    _, gradient_error = errors_of(function, captured, graph, hidden)
    assert gradient_error <= BOUND


def errors_of(function, captured, graph: fx.Graph, hidden: Tensor) -> tuple[float, float]:
    """Return the errors of a canonical graph's output and gradients, against those of the function."""
    leaves = [t.clone().requires_grad_() for t in QKV]
    values = {id(given): leaf for given, leaf in zip(QKV, leaves, strict=True)}
    expected = function(None, *leaves, hidden)
    (actual,) = executable(captured, graph)(*(values.get(id(a), a) for a in captured.inputs))
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (actual, expected)]
    return error([actual], [expected]), error(*gradients)


def _emptied(m, q, k, v, hidden, fill):
    """ESPnet's: a query that sees no key gets zeros."""
    return scores(q, k).masked_fill(hidden, fill).softmax(-1).masked_fill(hidden, 0.0) @ v


def _emptied_by_where(m, q, k, v, hidden, fill):
    kept = ~hidden
    weights = torch.where(kept, scores(q, k), fill).softmax(-1, dtype=torch.float32)
    return torch.where(kept, weights, 0.0).to(v.dtype) @ v


def _emptied_in_three(m, q, k, v, hidden, fill):
    q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
    hidden = hidden.expand(BATCH, HEADS, LENGTH, LENGTH).reshape(BATCH * HEADS, LENGTH, LENGTH)
    weights = torch.bmm(q, k.mT).masked_fill(hidden, fill).softmax(-1)
    return torch.bmm(weights.masked_fill(hidden, 0), v)


@pytest.mark.parametrize("fill", [-math.inf, -1e4])
@pytest.mark.parametrize("hidden", [CAUSAL, FULL_ROW, PADDING | FULL_ROW])
@pytest.mark.parametrize("written", [_emptied, _emptied_by_where, _emptied_in_three])
@pytest.mark.usefixtures("sizes")
def test_rows_that_hide_every_key_may_be_emptied(written, hidden: Tensor, fill: float) -> None:
    function = partial(written, fill=fill)
    (captured,) = capture(Model(function), (*QKV, hidden))
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == {"sdpa": 1, "hidden_rows": 2, "kept": 1, "zero_hidden": 1}
    assert max(errors_of(function, captured, graph, hidden)) <= BOUND


@pytest.mark.parametrize(
    "weights",
    {
        "by another mask": lambda s, hidden: (
            s.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden.mT, 0)
        ),
        "by the opposite mask": lambda s, hidden: (
            torch.where(hidden, s, -1e9).softmax(-1).masked_fill(hidden, 0)
        ),
        "without a fill": lambda s, hidden: s.softmax(-1).masked_fill(hidden, 0),
        "with ones": lambda s, hidden: s.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 1),
        "by one of two masks": lambda s, hidden: (
            s.masked_fill(hidden.mT, -1e9).masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0)
        ),
        "after a bias": lambda s, hidden: (
            (s + 1.5 * s.detach()[:1]).masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0)
        ),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.usefixtures("sizes")
def test_other_fills_of_probabilities_are_no_attention(weights) -> None:
    graph = canonical(lambda m, q, k, v, hidden: weights[1](scores(q, k), hidden) @ v, *QKV, CAUSAL)
    assert ops.sdpa not in targets(graph)


@pytest.mark.parametrize(
    ("fill", "hidden"),
    [(-math.inf, CAUSAL), *product((torch.finfo(torch.float32).min, -1e5), (CAUSAL, FULL_ROW))],
)
@pytest.mark.usefixtures("sizes")
def test_scores_may_be_scaled_after_they_are_filled(hidden: Tensor, fill: float) -> None:
    def function(m, q, k, v, hidden, over=4.0):
        return (torch.where(hidden, fill, q @ k.mT) / over).softmax(-1) @ v

    assert the(canonical(function, *QKV, hidden), ops.sdpa)[6] == 0.25
    for over in (0.5, 100.0) if fill == -1e5 else (0.5,):  # the fill may overflow, or hides nothing
        assert ops.sdpa not in targets(canonical(partial(function, over=over), *QKV, CAUSAL))


def test_masks_that_are_added() -> None:
    bias = torch.randn(1, HEADS, LENGTH, LENGTH)
    causal = torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -math.inf)
    graph = canonical(lambda m, q, k, v, a: (scores(q, k) + a).softmax(-1) @ v, *QKV, causal)
    assert the(graph, ops.sdpa)[3].op == "placeholder"
    graph = canonical(lambda m, q, k, v, a, b: (b + scores(q, k) + a).softmax(-1) @ v, *QKV, causal, bias)
    mask = the(graph, ops.sdpa)[3]
    assert (mask.target, shape_of(mask)) == (torch.add, (1, HEADS, LENGTH, LENGTH))


def test_masks_over_heads_and_over_batches_of_heads() -> None:
    over_heads = torch.randn(HEADS, LENGTH, LENGTH)
    graph = canonical(lambda m, q, k, v, a: (scores(q, k) + a).softmax(-1) @ v, *QKV, over_heads)
    assert the(graph, ops.sdpa)[3].op == "placeholder"

    def together(m, q, k, v, a):
        q, k, v = (t.reshape(BATCH * HEADS, LENGTH, WIDTH) for t in (q, k, v))
        p = (torch.bmm(q, k.mT) + a).view(BATCH, HEADS, LENGTH, LENGTH).softmax(-1)
        return torch.bmm(p.view(BATCH * HEADS, LENGTH, LENGTH), v)

    for mask in (torch.randn(BATCH * HEADS, 1, LENGTH), torch.randn(1, LENGTH, LENGTH), torch.randn(LENGTH)):
        assert op_counts(canonical(together, *QKV, mask)) == {"sdpa": 1}


def test_masks_that_are_added_before_the_scores_are_scaled() -> None:
    mask, bias = torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -math.inf), torch.randn(LENGTH)
    graph = canonical(lambda m, q, k, v, a, b: ((q @ k.mT + b + a) / 4).softmax(-1) @ v, *QKV, mask, bias)
    assert the(graph, ops.sdpa)[6] == 0.25
    filled = lambda m, q, k, v, h: ((q @ k.mT).masked_fill(h, -1e4) / 4).softmax(-1) @ v  # noqa: E731
    assert ops.sdpa not in targets(canonical(filled, *QKV, CAUSAL))  # what is hidden counts there


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("padding", [CAUSAL[:1] & False, PADDING, FULL_ROW])
@pytest.mark.usefixtures("sizes")
def test_a_mask_that_is_added_to_a_filled_one(kept: bool, padding: Tensor) -> None:
    least = torch.finfo(torch.float32).min

    def function(m, q, k, v, hidden, later, fill=least):
        found = scores(q, k)
        found = torch.where(~hidden, found, fill) if kept else found.masked_fill(hidden, fill)
        return (found + later).softmax(-1) @ v

    later = torch.zeros(padding.shape).masked_fill(padding, least)
    assert ops.sdpa in targets(canonical(function, *QKV, CAUSAL, later))
    assert ops.sdpa not in targets(canonical(partial(function, fill=-1e4), *QKV, CAUSAL, later))


def test_a_mask_that_is_added_to_a_filled_one_in_fp64() -> None:
    least, wide = torch.finfo(torch.float32).min, [tensor.double() for tensor in QKV]
    function = lambda m, q, k, v, hidden, later: (  # noqa: E731
        (scores(q, k).masked_fill(hidden, least) + later).softmax(-1) @ v
    )
    later = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    assert ops.sdpa in targets(canonical(function, *wide, CAUSAL, later, bound=1e-14))


def test_scores_in_fp32_of_queries_and_keys_in_16_bits() -> None:
    narrow = [tensor.bfloat16() for tensor in QKV]
    wider = lambda m, q, k, v: scores(q.float(), k.float()).softmax(-1).to(v.dtype) @ v  # noqa: E731
    graph = canonical(wider, *narrow, bound=0.01)
    assert [dtype_of(node) for node in the(graph, ops.sdpa)[:3]] == [torch.bfloat16] * 3
    assert the(graph, ops.sdpa)[8] is True
    narrower = lambda m, q, k, v: scores(q.bfloat16(), k.bfloat16()).float().softmax(-1) @ v  # noqa: E731
    assert ops.sdpa not in targets(canonical(narrower, *QKV))


@pytest.mark.parametrize("fill", [-1e4, -math.inf])
def test_a_bias_under_a_mask(fill: float) -> None:
    bias = torch.randn(1, HEADS, 1, LENGTH)
    mask = FULL_ROW if fill > -math.inf else CAUSAL
    graph = canonical(
        lambda m, q, k, v, a, mask: (scores(q, k) + a).masked_fill(mask, fill).softmax(-1) @ v,
        *QKV,
        bias,
        mask,
    )
    assert op_counts(graph)["sdpa"] == 1


def test_attention_drops_out_in_the_word() -> None:
    def dropped(m, q, k, v):
        return F.dropout(scores(q, k).softmax(-1), 0.25, m.training) @ v

    (captured,) = capture(Model(dropped), tuple(QKV))  # it draws other random numbers
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == {"sdpa": 1}
    assert the(graph, ops.sdpa)[3:5] == (None, 0.25)
    assert the(canonical(dropped, *QKV, train=False), ops.sdpa)[4] == 0.0


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
        args = the(canonical(spelling, *QKV, ~CAUSAL), ops.sdpa)[3:]
        assert args[1:] == found[1:]
        assert (args[0] is None) == (found[0] is None)


WRITTEN = {"by hand": _by_hand, "by a log": _normalized_by_log}


@pytest.mark.parametrize("hidden", [CAUSAL, FULL_ROW], ids=["causal", "a row that sees nothing"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_softmax_by_hand_has_its_gradients_and_rows_of_nothing(name: str, hidden: Tensor) -> None:
    (captured,) = capture(Model(WRITTEN[name]), (*QKV, hidden))
    graph = canonicalize(captured.module.graph)
    assert op_counts(graph) == {"sdpa": 1}
    leaves = [t.clone().requires_grad_() for t in QKV]
    values = {id(given): leaf for given, leaf in zip(QKV, leaves, strict=True)}
    wide = [t.double().requires_grad_() for t in QKV]
    expected = WRITTEN[name](None, *wide, hidden)
    seen = hidden.logical_not().any(-1)  # elsewhere nothing but NaN is written out, where the op has zeros
    assert expected.isnan().any(-1).any() == (~seen).any()
    (actual,) = executable(captured, graph)(*(values.get(id(a), a) for a in captured.inputs))
    assert error([actual[..., seen, :]], [expected[..., seen, :]]) <= BOUND
    if seen.all():
        pairs = ((actual, leaves), (expected, wide))
        assert error(*(torch.autograd.grad(out.square().sum(), at) for out, at in pairs)) <= BOUND


def _weights_read(m, q, k, v, mask):
    p = scores(q, k).softmax(-1)
    return p @ v, p.mean(1)


def _over_heads(m, q, k, v, mask):
    return torch.einsum("bqkh,bhkd->bhqd", torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(-1), v)


def _turned_and_read(m, q, k, v, mask):
    p = scores(q, k).transpose(1, 2).softmax(-1)
    return p.transpose(1, 2) @ v, p


def _one_more(m, q, k, v, mask):
    e = scores(q, k).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def _without_a_shift(m, q, k, v, mask):
    e = scores(q, k).exp()
    return e / e.sum(-1, keepdim=True) @ v


def _less_a_constant(m, q, k, v, mask):
    s = scores(q, k)
    return torch.exp(s - s.logsumexp(-1, keepdim=True).detach()) @ v


def _summed_over_queries(m, q, k, v, mask):
    s = scores(q, k)
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-2, keepdim=True) @ v


def _not_turned_back(m, q, k, v, mask):
    return scores(q, k).transpose(0, 1).softmax(-1) @ v.transpose(0, 1)


NOT_ATTENTIONS = {
    "a softmax over heads": _over_heads,
    "turned and read": _turned_and_read,
    "not turned back": _not_turned_back,
    "one more than the sum": _one_more,
    "exp without a shift": _without_a_shift,
    "a sum without a gradient": _less_a_constant,
    "a sum over the queries": _summed_over_queries,
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
    "scores in fp64": lambda m, q, k, v, mask: scores(q.double(), k.double()).softmax(-1).to(v.dtype) @ v,
    "a softmax in fp64": lambda m, q, k, v, mask: scores(q, k).double().softmax(-1).to(v.dtype) @ v,
    "keys for all batches": lambda m, q, k, v, mask: scores(q, k[0]).softmax(-1) @ v[0],
    "one mask for all scores": lambda m, q, k, v, mask: (
        scores(q, k).masked_fill(mask.any(), -1e9).softmax(-1) @ v
    ),
    "a width that is broadcast": lambda m, q, k, v, mask: (
        torch.einsum("bhqd,bhkd->bhqk", q, k[..., :1]).softmax(-1) @ v
    ),
    "scores in 16 bits": lambda m, q, k, v, mask: scores(q, k).bfloat16().float().softmax(-1) @ v,
    "the mask is the larger": lambda m, q, k, v, mask: (scores(q[:1], k[:1]) + m.bias).softmax(-1) @ v,
}


@pytest.mark.parametrize("spelling", NOT_ATTENTIONS.values(), ids=NOT_ATTENTIONS)
@pytest.mark.usefixtures("sizes")
def test_not_attention(spelling) -> None:
    parameters = {"scale": torch.ones(HEADS, 1, 1), "bias": torch.randn(BATCH, 1, LENGTH, LENGTH)}
    graph = canonical(spelling, *QKV, CAUSAL, **parameters)
    assert targets(graph) & {torch.softmax, torch.exp}
    assert ops.sdpa not in targets(graph)


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
@pytest.mark.usefixtures("sizes")
def test_repeated_heads_are_grouped_queries(repeat) -> None:
    q, k, v = QKV[0], QKV[1][:, :2], QKV[2][:, :2]
    for spelling in (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True),
        lambda m, q, k, v: scores(q, repeat(k)).softmax(-1) @ repeat(v),
    ):
        with torch.no_grad():
            graph = canonical(spelling, q, k, v)
        assert targets(graph) <= {ops.sdpa, torch.transpose}
        _, key, value, *_, grouped = the(graph, ops.sdpa)[:8]
        assert grouped is True
        assert shape_of(key) == shape_of(value) == (BATCH, 2, LENGTH, WIDTH)
    # a backward reads the copies of keys and values that are given, and may be written to before it
    assert the(canonical(spelling, q, k, v), ops.sdpa)[7] is False
    graph = canonical(lambda m, q, k, v: spelling(m, q, k.exp(), v.exp()), q, k, v)
    assert the(graph, ops.sdpa)[7] is True


def test_heads_repeated_as_a_block_are_not_grouped_queries() -> None:
    q, k, v = QKV[0], QKV[1][:, :2], QKV[2][:, :2]
    graph = canonical(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        q,
        k,
        v,
    )
    assert the(graph, ops.sdpa)[7] is False


def test_one_key_head_for_all_is_grouped() -> None:
    graph = canonical(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v), QKV[0], QKV[1][:, :1], QKV[2][:, :1]
    )
    assert the(graph, ops.sdpa)[7] is True


def _by_einsum(m, q, k, v, mask):
    q, k, v = q.permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)  # as projections make them
    s = torch.einsum("btkgd,bskd->bkgts", q, k) * WIDTH**-0.5
    p = s.masked_fill(mask, -math.inf).softmax(-1)
    return torch.einsum("bkgts,bskd->btkgd", p, v).permute(0, 2, 3, 1, 4)


def _by_broadcast(m, q, k, v, mask):
    return scores(q, k[:, :, None]).masked_fill(mask, -math.inf).softmax(-1) @ v.unsqueeze(2)


@pytest.mark.parametrize("function", [_by_einsum, _by_broadcast])
@pytest.mark.parametrize("mask", [CAUSAL, PADDING.unsqueeze(1) | CAUSAL], ids=["causal", "padding"])
@pytest.mark.usefixtures("sizes")
def test_five_dimensions_are_heads_in_groups(function, mask: Tensor) -> None:
    q, k, v = QKV[0].unflatten(1, (2, 2)), QKV[1][:, :2], QKV[2][:, :2]
    own = lambda m, q, k, v, mask: function(m, q, k * 1.5, v * 1.5, mask)  # noqa: E731
    graph = canonical(own, q, k, v, mask)
    assert op_counts(graph) == {"sdpa": 1}
    query, key, value, *_, grouped = the(graph, ops.sdpa)[:8]
    assert grouped is True
    assert shape_of(query) == (BATCH, HEADS, LENGTH, WIDTH)
    assert shape_of(key) == shape_of(value) == (BATCH, 2, LENGTH, WIDTH)
    (captured,) = capture(Model(own), (q, k, v, mask))
    leaves, wide = (
        [t.to(dtype).clone().requires_grad_() for t in (q, k, v)] for dtype in (q.dtype, torch.double)
    )
    values = {id(given): leaf for given, leaf in zip((q, k, v), leaves, strict=True)}
    graph = canonicalize(captured.module.graph)
    (actual,) = executable(captured, graph)(*(values.get(id(a), a) for a in captured.inputs))
    expected = own(None, *wide, mask)
    pairs = ((actual, leaves), (expected, wide))
    assert error([actual], [expected]) <= BOUND
    assert error(*(torch.autograd.grad(out.square().sum(), at) for out, at in pairs)) <= BOUND


def test_five_dimensions_are_windows() -> None:
    """The dimensions are [batch, windows, heads, length, width], with a mask per window or one mask."""
    q, k, v = (t.repeat(2, 1, 1, 1).unflatten(0, (BATCH, 2)) for t in QKV)
    each = torch.rand(BATCH, 2, 1, LENGTH, LENGTH)
    for mask in (CAUSAL.float() * -1e9, each):
        graph = canonical(lambda m, q, k, v, mask: (scores(q, k) + mask).softmax(-1) @ v, q, k, v, mask)
        query, *_ = the(graph, ops.sdpa)
        assert shape_of(query) == (2 * BATCH, HEADS, LENGTH, WIDTH)


FIVE = [QKV[0].unflatten(1, (2, 2)), QKV[1][:, :2, None] * 1.5, QKV[2][:, :2, None] * 1.5]
NOT_IN_GROUPS = {
    "keys that are given": lambda m, q, k, v: scores(q, k).softmax(-1) @ v,
    "a mask for each group": lambda m, q, k, v: (scores(q, k * 2) + m.groups).softmax(-1) @ (v * 2),
    "heads last": lambda m, q, k, v: (
        scores(q.transpose(1, 2), (k * 2).transpose(1, 2)).softmax(-1) @ (v * 2).transpose(1, 2)
    ),
    "values of their own": lambda m, q, k, v: scores(q, k * 2).softmax(-1) @ (v * 2).expand_as(q).exp(),
}


@pytest.mark.parametrize("spelling", NOT_IN_GROUPS.values(), ids=NOT_IN_GROUPS)
@pytest.mark.usefixtures("sizes")
def test_not_heads_in_groups(spelling) -> None:
    graph = canonical(spelling, *FIVE, groups=torch.randn(2, 1, 1))
    assert ops.sdpa not in targets(graph)


def test_an_einsum_shares_one_key_head_among_all() -> None:
    def shared(m, q, k, v, mask):
        s = torch.einsum("b h i d, b j d -> b h i j", q, k).masked_fill(mask, -math.inf)
        return torch.einsum("bhij,bjd->bhid", s.softmax(-1), v)

    graph = canonical(shared, QKV[0], QKV[1][:, 0], QKV[2][:, 0], CAUSAL)
    _, key, value, *_, grouped = the(graph, ops.sdpa)[:8]
    assert grouped is True
    assert shape_of(key) == shape_of(value) == (BATCH, 1, LENGTH, WIDTH)


@pytest.mark.parametrize("equation", ["...id,...jd->...ij", "b...id,...jd->b...ij", "...id,...jd->ij"])
@pytest.mark.usefixtures("sizes")
def test_an_einsum_computes_the_same_whatever_its_dots_are_broadcast_to(equation: str) -> None:
    """canonical() compares; where the result has no dots they are summed up, which no product does."""
    for key in (QKV[1], QKV[1][0], QKV[1][:, :1]):
        canonical(lambda m, q, k: torch.einsum(equation, q, k), QKV[0], key)


def test_products_that_no_matmul_spells_stay() -> None:
    def numbered(m, q, k):
        return torch.einsum(q, [0, 1, 2, 3], k, [0, 1, 4, 3], [0, 1, 2, 4])

    def written(m, q, k):
        q, k = q.flatten(0, 1), k.flatten(0, 1)
        return torch.baddbmm(q[..., :1], q, k.mT, out=torch.empty(*q.shape[:-1], k.shape[-2]))

    assert torch.einsum in targets(canonical(numbered, *QKV[:2]))
    assert "baddbmm" in map(called, canonical(written, *QKV[:2]).nodes)
