"""Rewritten forwards: the fused path runs when its guards hold, the original one when they do not, and both
are right."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_transform
from te_transform.originals import fusions
from tests.zoo import CASES, EXTRA, zero_dropout

H, HEADS, WIDTH, BLOCK = 16, 2, 8, 12


class Attention(nn.Module):
    """Attention written out, with a causal buffer as nanoGPT has it."""

    def __init__(self, mask: torch.Tensor | None = None, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.drop, self.p = nn.Dropout(p), p
        self.register_buffer("bias", torch.ones(BLOCK, BLOCK).tril() if mask is None else mask)

    def forward(self, x, scale=None):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, WIDTH).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * (WIDTH**-0.5 if scale is None else scale)
        scores = scores.masked_fill(self.bias[:s, :s] == 0, float("-inf"))
        weights = self.drop(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, H))


def convert(model: nn.Module, x=None, **options) -> nn.Module:
    return te_transform.convert(model, torch.randn(2, 5, H) if x is None else x, verify=False, **options)


def runs(model: nn.Module) -> int:
    return sum(fusion.runs for fusion in fusions(model) if fusion.rule in ("attention", "layernorm_mlp"))


def assert_agree(model: nn.Module, converted: nn.Module, *args, fused: bool, **kwargs) -> None:
    """Both give the same, and the fused path ran or did not."""
    before = runs(converted)
    with torch.no_grad():
        torch.testing.assert_close(converted(*args, **kwargs), model(*args, **kwargs), rtol=1e-5, atol=1e-6)
    assert (runs(converted) > before) is fused


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("batch", "length"), [(2, 5), (3, 7), (1, 5), (4, 1), (2, BLOCK), (1, BLOCK), (1, 1)]
)
def test_any_batch_and_length(batch: int, length: int, training: bool) -> None:
    model = Attention().train(training)
    assert_agree(model, convert(model), torch.randn(batch, length, H), fused=True)


def test_a_length_that_the_original_refuses_is_refused() -> None:
    converted = convert(Attention())
    with pytest.raises(RuntimeError, match="must match the size"):
        converted(torch.randn(2, BLOCK + 1, H))


def test_an_example_of_one_sample_serves_batches() -> None:
    model = Attention()
    assert_agree(model, convert(model, torch.randn(1, 5, H)), torch.randn(3, 7, H), fused=True)


def test_another_argument_runs_the_original() -> None:
    model = Attention()
    converted = convert(model)
    assert_agree(model, converted, torch.randn(2, 5, H), scale=0.5, fused=False)
    assert_agree(model, converted, torch.randn(2, 5, H), None, fused=True)
    with pytest.raises(TypeError):
        converted(torch.randn(2, 5, H), wrong=1)


def test_a_causal_buffer_becomes_the_flag(monkeypatch) -> None:
    model, seen = Attention(), []
    converted = convert(model)
    core = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **k: seen.append(a[3:6]) or core(*a, **k)
    )
    assert_agree(model, converted, torch.randn(2, 6, H), fused=True)
    assert seen == [(None, 0.0, True)]


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(BLOCK, BLOCK),
        torch.ones(BLOCK, BLOCK).triu(),
        torch.ones(BLOCK, BLOCK).tril() - torch.ones(BLOCK, BLOCK).tril(-3),
        torch.ones(BLOCK, BLOCK).tril(1),
        torch.eye(BLOCK),
    ],
    ids=["full", "upper", "band", "one ahead", "diagonal"],
)
def test_any_other_buffer_stays_a_mask(mask: torch.Tensor) -> None:
    model = Attention(mask)
    converted = convert(model)
    for length in (1, 5, BLOCK):
        assert_agree(model, converted, torch.randn(2, length, H), fused=True)


def test_a_mask_loaded_over_runs_the_original_and_back() -> None:
    model = Attention()
    converted, x = convert(model), torch.randn(2, 6, H)
    state = copy.deepcopy(model.state_dict())
    other = {**state, "bias": torch.eye(BLOCK)}
    for loaded, fused in ((other, False), (state, True)):
        model.load_state_dict(loaded)
        converted.load_state_dict(loaded)
        assert_agree(model, converted, x, fused=fused)
    assert_agree(model, copy.deepcopy(converted), x, fused=True)


def test_dropout_is_as_strong_as_the_module_says() -> None:
    model = Attention(p=0.5).train()
    converted, x = convert(model), torch.randn(2, 6, H)
    one, other = converted(x), converted(x)
    assert not torch.equal(one, other)
    assert runs(converted) == 2
    model.drop.p = converted.drop.p = 0.0  # the recording saw another
    assert_agree(model, converted, x, fused=False)
    model.eval()
    converted.eval()
    assert_agree(model, converted, x, fused=False)


def test_dropout_in_one_child_only_runs_the_original() -> None:
    model = Attention(p=0.5).eval()
    converted, x = convert(model), torch.randn(2, 6, H)
    assert_agree(model, converted, x, fused=True)
    converted.drop.train()
    assert not torch.equal(converted(x), converted(x))


def test_a_replaced_child_and_a_hook_inside_are_respected() -> None:
    model = Attention()
    converted, x, seen = convert(model), torch.randn(2, 6, H), []
    handle = converted.drop.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    assert_agree(model, converted, x, fused=False)
    assert seen == [(2, HEADS, 6, 6)]
    handle.remove()
    assert_agree(model, converted, x, fused=True)
    for drop in (model.drop, converted.drop):  # as accelerate puts its own in front of a module
        drop.forward = lambda weights: 2 * weights
    assert_agree(model, converted, x, fused=False)
    model.drop = converted.drop = nn.Threshold(0.2, 0.0)
    assert_agree(model, converted, x, fused=False)


class Adjustable(Attention):
    """Goes by attributes of its own: a number, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.finish, self.unused = 1.0, torch.tanh, 1

    def forward(self, x):
        return self.finish(super().forward(x) * self.factor)


@pytest.mark.parametrize(("name", "value"), [("factor", 2.0), ("finish", torch.sigmoid)])
def test_an_attribute_that_the_forward_reads_is_watched(name: str, value) -> None:
    model = Adjustable()
    converted, x = convert(model), torch.randn(2, 6, H)
    assert_agree(model, converted, x, fused=True)
    before = getattr(model, name)
    for now, fused in ((value, False), (before, True)):
        setattr(model, name, now)
        setattr(converted, name, now)
        assert_agree(model, converted, x, fused=fused)
    model.unused = converted.unused = 2
    assert_agree(model, converted, x, fused=True)


class Keeping(Attention):
    """Keeps what it computed, for somebody to look at."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_forward_that_keeps_something_is_refused() -> None:
    model, x = Keeping(), torch.randn(2, 6, H)
    converted = convert(model)
    assert "the forward sets the attribute last, a rewritten forward does nothing but compute its result" in {
        reason for outcome in te_transform.report(converted).refused for reason in outcome.reasons
    }
    torch.testing.assert_close(converted(x), model(x))
    assert torch.equal(converted.last, model.last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_stays_fused_in_another_dtype(dtype: torch.dtype) -> None:
    model = Attention()
    converted = convert(model).to(dtype)
    reference = copy.deepcopy(model).to(dtype)
    before, x = runs(converted), torch.randn(2, 6, H, dtype=dtype)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(converted(x), reference(x), **close)
    assert runs(converted) == before + 1


def test_a_cast_that_was_nothing_keeps_the_dtype_it_was_recorded_in() -> None:
    class Casting(Attention):
        def forward(self, x, scale=None):
            return super().forward(x.float()).to(x.dtype)

    model = Casting()
    converted = convert(model)
    assert_agree(model, converted, torch.randn(2, 6, H), fused=True)
    assert_agree(model, converted, torch.randn(2, 6, H, dtype=torch.bfloat16), fused=False)


def test_gradients_of_a_rewritten_forward() -> None:
    model, x = Attention(), torch.randn(2, 6, H)
    converted = convert(model)
    for module in (model, converted):
        module(x).square().sum().backward()
    reverted = te_transform.revert(converted)
    for (name, p), (_, q) in zip(model.named_parameters(), reverted.named_parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_whole(dynamic: bool) -> None:
    model = Attention()
    converted = convert(model)
    torch._dynamo.reset()
    compiled = torch.compile(converted, backend="eager", fullgraph=True, dynamic=dynamic)
    for batch, length in ((2, 6), (3, 9), (1, BLOCK)):
        x = torch.randn(batch, length, H)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


def test_a_compiled_forward_is_compiled_once() -> None:
    converted, compilations = convert(Attention()), []
    torch._dynamo.reset()

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    compiled = torch.compile(converted, backend=backend, fullgraph=True)
    for _ in range(4):
        compiled(torch.randn(2, 6, H))
    assert len(compilations) == 1


def test_a_forward_that_branches_on_values_is_refused_with_a_reason() -> None:
    class Branches(Attention):
        def forward(self, x, scale=None):
            return super().forward(x if x.sum() > -1e9 else -x)

    converted = convert(Branches())
    (site,) = (s for s in te_transform.report(converted).refused if s.rule == "attention")
    assert site.reasons == (
        "the forward of Branches could not be recorded with free sizes (GuardOnDataDependentSymNode), a "
        "rewritten "
        "forward has to run at any size",
    )


def test_two_cores_in_one_forward_are_refused_with_a_reason() -> None:
    class Twice(Attention):
        def forward(self, x):
            return super().forward(x) + super().forward(2 * x)

    report = te_transform.report(convert(Twice()))
    assert {site.reasons[0] for site in report.refused if site.rule == "attention"} == {
        "recorded on its own the module holds 2 such places, exactly one is needed"
    }


def test_an_opt_block_stays_fused_with_a_cache_and_a_mask() -> None:
    case = CASES["opt"]
    model = zero_dropout(case.build()).eval()
    converted = convert(model, case.sample(2, 12, 0, False))
    ids, mask = case.sample(2, 12, 0, True)["input_ids"], case.sample(2, 12, 0, True)["attention_mask"]
    before = runs(converted)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(converted.generate(ids, attention_mask=mask, **options), expected)
    assert runs(converted) - before == 2 * 4  # two layers, one prefill and three steps


EAGER = [name for name in EXTRA if name.endswith("_eager")]


@pytest.mark.parametrize("name", EAGER)
def test_dispatch_leaves_the_config_and_follows_it(name: str) -> None:
    case = EXTRA[name]
    model = zero_dropout(case.build()).eval()
    inputs = case.sample(2, 12, 0, True)
    converted = convert(model, case.sample(2, 12, 0, False))
    te_transform.report(converted).expect(attention=2)
    assert converted.config._attn_implementation == "eager"

    def logits(made: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return made(**inputs).logits

    before = runs(converted)
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-5, atol=1e-5)
    assert runs(converted) > before
    converted.set_attn_implementation("sdpa")
    model.set_attn_implementation("sdpa")
    before = [fusion.runs for fusion in fusions(converted) if fusion.rule == "attention"]
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-5, atol=1e-5)
    assert before == [fusion.runs for fusion in fusions(converted) if fusion.rule == "attention"]
    assert all(
        "te_transform" not in str(m.config)
        for m in te_transform.revert(converted).modules()
        if hasattr(m, "config")
    )


@pytest.mark.parametrize("name", EAGER)
def test_dispatch_gives_the_probabilities_to_who_asks(name: str) -> None:
    case = EXTRA[name]
    model, inputs = zero_dropout(case.build()).eval(), case.sample(2, 12, 0, False)
    converted = convert(model, inputs)
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
        actual = converted(**inputs, output_attentions=True).attentions
    assert len(actual) == len(expected) == 2
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


class Numbered(nn.Module):
    """A layer that knows its number, and may go by it."""

    def __init__(self, number: int, odd_one: int | None) -> None:
        super().__init__()
        self.number, self.odd_one = number, odd_one
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        out = x + self.down(F.relu(self.up(self.norm(x))))
        if self.odd_one is not None and not self.training and self.number == self.odd_one:
            return 2 * out
        return out


@pytest.mark.parametrize("odd_one", [None, 1])
def test_layers_share_a_forward_only_where_it_does_not_go_by_their_number(odd_one: int | None) -> None:
    model = nn.Sequential(*(Numbered(number, odd_one) for number in range(3))).eval()
    converted = convert(model)
    assert te_transform.report(converted).counts["layernorm_mlp"] == 3
    assert_agree(model, converted, torch.randn(2, 5, H), fused=True)
    second, third = (layer._te_transform_slot.rewritten.evaluation for layer in converted[1:])
    assert (second.paths is third.paths) == (odd_one is None)
    assert all(type(layer)._te_transform_made_of[0] is Numbered for layer in converted)
