"""Attention, written out or called by name, becomes one attention core."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.backends import plain
from te_transform.graph import ops
from tests.rules.tables import FFN, HEADS, H, Make, fused, linear, reasons, sites, written

LONGEST, WIDTH = 8, H // HEADS


def heads(x: Tensor) -> Tensor:
    """[batch, length, width] -> [batch, heads, length, width of a head]"""
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def attends(core, **parts: Make) -> Make:
    """q, k and v of one product, this core, and a projection."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = map(heads, model.qkv(x).chunk(3, -1))
        return model.out(core(model, q, k, v).transpose(1, 2).flatten(-2))

    return written(forward, qkv=linear(H, 3 * H), out=linear(), **parts)


def buffer(mask: Tensor) -> Make:
    return lambda: nn.Buffer(mask)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * WIDTH**-0.5


def written_out(model, q, k, v):
    return scores(q, k).softmax(-1) @ v


def causal(model, q, k, v):
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def of_a_buffer(model, q, k, v):
    length = q.shape[-2]
    hidden = model.mask[:length, :length] == 0
    return scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def added(model, q, k, v):
    length = q.shape[-2]
    return (scores(q, k) + model.mask[:length, :length]).softmax(-1) @ v


def in_fp32(model, q, k, v):
    return scores(q, k).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def expanded(model, q, k, v):
    weights = scores(q, k)
    length = q.shape[-2]
    hidden = (model.mask[:length, :length] == 0).view(1, 1, length, length).expand_as(weights)
    return weights.masked_fill_(hidden, torch.finfo(q.dtype).min).softmax(-1) @ v


def grouped(model, q, k, v):
    k, v = (x[:, :1].repeat_interleave(HEADS, dim=1) for x in (k, v))
    return written_out(model, q, k, v)


def in_groups(model, q, k, v):
    q, k, v = q.unflatten(1, (1, HEADS)), k[:, :1, None], v[:, :1, None]
    return written_out(model, q, k, v).flatten(1, 2)


def dropping(model, q, k, v):
    return model.drop(scores(q, k).softmax(-1)) @ v


def called_with_a_mask(model, q, k, v):
    length = q.shape[-2]
    return F.scaled_dot_product_attention(q, k, v, model.mask[:length, :length])


def heads_between(model, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    hidden = torch.full((len(q[0]),) * 2, float("-inf")).triu(1).unsqueeze(1)
    weights = torch.einsum("bshd,bthd->bsht", q, k) * WIDTH**-0.5 + hidden
    return torch.einsum("bsht,bthd->bhsd", weights.softmax(-1), v)


def by_hand(model, q, k, v):
    weights = scores(q, k) + model.mask[: q.shape[-2], : q.shape[-2]]
    weights = torch.exp(weights - weights.max(-1, keepdim=True).values.detach())
    return weights / weights.sum(-1, keepdim=True) @ v


def filled_twice(model, q, k, v, last=-3e38):
    length = q.shape[-2]
    kept = model.mask[:length, :length] == 1
    first = scores(q, k).masked_fill(~kept[-1], -3e38)
    return torch.where(kept, first, last).softmax(-1) @ v


def emptied(model, q, k, v):
    """ESPnet's: probabilities of hidden keys are filled too, as rows may hide every key."""
    hidden = model.mask[: q.shape[-2], : q.shape[-2]] == 0
    weights = scores(q, k).masked_fill(hidden, torch.finfo(q.dtype).min)
    return weights.softmax(-1).masked_fill(hidden, 0.0) @ v


def scaled_after_the_fill(model, q, k, v):
    """GPT-J's."""
    hidden = torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool()
    filled = torch.where(hidden, torch.finfo(q.dtype).min, q @ k.transpose(-2, -1))
    return (filled / WIDTH**0.5).softmax(-1) @ v


def filled_with_two_numbers(model, q, k, v):
    return filled_twice(model, q, k, v, -1e9)


LOWER = torch.ones(LONGEST, LONGEST).tril()
FUSES = {
    "written out": attends(written_out),
    "causal": attends(causal),
    "a mask in a buffer": attends(of_a_buffer, mask=buffer(LOWER)),
    "a mask of their shape": attends(expanded, mask=buffer(LOWER)),
    "filled twice with one number": attends(filled_twice, mask=buffer(LOWER)),
    "probabilities that are emptied": attends(emptied, mask=buffer(LOWER)),
    "where rows hide every key": attends(emptied, mask=buffer(LOWER * torch.arange(LONGEST)[:, None])),
    "scaled after the fill": attends(scaled_after_the_fill),
    "a mask that is added": attends(added, mask=buffer(LOWER.log())),
    "softmax in fp32": attends(in_fp32),
    "a softmax by hand": attends(by_hand, mask=buffer(LOWER.log())),
    "heads that share keys": attends(grouped),
    "heads in groups that share keys": attends(in_groups),
    "heads between queries and keys": attends(heads_between),
    "an idle dropout": attends(dropping, drop=lambda: nn.Dropout(0.0)),
    "called with a mask": attends(called_with_a_mask, mask=buffer(LOWER.bool())),
    "a bias that is learned": attends(added, mask=lambda: nn.Parameter(torch.zeros(LONGEST, LONGEST))),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    fused(FUSES[name]).expect(attention=1, linear=2)


def called(model, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_call_without_a_mask_is_left_alone_in_plain_pytorch() -> None:
    report = fused(attends(called))
    assert "attention" not in {site.rule for site in report.sites}  # there is nothing to act on
    sites(attends(called), backend="te").expect(attention=1)


def called_with_a_bias(model, q, k, v):
    length = q.shape[-2]
    return F.scaled_dot_product_attention(q, k, v, model.mask[:length, :length])


def test_a_bias_is_left_to_pytorch_where_the_fast_cores_have_none() -> None:
    make = attends(called_with_a_bias, mask=lambda: nn.Parameter(torch.zeros(LONGEST, LONGEST)))
    fused(make).expect(attention=1)
    assert reasons(sites(make, backend="te"), "attention") == {
        "the attention adds a learned bias to its scores, but TE's fast cores compute no gradient for it: "
        "freeze the bias, if you can retrain"
    }


def alibi(model, q, k, v):
    """A bias for each head that nobody learns, written out under a causal mask."""
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    biased = scores(q, k) + model.mask[:, :length, :length]
    return biased.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def called_with_alibi(model, q, k, v):
    length = q.shape[-2]
    mask = model.mask[:, :length, :length] + torch.full((length, length), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q, k, v, mask[None])


def test_a_bias_that_nobody_learns_is_fused() -> None:
    distance = torch.arange(LONGEST) - torch.arange(LONGEST)[:, None]
    mask = buffer(distance * torch.tensor([0.5, 0.25]).view(HEADS, 1, 1))
    sites(attends(called_with_alibi, mask=mask), backend="te").expect(attention=1)
    fused(attends(alibi, mask=mask)).expect(attention=1)
    sites(attends(alibi, mask=mask), backend="te").expect(attention=1)
    learned = attends(alibi, mask=lambda: nn.Parameter(mask()))
    assert reasons(sites(learned, backend="te"), "attention") == {
        "the attention adds a learned bias to its scores, but TE's fast cores compute no gradient for it: "
        "freeze the bias, if you can retrain"
    }


def called_with_a_mask_without_gradients(model, q, k, v):
    """A float mask that is computed from trained values within torch.no_grad()."""
    with torch.no_grad():
        size = (q[:, :1] * model.mask[:HEADS, :1, None]).mean(-1)
        mask = torch.zeros(q.shape[0], 1, 1, q.shape[-2]).masked_fill(size[..., None, :] < -9, -torch.inf)
        mask = mask + 0 * size[..., None, :]
    return F.scaled_dot_product_attention(q, k, v, mask)


def test_mask_computed_without_gradients_is_not_learned() -> None:
    make = attends(
        called_with_a_mask_without_gradients, mask=lambda: nn.Parameter(torch.ones(LONGEST, LONGEST))
    )
    sites(make, backend="te").expect(attention=1)


def called_with_choices(model, q, k, v):
    """Sparse attention: an indexer's choices hide keys, and no gradient goes through indices."""
    chosen = (model.mask[: q.shape[-2], :1] * q[..., :1] @ k[..., :1].mT).topk(2, -1).indices
    hidden = torch.ones(*q.shape[:-1], q.shape[-2], dtype=torch.bool).scatter(-1, chosen, False)
    mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, mask[:, :1])


def test_a_mask_of_learned_choices_is_fused() -> None:
    make = attends(called_with_choices, mask=lambda: nn.Parameter(torch.ones(LONGEST, LONGEST)))
    sites(make, backend="te").expect(attention=1)


def weights_read(model, q, k, v):
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True)


def scaled_by_a_tensor(model, q, k, v):
    return (scores(q, k) * model.mask[:HEADS, :1, None]).softmax(-1) @ v


def held(model, q, k, v):
    return torch.max(scores(q, k) + model.mask[0, 0], torch.tensor(-1.0)).softmax(-1) @ v


def with_a_sink(model, q, k, v):
    sink = model.mask[:HEADS, :1, None].expand(*q.shape[:-1], 1)
    return torch.cat((scores(q, k), sink), -1).softmax(-1)[..., :-1] @ v


def over_heads(model, q, k, v):
    weights = torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(-1)
    return torch.einsum("bqkh,bhkd->bhqd", weights, v)


def written_in_between(model, q, k, v):
    weights = scores(q, k)
    weights[..., 0] = 0.0
    return weights.softmax(-1) @ v


def filled_in_between(model, q, k, v):
    weights = scores(q, k)
    mask = torch.zeros(q.shape[-2], q.shape[-2])
    mask[1:, 0] = -1.0
    return (weights + mask).softmax(-1) @ v


def barely_filled(model, q, k, v):
    length = q.shape[-2]
    return scores(q, k).masked_fill(model.mask[:length, :length] == 0, -5.0).softmax(-1) @ v


def filled_later(model, q, k, v):
    hidden = model.mask[: q.shape[-2], : q.shape[-2]] == 0
    return scores(q, k).softmax(-1).masked_fill(hidden, 0.0) @ v


def multiplied_later(model, q, k, v):
    return (scores(q, k).softmax(-1) * model.mask[:HEADS, :1, None]) @ v


def negative(model, q, k, v):
    return (q @ k.mT * -0.5).softmax(-1) @ v


def called_with_a_negative_scale(model, q, k, v):
    length = q.shape[-2]
    return F.scaled_dot_product_attention(q, k, v, model.mask[:length, :length] == 1, scale=-0.5)


NEGATIVE = (
    "the attention multiplies its scores by -0.5, but kernels hide keys before they multiply, and need a "
    "positive number: negate the queries, and multiply by a positive number"
)
BETWEEN = (
    "the attention has {} between its two products, but fused attention has only a scale, a mask, a softmax "
    "and a dropout: compile=True joins the operations between the products"
)
LATER = (
    "the attention has {} after its softmax, but fused attention has only zeros for hidden keys and a "
    "dropout there: move the operations before the softmax or behind the product, if the math allows"
)
REFUSES = {
    "weights that are read": (
        weights_read,
        "the attention's scores or probabilities are also read by sum, but fused attention does not return "
        "them: pass need_weights=False or output_attentions=False, or let nothing else read them",
    ),
    "a scale for each head": (
        scaled_by_a_tensor,
        "the attention's scores are multiplied by a tensor, but fused attention needs a number: multiply the "
        "queries by it, or add it if it is a mask",
    ),
    "a least score": (held, BETWEEN.format("max")),
    "a sink": (with_a_sink, BETWEEN.format("cat, columns")),
    "a softmax over heads": (
        over_heads,
        "the attention's softmax is over another dimension than the keys, but fused attention needs it over "
        "the keys: no kernel supports another dimension",
    ),
    "scores that are written": (
        written_in_between,
        "the model writes to a tensor in the middle of the attention, but fused attention is one call: make "
        "a new tensor there",
    ),
    "a mask that is filled": (
        filled_in_between,
        "the model fills another tensor, such as a mask, in the middle of the attention, but fused "
        "attention is one call: fill the tensor before the attention",
    ),
    "two numbers": (
        filled_with_two_numbers,
        "the attention's scores are filled with several numbers, but fused attention fills them with one: "
        "use the same number of -1e4 or less in both calls, or fill once by both masks",
    ),
    "probabilities that are filled": (filled_later, LATER.format("masked_fill")),
    "probabilities that are multiplied": (multiplied_later, LATER.format("mul")),
    "a negative scale": (negative, NEGATIVE),
    "a negative scale of a call": (called_with_a_negative_scale, NEGATIVE),
    "a fill that hides nothing": (
        barely_filled,
        "the attention has other shapes, dtypes or masks than scaled_dot_product_attention: use [batch, "
        "heads, length, width] of one dtype, and a mask that is added, or filled with -1e4 or less",
    ),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    core, sentence = REFUSES[name]
    report = fused(attends(core, mask=buffer(LOWER)))
    assert report.counts == {"linear": 2}
    assert reasons(report, "attention") == {sentence}


def linear_attention_of_softmaxes(model, q, k, v):
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return torch.einsum("bhde,bhnd->bhne", context, q.softmax(-1))


def causal_linear_attention(model, q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
    return torch.einsum("bhtd,bhtde->bhte", q, sums) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def retention(model, q, k, v):
    order = torch.arange(q.shape[-2], dtype=q.dtype)
    distances = order[:, None] - order
    return (scores(q, k) * torch.where(distances >= 0, 0.9**distances, 0.0)) @ v


def by_sigmoid(model, q, k, v):
    return (scores(q, k) - 1.5).sigmoid() @ v


def by_squared_relu(model, q, k, v):
    hidden = model.mask[: q.shape[-2], : q.shape[-2]] == 0
    return F.relu(scores(q, k)).square().masked_fill(hidden, 0.0) @ v


def with_talking_heads(model, q, k, v):
    weights = model.heads(scores(q, k).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return weights.softmax(-1) @ v


def with_heads_that_talk_later(model, q, k, v):
    weights = scores(q, k).softmax(-1)
    return model.heads(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


def with_talking_einsums(model, q, k, v):
    weights = torch.einsum("bhqk,gh->bgqk", scores(q, k), model.heads.weight).softmax(-1)
    return torch.einsum("bhqk,gh->bgqk", weights, model.heads.weight) @ v


def softmax_plus_one(model, q, k, v):
    grown = scores(q, k).exp()
    return grown / (1 + grown.sum(-1, keepdim=True)) @ v


def divided_after_the_product(model, q, k, v):
    hidden = model.mask[: q.shape[-2], : q.shape[-2]] == 0
    grown = scores(q, k).masked_fill(hidden, -torch.inf).exp()
    return grown @ v / grown.sum(-1, keepdim=True)


def linear_attention(model, q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


def linear_attention_by_einsum(model, q, k, v):
    q, k = F.relu(q), F.relu(k)
    sums = 1 / (torch.einsum("bhld,bhd->bhl", q, k.sum(-2)) + 1)
    return torch.einsum("bhld,bhdm,bhl->bhlm", q, torch.einsum("bhld,bhlm->bhdm", k, v), sums)


def by_normalized_relu(model, q, k, v):
    return F.normalize(scores(q, k).relu(), p=1, dim=-1) @ v


def by_normalized_maximum(model, q, k, v):
    grown = torch.maximum(scores(q, k), torch.zeros(()))
    return grown / (grown.sum(-1, keepdim=True) + 1e-6) @ v


def with_einsum_of_three(model, q, k, v):
    return torch.einsum("bhij,bhjd,gh->bgid", scores(q, k).softmax(-1), v, model.heads.weight)


SEVERAL = (
    "the attention multiplies several tensors in one einsum, but fused attention needs products of two "
    "tensors: write one einsum for each product"
)
INSTEAD = (
    "the attention has {} in place of the softmax, but fused attention needs a softmax over the keys: "
    "compile=True joins the operations between the products"
)
LINEAR = (
    "the attention multiplies {} of queries and keys (linear attention), but fused attention needs a softmax "
    "of their product: compile=True joins the operations around the products"
)
OTHER_ATTENTION = {
    "sigmoid attention": (by_sigmoid, INSTEAD.format("sigmoid")),
    "squared ReLU attention": (by_squared_relu, INSTEAD.format("squared_relu")),
    "talking heads": (with_talking_heads, BETWEEN.format("linear")),
    "talking heads after the softmax": (with_heads_that_talk_later, BETWEEN.format("linear")),
    "talking heads by einsum": (with_talking_einsums, BETWEEN.format("linear")),
    "a softmax with one more term": (softmax_plus_one, INSTEAD.format("exp")),
    "a softmax that is divided last": (divided_after_the_product, INSTEAD.format("exp")),
    "relu that is normalized": (by_normalized_relu, INSTEAD.format("relu")),
    "a maximum that is normalized": (by_normalized_maximum, INSTEAD.format("maximum")),
    "an einsum of three tensors": (with_einsum_of_three, SEVERAL),
    "linear attention": (linear_attention, LINEAR.format("elu")),
    "linear attention by einsum": (linear_attention_by_einsum, LINEAR.format("relu")),
    "linear attention of two softmaxes": (linear_attention_of_softmaxes, LINEAR.format("softmax")),
    "causal linear attention": (causal_linear_attention, LINEAR.format("elu")),
    "retention": (retention, INSTEAD.format("a product with a tensor")),
}


@pytest.mark.parametrize("name", OTHER_ATTENTION)
def test_other_attention_has_a_reason(name: str) -> None:
    core, sentence = OTHER_ATTENTION[name]
    report = sites(attends(core, mask=buffer(LOWER), heads=linear(HEADS, HEADS)))
    assert "attention" not in report.counts
    assert reasons(report, "attention") == {sentence}


def scaled_before(model, q, k, v):
    return scores(q * model.mask[:HEADS, :1, None], k).softmax(-1) @ v


def filled_before(model, q, k, v):
    mask = torch.zeros(q.shape[-2], q.shape[-2])
    mask[1:, 0] = -1.0
    return (scores(q, k) + mask).softmax(-1) @ v


def made_anew(model, q, k, v):
    hidden = torch.arange(k.shape[-2]) == 0
    return scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def filled(model, q, k, v):
    length = q.shape[-2]
    return scores(q, k).masked_fill(model.mask[:length, :length] == 0, -1e4).softmax(-1) @ v


def negated(model, q, k, v):
    return called_with_a_mask(model, -q, k, v)


class Asked(nn.Module):
    """PyTorch's own attention, which hands out its weights if it is asked for them."""

    def __init__(self, need_weights: bool):
        super().__init__()
        self.inner, self.need_weights = nn.MultiheadAttention(H, HEADS, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


FROZEN = {"mask": lambda: nn.Parameter(torch.zeros(LONGEST, LONGEST), requires_grad=False)}
FOLLOWED = {  # what the sentences advise
    "multiply the queries by the tensor": attends(scaled_before, mask=buffer(LOWER)),
    "fill the tensor before the attention": attends(filled_before),
    "make a new tensor there": attends(made_anew),
    "give it a mask that is filled with -1e4": attends(filled, mask=buffer(LOWER)),
    "negate the queries": attends(negated, mask=buffer(LOWER.bool())),
    "let nothing else read them": lambda: Asked(need_weights=False),
    "freeze it": attends(called_with_a_bias, **FROZEN),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str) -> None:
    sites(FOLLOWED[name], backend="te").expect(attention=1)


def dense_experts(model, q, k, v):
    """Products with stored weights, also chosen by tokens, or stacked."""
    chosen = model.up[model.router(k).argmax(-1)]
    of_chosen = (v[..., None, :] @ chosen).relu() @ chosen.mT
    stacked = torch.stack([*model.up])
    return (q @ model.up).relu() @ model.up.mT + of_chosen.squeeze(-2) + (v @ stacked).relu() @ stacked.mT


def pooled(model, q, k, v):
    """Nodes that are assigned to clusters, as in DiffPool."""
    assigned = q.softmax(-1)
    return q + (assigned.mT @ (k @ v.mT) @ assigned).sum(-1, keepdim=True).mT


def routed(model, q, k, v):
    """Experts that are weighted have a softmax, and no attention."""
    return q * model.router(q).softmax(-1)[..., :1] + k + v


@pytest.mark.parametrize("core", [dense_experts, pooled, routed])
def test_other_products_are_no_attention(core) -> None:
    up = lambda: nn.Parameter(torch.ones(HEADS, WIDTH, FFN))  # noqa: E731
    report = fused(attends(core, router=linear(WIDTH, 2), up=up))
    assert not any(site.rule == "attention" for site in report.sites)


def test_the_site_is_reported_at_the_module_around_it() -> None:
    make = written(lambda m, x: m.inner(x), inner=attends(written_out))
    (site,) = (site for site in sites(make).sites if site.rule == "attention")
    assert (site.path, site.status) == ("inner", "fused")


@pytest.mark.parametrize(
    ("of", "copied"),
    [
        (lambda v: v, True),
        (lambda v: v[:, :1].expand(-1, HEADS, -1, -1), False),  # one number for all heads stays one
        (lambda v: v[0], False),
        (lambda v: v.detach(), False),
    ],
    ids=["heads", "one head", "three dimensions", "no gradient"],
)
def test_values_are_kept_without_the_product_that_they_are_a_part_of(of: Make, copied: bool) -> None:
    product = torch.randn(2, LONGEST, 3 * H, requires_grad=True) * 1
    value = of(heads(product.chunk(3, -1)[2]))
    shape = (2, HEADS, LONGEST, WIDTH)[-value.dim() :]
    query, key = torch.randn(shape, requires_grad=True), torch.randn(shape)
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.add(t.untyped_storage()._cdata) or t.detach(), lambda t: t
    ):
        out = plain.DotProductAttention(written_out=False)(query, key, value)
    assert (product.untyped_storage()._cdata not in kept) == copied
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value))


SHARED = {"rows": (3, 9), "batches": (2, 1, 3, 9), "heads": (2, 6, 3, 9), "one key": (3, 1)}


@pytest.mark.parametrize("shape", SHARED)
@pytest.mark.parametrize("length", [1, 3])
def test_a_mask_with_heads_that_queries_share(
    shape: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's fused kernels take no such call: as many heads are handed to it on both sides."""
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.float64, generator=generator)

    mask = random(*SHARED[shape])[..., :length, :]
    parts = [random(2, count, size, 4) for count, size in ((6, length), (2, 9), (2, 9))]
    expected = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
    calls, sdpa = [], ops.sdpa

    def noted(query: Tensor, key: Tensor, *rest: object, enable_gqa: bool = False) -> Tensor:
        calls.append((query.shape[-3] == key.shape[-3], enable_gqa))
        return sdpa(query, key, *rest)

    monkeypatch.setattr(ops, "sdpa", noted)
    given = [part.requires_grad_() for part in parts]
    found = plain.DotProductAttention().attend(*given, mask, 0.0, False, None, True)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert all(map(torch.allclose, torch.autograd.grad(found.sum(), given), _gradients(given, mask)))
    assert calls == [(True, False)]


def _gradients(parts: list[Tensor], mask: Tensor) -> tuple[Tensor, ...]:
    out = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
    return torch.autograd.grad(out.sum(), parts)


def masks() -> dict[str, Tensor]:
    kept = torch.arange(600) < 400
    nothing = torch.stack([kept, torch.zeros(600, dtype=torch.bool)]).view(2, 1, 1, 600)
    bias = torch.randn(6, 1, 600, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {
        "kept": kept.view(1, 1, 1, 600),
        "a row that sees nothing": nothing,
        "-inf": torch.zeros(1, 600).masked_fill(~kept, float("-inf")).bfloat16(),
        "the lowest number": torch.zeros(2, 1, 1, 600).masked_fill(~nothing, -3e38).bfloat16(),
        "a bias for each head": bias,
    }


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("scale", [None, 0.5])
def test_few_queries_with_a_mask_written_out(
    name: str, scale: float | None, kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 6, 1, 8), (2, 2, 600, 8), (2, 2, 600, 8))
    parts, mask = [torch.randn(size, generator=generator).bfloat16() for size in sizes], masks()[name]
    how = {"scale": scale, "enable_gqa": True}
    wide = mask if mask.dtype is torch.bool else mask.double()
    exact = F.scaled_dot_product_attention(*(part.double() for part in parts), attn_mask=wide, **how)
    monkeypatch.setattr(ops, "sdpa", None)  # is not called
    with torch.no_grad():
        found = plain.DotProductAttention().attend(*parts, mask, 0.0, False, scale, True)
    assert found.dtype is torch.bfloat16
    # what attends to each key is rounded to bf16 before it multiplies the values, as in the fused kernels
    assert (found - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.parametrize("wide_scores", [False, True])
def test_an_added_mask_is_trained_with_as_the_model_has_it(wide_scores: bool) -> None:
    """With scores of its own dtype, in bf16, and gradients that are right in rows that are hidden everywhere,
    as those of the fused kernels are not."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(2, 3, 5, 7, generator=generator).bfloat16()
    mask[0, :, :2] = torch.finfo(torch.bfloat16).min
    narrow = [torch.randn(2, 3, n, 8, generator=generator).bfloat16() for n in (5, 7, 7)]

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = (part.float() if wide_scores else part for part in (query, key))
        return (query @ key.mT * 0.5 + mask).softmax(-1).to(value.dtype) @ value

    def core(*parts: Tensor) -> Tensor:
        return plain.DotProductAttention(wide_scores=wide_scores)(*parts, mask, 0.0, False, 0.5)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * 0.5 + mask).softmax(-1) @ value

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        parts = [part.to(dtype).requires_grad_() for part in narrow]
        out = function(*parts)
        return [out, *torch.autograd.grad(out, parts, torch.ones_like(out))]

    narrowly = (results(function, torch.bfloat16) for function in (core, own))
    for found, theirs, wanted in zip(*narrowly, results(exact, torch.float64), strict=True):
        assert found.dtype is torch.bfloat16
        assert (found - wanted).norm() <= 1.1 * (theirs - wanted).norm() + 2**-9 * wanted.norm()


def test_scores_of_scaled_queries_stay_within_fp16() -> None:
    """Models in fp16 scale their queries, as their products would be infinite otherwise."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 64, generator=generator).half() for _ in range(3))
    query, key, mask = query * 200, key * 200, torch.randn(2, 3, 5, 5, generator=generator).half()
    query.requires_grad_()
    assert not (query @ key.mT).isfinite().all()
    out = plain.DotProductAttention()(query, key, value, mask, 0.0, False, 2.0**-15)
    torch.testing.assert_close(out, (query * 2.0**-15 @ key.mT + mask).softmax(-1) @ value)
    assert torch.autograd.grad(out.sum(), query)[0].isfinite().all()
