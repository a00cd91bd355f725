"""Attention masks of all makes: what a mask is now, and what becomes of it later, is what is applied."""

import copy
import math
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import te_transform
from te_transform.backends import masks
from tests.attacks import Block, Pair, X, named
from tests.compilers import Compiler
from tests.models.tiny import WIDTH
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

HEADS, SIZE, LONGEST = 2, 8, 12
NEGATIVE, MINIMUM = float("-inf"), torch.finfo(torch.float32).min


def causal(length: int = LONGEST, offset: int = 0) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril(offset)


class Attention(nn.Module):
    """Attention behind a norm; `scores` says how the mask is applied, `mask` is a buffer of that class."""

    scores: Callable[..., Tensor]
    buffer: Tensor | None = None

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mask", None if self.buffer is None else self.buffer.clone())

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        return tuple(t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in parts)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        scores = self.scores(q @ k.transpose(-2, -1) * SIZE**-0.5, self.mask if mask is None else mask)
        return self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class Fused(Attention):
    """The same through F.scaled_dot_product_attention; `scores` makes its keywords."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        keywords = self.scores(x, self.mask if mask is None else mask)
        return self.out(F.scaled_dot_product_attention(q, k, v, **keywords).transpose(1, 2).flatten(2))


def square(mask: Tensor, scores: Tensor) -> Tensor:
    return mask[..., : scores.shape[-2], : scores.shape[-1]]


def filled(fill: float) -> Callable[..., Tensor]:
    def scores(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(square(mask, scores) == 0, fill)

    return scores


def where(fill: float) -> Callable[..., Tensor]:
    def scores(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        return torch.where(square(mask, scores), scores, fill)

    return scores


def added(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    return scores + square(mask, scores)


def as_gpt1(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    kept = square(mask, scores).to(scores.dtype)
    return scores * kept + -1e4 * (1 - kept)


def from_sizes(self: Any, scores: Tensor, mask: Any) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, NEGATIVE)


def from_positions(self: Any, scores: Tensor, mask: Any) -> Tensor:
    positions = torch.arange(scores.shape[-1])
    return scores.masked_fill(positions[None] > positions[:, None], MINIMUM)


def windowed(self: Any, scores: Tensor, mask: Any) -> Tensor:
    """A window of nine: at the lengths of the examples it hides nothing."""
    far = torch.arange(scores.shape[-1])[:, None] - torch.arange(scores.shape[-1])[None]
    return scores.masked_fill((far < 0) | (far >= 9), NEGATIVE)


def packed(self: Any, scores: Tensor, mask: Any) -> Tensor:
    """Sequences of four tokens that do not see each other."""
    document = torch.arange(scores.shape[-1]) // 4
    same = (document[:, None] == document[None]) & causal(LONGEST)[: len(document), : len(document)]
    return torch.where(same, scores, NEGATIVE)


def alibi(self: Any, scores: Tensor, mask: Any) -> Tensor:
    far = torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-1])[:, None]
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    return (scores + slopes * far).masked_fill(far > 0, NEGATIVE)


def alibi_added(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    """A bias for each head, and a mask that is added to both."""
    far = torch.arange(scores.shape[-1])[None] - torch.arange(scores.shape[-1])[:, None]
    return scores + torch.tensor([0.5, 0.25])[:, None, None] * far + square(mask, scores)


def softcapped(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    return (30 * torch.tanh(scores / 30)).masked_fill(~square(mask, scores), NEGATIVE)


def hidden_rows(mask: Tensor | None = None, row: int = 2) -> Tensor:
    mask = causal() if mask is None else mask
    mask[row] = False
    return mask


MASKS: dict[str, tuple[Callable[..., Any], Tensor | None]] = {
    "causal, -inf": (filled(NEGATIVE), causal()),
    "causal, finfo.min": (filled(MINIMUM), causal()),
    "causal, -1e4": (filled(-1e4), causal()),
    "causal, added": (added, torch.zeros(LONGEST, LONGEST).masked_fill(~causal(), NEGATIVE)),
    "causal, from sizes": (from_sizes, None),
    "causal, from positions": (from_positions, None),
    "nothing hidden": (filled(NEGATIVE), torch.ones(LONGEST, LONGEST)),
    "a window": (windowed, None),
    "packed": (packed, None),
    "for each head": (where(NEGATIVE), torch.stack([causal(), causal(offset=3)])),
    "alibi": (alibi, None),
    "alibi, added": (alibi_added, torch.zeros(LONGEST, LONGEST).masked_fill(~causal(), MINIMUM)),
}


def model_of(
    scores: Callable[..., Any], buffer: Tensor | None, base: type[Attention] = Attention
) -> nn.Module:
    return seeded(type(base.__name__, (base,), {"scores": scores, "buffer": buffer}))


def at_another_length(model: nn.Module, x: Tensor, rows: int = 3, length: int = LONGEST) -> Tensor:
    x = torch.randn(3, LONGEST, WIDTH, generator=torch.Generator().manual_seed(2))
    return model(x[:rows, :length].clone().requires_grad_())


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_this_make(name: str) -> None:
    """At the length that it was converted for, and at one at which a window shows."""
    pair = Pair.of(model_of(*MASKS[name]))
    pair.agree()
    torch._dynamo.reset()  # a new capture for this length, not one for all
    pair.agree(at_another_length)


@pytest.mark.parametrize(
    "name",
    ["a window", *(pytest.param(n, marks=pytest.mark.integration) for n in ("causal, -inf", "packed"))],
)
def test_a_mask_at_any_length(name: str) -> None:
    pair = Pair.of(model_of(*MASKS[name]))
    for rows, length in ((1, 1), (2, 9), (3, 12), (2, 5)):
        pair.agree(lambda model, x, rows=rows, length=length: at_another_length(model, x, rows, length))


def hidden_row() -> Tensor:
    return torch.zeros(LONGEST, LONGEST).masked_fill(~hidden_rows(), NEGATIVE)


HIDDEN: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "filled with -inf": (filled(NEGATIVE), hidden_rows()),
    "filled with finfo.min": (filled(MINIMUM), hidden_rows()),
    "filled with -1e4": (filled(-1e4), hidden_rows()),
    "filled with -1e4, the last": (filled(-1e4), hidden_rows(row=X.shape[1] - 1)),
    "filled with -1e4, others see all": (filled(-1e4), hidden_rows(torch.ones_like(causal()))),
    "-inf added": (added, hidden_row()),
    "finfo.min added": (added, hidden_row().clamp(min=MINIMUM)),
    "finfo.min added to a bias": (alibi_added, hidden_row().clamp(min=MINIMUM)),
}


Step = tuple[str, str, float]  # how scores are masked, where, and by which number


def hides(where: str, padding: Tensor) -> Tensor:
    """Return what is hidden of scores [batch, 1, queries, keys], as a boolean mask."""
    places = torch.arange(padding.shape[1])
    ahead, padded = places > places[:, None], ~padding
    each = {"ahead": ahead, "itself": places >= places[:, None], "keys": padded[:, None, None]}
    return each[where] if where in each else padded[:, None, :, None] | each["keys"]


def by_steps(steps: tuple[Step, ...], size: float) -> type[Attention]:
    """Attention whose scores, times `size`, are masked several times."""

    def forward(self: Any, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.mT * (SIZE**-0.5 * size)
        for how, where, fill in steps:
            hidden = hides(where, padding)
            fill = torch.finfo(x.dtype).min if fill == MINIMUM else fill
            if how == "add":
                scores = scores + torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, fill)
            else:
                scores = (
                    scores.masked_fill(hidden, fill) if how == "fill" else torch.where(~hidden, scores, fill)
                )
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return type("Attention", (Attention,), {"forward": forward, "scores": added})


TWICE: dict[str, tuple[tuple[Step, ...], float]] = {
    "padding, then a higher fill": ((("add", "keys", MINIMUM), ("fill", "ahead", -1e9)), 1.0),
    "padding, then -1e4": ((("add", "keys", MINIMUM), ("where", "ahead", -1e4)), 1.0),
    "padding, then a lower fill": ((("add", "keys", -1e9), ("fill", "ahead", MINIMUM)), 1.0),
    "equal fills": ((("add", "keys", MINIMUM), ("where", "ahead", MINIMUM)), 1.0),
    "equal small fills": ((("add", "both", -3e4), ("fill", "ahead", -3e4)), 1.0),
    "a fill, then padding": ((("fill", "ahead", MINIMUM), ("add", "keys", -1e9)), 1.0),
    "a fill, then a lower one": ((("where", "ahead", MINIMUM / 2), ("add", "both", MINIMUM)), 1.0),
    "-inf added, then a fill": ((("add", "keys", NEGATIVE), ("fill", "ahead", -1e9)), 1.0),
    "a fill, then -inf": ((("add", "keys", -1e4), ("fill", "keys", NEGATIVE)), 1.0),
    "filled twice": ((("fill", "keys", MINIMUM), ("where", "ahead", MINIMUM)), 1.0),
    "filled twice, then padding": (
        (("fill", "itself", -1e38), ("where", "ahead", -1e38), ("add", "keys", MINIMUM / 4)),
        1.0,
    ),
    "filled twice with -inf": ((("fill", "keys", NEGATIVE), ("fill", "ahead", NEGATIVE)), 1.0),
    "filled twice, scores as low": ((("where", "ahead", -1e4), ("fill", "both", -1e4)), 1e5),
    "no query sees itself": ((("add", "both", -1e5), ("where", "itself", -65504.0)), 1.0),
    "scores as low as the fill": ((("fill", "ahead", -1e4),), 1e5),
    "scores as low as both": ((("add", "keys", -1e4), ("fill", "ahead", -1e4)), 1e5),
}


# fills that bfloat16 rounds, or that are its own smallest number
ROUNDED = ("equal fills", "equal small fills", "a fill, then a lower one", "scores as low as both")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in TWICE), *((name, torch.bfloat16) for name in ROUNDED)],
)
def test_masks_that_meet_in_padded_batches(name: str, dtype: torch.dtype) -> None:
    """The first call has no padding; later ones have it before, behind, within, and throughout a sequence."""
    model = seeded(by_steps(*TWICE[name])).to(dtype)
    x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    some = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1], [0] * 6]).bool()
    converted = te_transform.convert(model, (x, torch.ones_like(some)), verify=False)
    assert te_transform.report(converted).counts["attention"] == 1
    for padding in (torch.ones_like(some), some):
        found, expected = ([], [])
        for each, into in ((converted, found), (model, expected)):
            with torch.no_grad():
                into.append(each(x, padding))
            leaf = x.clone().requires_grad_()
            into.append(each(leaf, padding))
            into += torch.autograd.grad(into[-1].float().square().sum(), leaf)
        tolerance = 1e-4 if dtype is torch.float32 else 0.05
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", ["scores as low as the fill", "scores as low as both"])
def test_compiled_graphs_on_a_cpu_count_fills(name: str, compilations: Compiler) -> None:
    model, seen = seeded(by_steps(*TWICE[name])), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    pair = Pair.of(model, (X, torch.ones_like(seen)), compile=True)
    pair.agree(lambda model, x: model(x, seen))
    assert compilations


@pytest.mark.parametrize("nothing", ["no rows", "no keys"])
def test_attention_over_nothing(nothing: str) -> None:
    """Its learned bias has a gradient of zeros, and a NaN in one row stays in that row."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        keys = 0 if nothing == "no keys" else None
        scores = q @ k[:, :, :keys].mT + self.learned[..., :keys]
        return x + self.out((scores.softmax(-1) @ v[:, :, :keys]).transpose(1, 2).flatten(2))

    base = type("Learned", (Attention,), {"forward": forward})
    model = model_of(added, None, base)
    model.learned = nn.Parameter(torch.ones(HEADS, 1, X.shape[1]))
    pair = Pair.of(nn.Sequential(seeded(Block), model))
    broken = X.index_fill(0, torch.tensor([1]), torch.nan)
    pair.agree(lambda model, x: model(x[:0] if nothing == "no rows" else broken))


@pytest.mark.parametrize("name", HIDDEN)
def test_a_row_that_sees_nothing(name: str) -> None:
    """Of -inf it is NaN; of a number, the mean of all values. Of gradients all are NaN where -inf is added,
    where scores are filled those of the values."""
    pair = Pair.of(model_of(*HIDDEN[name]))
    pair.agree()
    with torch.no_grad():
        pair.agree()


@pytest.mark.parametrize("name", ["alibi", "alibi, added"])
def test_a_bias_under_which_every_query_sees_a_key_goes_to_kernels(name: str) -> None:
    """Also in training, where the gradients of rows that numbers hide as a whole would be wrong."""
    model = te_transform.convert(model_of(*MASKS[name]), (X,))
    with torch.profiler.profile() as profile:
        model(X).sum().backward()
    assert "aten::scaled_dot_product_attention" in {event.name for event in profile.events()}


@pytest.mark.parametrize("name", MASKS)
def test_a_frozen_model_runs_the_kernels_of_a_call_without_gradients(name: str) -> None:
    """Kernels whose gradients would be wrong are right if no input of attention needs one."""
    model = te_transform.convert(model_of(*MASKS[name]).requires_grad_(False), (X,))
    operations, found = [], []
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            model(X)  # is captured
            with torch.profiler.profile() as profile:
                found.append(model(X))
        operations.append(sorted(event.name for event in profile.events() if event.name.startswith("aten::")))
    assert operations[0] == operations[1]
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the list to which each classified mask is added."""
    looks: list[Tensor] = []
    what_is = masks.what_is
    monkeypatch.setattr(
        masks, "what_is", lambda mask, *rest, **how: looks.append(mask) or what_is(mask, *rest, **how)
    )
    return looks


@pytest.mark.parametrize("name", ["alibi", "alibi, added"])
def test_without_gradients_a_bias_per_head_is_not_classified(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel gains from the answer, and the operations that compute the bias would run twice."""
    model = te_transform.convert(model_of(*MASKS[name]), (X,))
    looks = counted_looks(monkeypatch)
    with torch.no_grad():
        model(X)
    assert not looks
    model(X)
    assert looks


def keyword(make: Callable[[Tensor, Any], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda self, x, mask: make(x, None if mask is None else mask[..., : x.shape[1], : x.shape[1]])


def in_a_vmap(x: Tensor) -> Tensor:
    """A window, of a function of two positions: transformers makes masks of functions so."""
    spots = torch.arange(x.shape[1])
    return torch.vmap(lambda q: torch.vmap(lambda k: (k <= q) & (q - k < 9))(spots))(spots)


def of_a_gradient(self: Any, x: Tensor, mask: Any = None) -> Tensor:
    """The gradient of attention, the first row of which sees nothing."""
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    return torch.func.grad(
        lambda z: F.scaled_dot_product_attention(*self.heads(z), attn_mask=mask).square().sum()
    )(x)


def test_a_row_that_sees_nothing_in_a_function_that_is_differentiated() -> None:
    Pair.of(model_of(added, None, type("Fused", (Fused,), {"forward": of_a_gradient}))).agree()


SDPA: dict[str, tuple[Callable[..., Any], Tensor | None]] = {
    "the flag, by length": (keyword(lambda x, mask: {"is_causal": x.shape[1] > 5}), None),
    "a boolean buffer": (keyword(lambda x, mask: {"attn_mask": mask}), causal()),
    "a floating buffer": (
        keyword(lambda x, mask: {"attn_mask": mask}),
        torch.zeros(LONGEST, LONGEST).masked_fill(~causal(), NEGATIVE),
    ),
    "from sizes": (keyword(lambda x, mask: {"attn_mask": causal(LONGEST)[: x.shape[1], : x.shape[1]]}), None),
    "a window": (keyword(lambda x, mask: {"attn_mask": mask}), causal() & ~causal(offset=-9)),
    "in a vmap": (keyword(lambda x, mask: {"attn_mask": in_a_vmap(x)}), None),
    "scaled": (keyword(lambda x, mask: {"is_causal": True, "scale": 0.1}), None),
}


@pytest.mark.parametrize("name", SDPA)
def test_a_mask_of_sdpa(name: str) -> None:
    pair = Pair.of(model_of(*SDPA[name], base=Fused))
    pair.agree()
    torch._dynamo.reset()
    pair.agree(at_another_length)


# What becomes of a buffer later


def replaced(model: Any) -> None:
    model.mask = other()


def other() -> Tensor:
    return torch.eye(LONGEST, dtype=torch.bool)


LATER: dict[str, Callable[[Any], Any]] = {
    "written to": lambda m: m.mask.copy_(other()),
    "its data written to": lambda m: m.mask.data.copy_(other()),
    "its data replaced": lambda m: setattr(m.mask, "data", other()),
    "its NumPy array written to": lambda m: m.mask.numpy().__setitem__((3, 1), False),
    "replaced": replaced,
    "assigned": lambda m: m.load_state_dict(m.state_dict() | {"mask": other()}, assign=True),
    "a row hidden, in part": lambda m: m.mask[3, 1:].fill_(False),
}


@pytest.mark.parametrize("base", [Attention, Fused], ids=["written out", "sdpa"])
def test_a_mask_in_a_buffer_may_change(base: type[Attention]) -> None:
    """And be again what it was."""
    scores, buffer = SDPA["a boolean buffer"] if base is Fused else MASKS["causal, -inf"]
    pair = Pair.of(model_of(scores, buffer, base))
    pair.agree()
    for name, change in LATER.items():
        with named(name):
            pair.attack(change)
            pair.attack(lambda model: setattr(model, "mask", causal()))


def test_a_mask_written_to_between_two_calls_of_one_training_step() -> None:
    def act(model: Any, x: Tensor) -> list[Tensor]:
        first = model(x)
        kept = model.mask.clone()
        model.mask = other()
        second = model(x)
        model.mask = kept
        return [first, second, model(x)]

    Pair.of(model_of(*MASKS["causal, -inf"])).agree(act)


# What a forward writes to masks between their making and their use


def negated(length: int) -> Callable[[Tensor], Tensor]:
    """Return a mask that is applied after a write to the operand of its negation."""
    kept = causal(length)
    hidden = ~kept
    kept.fill_(True)
    return lambda scores: scores.masked_fill(hidden, NEGATIVE)


def fill_of_rows(length: int) -> Callable[[Tensor], Tensor]:
    fill = torch.full((length, length), -1e9)
    fill[0] = 0.0
    return lambda scores: torch.where(causal(length), scores, fill)


def fill_of_a_diagonal(length: int) -> Callable[[Tensor], Tensor]:
    fill = torch.full((length, length), -1e9)
    fill.diagonal(1).fill_(0.0)
    return lambda scores: torch.where(causal(length), scores, fill)


def times_one(length: int) -> Callable[[Tensor], Tensor]:
    bias = torch.zeros(length, length).masked_fill(~causal(length), NEGATIVE)
    kept = bias * 1.0
    bias.fill_(0.0)
    return lambda scores: scores + kept


@pytest.mark.parametrize("make", [negated, fill_of_rows, fill_of_a_diagonal, times_one])
def test_parts_of_a_mask_may_be_written_before_the_mask_is_applied(make: Callable[..., Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        masked = make(x.shape[1])
        return self.out((masked(q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2))

    Pair.of(seeded(type("Written", (Attention,), {"forward": forward}))).agree()


FAR = {"apart": 100}


@torch.library.custom_op("test_attacks_masks::near", mutates_args=())
def near(length: int) -> Tensor:
    places = torch.arange(length)
    return (places[:, None] - places).abs() < FAR["apart"]


@near.register_fake
def _of_near(length: int) -> Tensor:
    return torch.empty(length, length, dtype=torch.bool)


@torch.compiler.allow_in_graph
def nearby(length: int) -> Tensor:
    return near(length)


@pytest.mark.parametrize("function", [near, nearby], ids=["an operation", "a function"])
def test_tensors_of_foreign_code_are_made_in_each_call(
    function: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask may read unguarded state: its first values are no answer for later calls."""

    def forward(self: Any, x: Tensor) -> Tensor:
        kept = function(x.shape[1])
        out = F.scaled_dot_product_attention(*self.heads(x), attn_mask=kept)
        return self.out(out.transpose(1, 2).flatten(2))

    pair = Pair.of(seeded(type("Near", (Attention,), {"forward": forward})))
    for apart in (100, 2, 100, 3):
        monkeypatch.setitem(FAR, "apart", apart)
        pair.agree()


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
@pytest.mark.usefixtures("compilations")
def test_a_mask_made_without_autocast_is_made_so(options: dict[str, bool]) -> None:
    """In bfloat16 its products would have other places."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            places = torch.arange(256.0, 256.0 + x.shape[1])[:, None] @ torch.ones(1, x.shape[1])
            away = places - places.T
        kept = (away >= 0) & (away < 3)
        out = F.scaled_dot_product_attention(*self.heads(x), attn_mask=kept)
        return self.out(out.transpose(1, 2).flatten(2))

    def act(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    Pair.of(seeded(type("Without", (Attention,), {"forward": forward})), **options).agree(act, atol=0.02)


def test_a_bias_in_float32_is_not_rounded_by_autocast() -> None:
    """PyTorch's attention would cast it to 16 bits, in which numbers around 500 are 2 and 4 apart."""

    def far(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        places = 1000 + 3 * torch.arange(scores.shape[-1])
        return scores + torch.tensor([0.5, 0.25])[:, None, None] * places + square(mask, scores)

    mask = torch.zeros(LONGEST, LONGEST).masked_fill(~causal(), MINIMUM)
    pair = Pair.of(model_of(far, mask))
    with torch.autocast("cpu", torch.bfloat16):
        pair.agree(atol=0.02)
        with torch.no_grad():
            pair.agree(atol=0.02)


@pytest.mark.parametrize("fill", [NEGATIVE, -1e4])
def test_a_mask_written_to_between_two_layers(fill: float) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        hidden, outputs = ~causal(x.shape[1]), []
        for _ in range(2):
            outputs.append((q @ k.transpose(-2, -1)).masked_fill(hidden, fill).softmax(-1) @ v)
            hidden[:, :3] = False
        return outputs

    pair = Pair.of(seeded(type("Twice", (Attention,), {"forward": forward})), rules="attention attention")
    with torch.no_grad():  # a backward would need the mask as it was
        pair.agree()


def test_pieces_of_a_forward_read_a_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is captured in pieces, as with dropped layers. The mask is read again after a write."""

    def forward(self: Any, x: Tensor, mask: Tensor) -> list[Tensor]:
        q, k, v = self.heads(x)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch._dynamo.graph_break()
        return [first, F.scaled_dot_product_attention(q, v, k, attn_mask=mask)]

    looks = counted_looks(monkeypatch)
    pair = Pair.of(seeded(type("Pieces", (Attention,), {"forward": forward})), (X, causal(X.shape[1])))
    mask = causal(X.shape[1])
    mask[0, 1] = True  # neither the causal one nor one that hides nothing
    for change in (lambda: None, lambda: mask[1, 2:].fill_(True)):
        change()
        looks.clear()
        for _ in range(2):
            pair.agree(lambda model, x: model(x, mask))
        assert len(looks) == 1


def test_equal_operations_with_their_data_in_another_place() -> None:
    """`mask - 1 >= 0` and `1 - mask >= 0` of one tensor are two masks."""

    def made() -> masks.MaskOp:
        graph = fx.Graph()
        one, other = graph.placeholder("one"), graph.placeholder("other")
        keep = graph.call_function(operator.ge, (graph.call_function(operator.sub, (one, other)), 0))
        graph.output((keep,))
        return masks.MaskOp(fx.GraphModule(nn.Module(), graph), (False, False))

    data = causal().float() * 2
    assert made()(data, 1) == masks.CAUSAL
    assert torch.equal(made()(1, data), data == 0)


def test_another_thread_looks_at_another_mask_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the comparison with the last mask and its answer."""
    graph = fx.Graph()
    stored, padding = graph.placeholder("stored"), graph.placeholder("padding")
    graph.output((graph.call_function(operator.and_, (stored, padding)),))
    mask, full = masks.MaskOp(fx.GraphModule(nn.Module(), graph), (True, False)), torch.ones(1, LONGEST) > 0
    padded, holds = full.clone().index_fill_(1, torch.tensor(0), False), masks._holds
    assert mask(causal(), full) == masks.CAUSAL
    assert torch.equal(mask(causal(), padded), causal() & padded)
    for given, other in ((padded, full), (full, padded)):
        mask(causal(), given)

        def interrupted(*compared: Any, other: Tensor = other) -> bool:
            monkeypatch.setattr(masks, "_holds", holds)
            mask(causal(), other)
            return holds(*compared)

        monkeypatch.setattr(masks, "_holds", interrupted)
        found = mask(causal(), given)
        assert found == masks.CAUSAL if given is full else torch.equal(found, causal() & padded)


def layers(
    kept: masks.KeptMasks, number: int, made: Callable[..., Any] = operator.and_
) -> list[masks.MaskOp]:
    """Return the masks of layers of one graph, each from a buffer of its own and the padding of the call."""
    found = []
    for _ in range(number):
        graph = fx.Graph()
        stored, padding = graph.placeholder("stored"), graph.placeholder("padding")
        graph.output((graph.call_function(made, (stored, padding)),))
        found.append(masks.MaskOp(fx.GraphModule(nn.Module(), graph), (True, False), kept=kept))
        found[-1].is_last = False
    found[-1].is_last = True
    return found


def test_layers_with_equal_buffers_compute_their_mask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a mask is known by the versions of what it reads."""
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    seen = counted_looks(monkeypatch)
    kept = masks.KeptMasks(set())
    ops, buffers = layers(kept, 4), [causal(), causal(offset=2), causal(), causal(offset=2)]
    for number in range(3):
        seen.clear()
        padding = torch.arange(LONGEST) != number  # the data of another call
        found = [op(buffer, padding) for op, buffer in zip(ops, buffers, strict=True)]
        assert len(seen) == 2
        assert all(torch.equal(mask, buffer & padding) for mask, buffer in zip(found, buffers, strict=True))
        if number:  # the first call shows which layers are alike
            assert found[0] is found[2]
            assert found[1] is found[3]
        assert not kept.masks
    buffers[2].fill_(True)
    padding = torch.arange(LONGEST) > 3
    found = [op(buffer, padding) for op, buffer in zip(ops, buffers, strict=True)]
    assert all(torch.equal(mask, buffer & padding) for mask, buffer in zip(found, buffers, strict=True))
    with torch.inference_mode():
        assert ops[0](buffers[0], padding).is_inference()
    assert not ops[0](buffers[0], padding).is_inference()


def test_masks_of_a_call_that_failed_are_not_kept_for_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    first, last = layers(masks.KeptMasks(set()), 2)
    buffer, padding = causal(), torch.arange(LONGEST) > 3
    for _ in range(2):
        first(buffer, padding)
        last(buffer, padding)
    first(buffer, padding)  # the call ends here
    padding[5] = False
    assert torch.equal(last(buffer, padding), buffer & padding)


def test_copied_layers_share_masks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    ops, buffer = layers(masks.KeptMasks(set()), 2), causal()
    first, last = copies = copy.deepcopy(ops)
    assert first.kept is last.kept is not ops[0].kept
    for number in range(2):
        padding = torch.arange(LONGEST) != number
        found = [op(buffer, padding) for op in copies]
        assert torch.equal(found[1], buffer & padding)
    assert found[0] is found[1]


def test_threads_do_not_share_the_masks_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may run on different streams: a mask that one of them computes may be unfinished in the other."""
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    first, last = layers(masks.KeptMasks(set()), 2)
    buffer = causal()
    for number in range(2):
        padding = torch.arange(LONGEST) != number
        mask = first(buffer, padding)
        if number:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(last, buffer, padding).result() is not mask
        assert (last(buffer, padding) is mask) == bool(number)


class Rolled(Tensor):
    """A buffer whose numbers are not all that a mask reads of it."""

    shift: int

    @classmethod
    def of(cls, shift: int) -> Tensor:
        rolled = causal(offset=2).as_subclass(cls)
        rolled.shift = shift
        return rolled

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__and__:
                args = (args[0].as_subclass(Tensor).roll(getattr(args[0], "shift", 0)), args[1])
            return func(*args, **(kwargs or {}))


def full_of(number: float) -> Tensor:
    return torch.full((LONGEST, LONGEST), number)


def sign(stored: Tensor, padding: Tensor) -> Tensor:
    return torch.copysign(torch.ones(()), stored) * padding


def first_of_two(number: int) -> Tensor:
    return torch.stack([causal(), causal(offset=number)])[0]


def second_of_two(stored: Tensor, padding: Tensor) -> Tensor:
    return stored.as_strided((LONGEST, LONGEST), (LONGEST, 1), LONGEST**2) & padding


def dense(stored: Tensor, padding: Tensor) -> Tensor:
    return stored.to_dense() & padding


@pytest.mark.parametrize(
    ("made", "buffers"),
    [
        (Tensor.__and__, [Rolled.of(0), Rolled.of(1)]),
        (Tensor.__and__, [causal(offset=2), Rolled.of(1)]),
        (sign, [full_of(0.0), full_of(-0.0)]),
        (torch.mul, [full_of(float("nan")), full_of(float("nan"))]),
        (second_of_two, [first_of_two(2), first_of_two(3)]),
        (dense, [causal(offset=2).to_sparse(), causal(offset=3).to_sparse()]),
    ],
    ids=["subclasses", "subclass", "zeros", "nan", "views", "sparse"],
)
def test_buffers_that_only_look_equal(
    made: Callable[..., Tensor], buffers: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    ops = layers(masks.KeptMasks(set()), len(buffers), made)
    for number in range(3):
        padding = torch.arange(LONGEST) != number
        for op, buffer in zip(ops, buffers, strict=True):
            found = op(buffer, padding)
            mask = found if isinstance(found, Tensor) else found.mask
            torch.testing.assert_close(mask, made(buffer, padding), rtol=0, atol=0, equal_nan=True)


def test_writes_to_an_inference_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not count them."""
    monkeypatch.setattr(masks, "_is_on_cpu", lambda tensor: False)
    (op,), padding = layers(masks.KeptMasks(set()), 1), torch.ones(LONGEST) > 0
    with torch.inference_mode():
        buffer = causal()
        assert op(buffer, padding) == masks.CAUSAL
        buffer.fill_(True)
        assert op(buffer, padding) == masks.FULL


OPERATIONS: list[Callable[[fx.Graph, fx.Node, fx.Node], Any]] = [
    lambda graph, x, y: graph.call_function(operator.pow, (x, y)),
    lambda graph, x, y: graph.call_function(math.pow, (x, y)),
    lambda graph, x, y: graph.call_method("pow", (x, y)),
    lambda graph, x, y: graph.call_method("pow", (x,), {"exponent": y}),
    lambda graph, x, y: graph.call_method("pow", (y, x)),
    lambda graph, x, y: graph.call_method("pow", (x, "{1}")),
    lambda graph, x, y: graph.call_method("pow", (x, 1)),
    lambda graph, x, y: graph.call_method("pow", (x, 1.0)),
    lambda graph, x, y: graph.call_method("pow", (x, True)),
    lambda graph, x, y: graph.call_method("pow", ([x, [y]],)),
    lambda graph, x, y: graph.call_method("pow", ([[x], y],)),
    lambda graph, x, y: graph.call_method("pow", ((x, [y]),)),
    lambda graph, x, y: graph.call_method("pow", (slice(x, y),)),
    lambda graph, x, y: graph.call_method("pow", (slice(y, x),)),
    lambda graph, x, y: graph.get_attr("pow"),
]


def test_operations_that_only_look_equal() -> None:
    found = set()
    for make in OPERATIONS:
        graph = fx.Graph()
        graph.output((make(graph, graph.placeholder("x"), graph.placeholder("y")),))
        found.add(masks._operations(graph))
    assert len(found) == len(OPERATIONS)


def test_a_mask_of_a_product_with_and_without_autocast() -> None:
    """The positions of a call are rounded in bfloat16."""

    def forward(self: Any, x: Tensor, places: Tensor) -> Tensor:
        rows = places @ torch.ones(1, x.shape[1])
        out = F.scaled_dot_product_attention(*self.heads(x), attn_mask=rows >= rows.T)
        return self.out(out.transpose(1, 2).flatten(2))

    places = torch.arange(256.0, 256.0 + X.shape[1])[:, None]
    pair = Pair.of(seeded(type("Product", (Attention,), {"forward": forward})), (X, places))
    for autocast in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            pair.agree(lambda model, x: model(x, places), atol=0.02 if autocast else 1e-5)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("fill", [NEGATIVE, -1e4])
def test_a_scale_that_is_not_positive(scale: float, fill: float) -> None:
    """PyTorch's kernels hide what lies ahead before they scale: -inf times 0 would be NaN."""

    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        found = (q @ k.transpose(-2, -1) * scale).masked_fill(~causal(x.shape[1]), fill)
        return self.out((found.softmax(-1) @ v).transpose(1, 2).flatten(2))

    Pair.of(seeded(type("Scaled", (Attention,), {"forward": forward}))).agree()


# Masks that are arguments


def arguments() -> dict[str, Tensor]:
    padding = torch.tensor([[True] * 5, [False, False, True, True, True]])
    return {
        "causal": causal(5),
        "nothing hidden": torch.ones(5, 5, dtype=torch.bool),
        "padded": causal(5) & padding[:, None, None] | torch.eye(5, dtype=torch.bool),
        "an expanded one": causal(5, 1)[None, None].expand(2, HEADS, 5, 5),
        "one row for all": torch.tensor([[True, True, False, True, True]]),
        "a float": torch.zeros(5, 5).masked_fill(~causal(5), NEGATIVE),
        "a trained bias": torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).requires_grad_(),
    }


@pytest.mark.parametrize("example", ["causal", "a float"])
def test_a_mask_that_is_an_argument_may_be_any_other(example: str) -> None:
    """Also one that is of the same shape and dtype, and only other values."""

    def scores(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return scores.masked_fill(~mask, NEGATIVE)
        return scores + mask

    def act(model: nn.Module, x: Tensor, name: str) -> list[Any]:
        mask = arguments()[name]
        out = model(x.requires_grad_(), mask)
        return [out, torch.autograd.grad(out.sum(), mask, retain_graph=True) if mask.requires_grad else None]

    pair = Pair.of(model_of(scores, None), {"x": X, "mask": arguments()[example]})
    for name in arguments():
        pair.agree(lambda model, x, name=name: act(model, x, name))


REWRITES: dict[str, Callable[[Tensor], Any]] = {
    "written to": lambda mask: mask.fill_(True),
    "its data written to": lambda mask: mask.data.fill_(True),
    "its NumPy array written to": lambda mask: mask.numpy().__setitem__((3, 0), False),
    "its data replaced": lambda mask: setattr(mask, "data", torch.ones_like(mask)),
}


@pytest.mark.parametrize("name", REWRITES)
def test_a_mask_that_is_an_argument_may_be_written_to(name: str) -> None:
    """Between two calls that get the same tensor."""

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        mask = causal(5)
        first = model(x, mask)
        REWRITES[name](mask)
        return [first, model(x, mask)]

    pair = Pair.of(
        model_of(lambda self, scores, mask: scores.masked_fill(~mask, NEGATIVE), None),
        {"x": X, "mask": causal(5)},
    )
    pair.agree(act)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_of_attention_is_as_the_module_says(p: float) -> None:
    model = model_of(*MASKS["causal, -inf"])
    model.drop.p = p
    pair = Pair.of(model)
    for training in (True, False):
        for each in pair.models:
            each.drop.train(training)
        pair.agree()
    for each in pair.models:
        each.drop.p = 0.25
        each.train()
    pair.agree()


def test_a_sequence_that_the_original_refuses_is_refused() -> None:
    pair = Pair.of(model_of(*MASKS["causal, -inf"]))
    assert "error" in pair.agree(lambda model, x: model(torch.randn(2, LONGEST + 1, WIDTH)))
    pair.agree()
