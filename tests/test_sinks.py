"""Attention with sinks, a score of each head's own beside those of the keys: what is taken for it, and what
it computes in a model."""

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
import transformers
from torch import Tensor, nn

import te_transform
from te_transform.backends.bands import Band
from te_transform.graph import ops
from tests import attacks
from tests.compilers import Compiler
from tests.conversions import error, run
from tests.families import FAMILIES
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

gpt_oss = FAMILIES["gpt_oss"]


class Attention(nn.Module):
    """Two heads of width 4, as GPT-OSS writes them, but for what a test has otherwise."""

    def __init__(self, **otherwise: Callable):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(8, 24), nn.Parameter(torch.tensor([0.5, -1.0]))
        self.otherwise = otherwise

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = self.masked(query @ key.transpose(-1, -2) * 0.5, mask)
        if "attended" in self.otherwise:
            return self.otherwise["attended"](self, scores, value).transpose(1, 2).flatten(2)
        beside = self.otherwise.get("beside", lambda it, x: it.sinks.reshape(1, -1, 1, 1))(self, x)
        logits = torch.cat((scores, beside.expand(x.shape[0], 2, x.shape[1], -1)), dim=-1)
        logits = self.otherwise.get("shifted", shifted)(logits)
        weights = self.otherwise.get("dropped", lambda weights: weights[..., :-1])(logits.softmax(-1))
        return (weights @ value).transpose(1, 2).flatten(2)

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return self.otherwise["masked"](scores, mask) if "masked" in self.otherwise else scores + mask


def shifted(logits: Tensor) -> Tensor:
    return logits - logits.max(dim=-1, keepdim=True).values


def by_share(it: Attention, scores: Tensor, value: Tensor, of: Callable = lambda scores: scores) -> Tensor:
    """Multiply the remaining probability of the keys after the product, as Granite does."""
    share = (torch.logsumexp(of(scores), dim=-1) - it.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
    return scores.softmax(-1) @ value * share.unsqueeze(-1).to(value.dtype)


def without_sinks(it: Attention, scores: Tensor, value: Tensor) -> Tensor:
    return shifted(scores).softmax(-1) @ value


def sample(length: int = 6) -> dict[str, Tensor]:
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    return {"x": torch.randn(2, length, 8, generator=torch.Generator().manual_seed(0)), "mask": mask}


SAME = {
    "as GPT-OSS": {},
    "without a shift": {"shifted": lambda logits: logits},
    "amax": {"shifted": lambda logits: logits - logits.amax(-1, keepdim=True)},
    "by index": {"beside": lambda it, x: it.sinks[None, :, None, None]},
    "as Granite": {"attended": by_share},
    "a shift alone": {"attended": without_sinks},
    "narrow": {"dropped": lambda weights: weights.narrow(-1, 0, weights.shape[-1] - 1)},
    "filled": {"masked": lambda scores, mask: scores.masked_fill(mask < 0, -torch.inf)},
    "filled with the least number": {
        "masked": lambda scores, mask: torch.where(mask < 0, torch.finfo(scores.dtype).min, scores)
    },
}
OTHER = {
    "the first column is dropped": {"dropped": lambda weights: weights[..., 1:]},
    "two are dropped": {"dropped": lambda weights: nn.functional.pad(weights[..., :-2], (0, 1))},
    "a sink for each query": {
        "beside": lambda it, x: it.sinks.view(1, 2, 1, 1) + x.mean(-1)[:, None, :, None]
    },
    "one for all heads": {"beside": lambda it, x: it.sinks[:1].view(1, 1, 1, 1)},
    "another largest": {"shifted": lambda logits: logits - logits.max(dim=-2, keepdim=True).values},
    "the sum of others": {"attended": partial(by_share, of=lambda scores: 2 * scores)},
    "shifted by others": {
        "attended": lambda it, scores, value: (
            (scores - (2 * scores).amax(-1, keepdim=True)).softmax(-1) @ value
        )
    },
    "filled with -5": {"masked": lambda scores, mask: scores.masked_fill(mask < 0, -5)},
    "filled, beside numbers": {"masked": lambda scores, mask: (scores + mask).masked_fill(mask < 0, -1e9)},
    "the smallest": {"shifted": lambda logits: logits - logits.min(dim=-1, keepdim=True).values},
}


@attacks.each(SAME, "without a shift", "by index", "as Granite")
@pytest.mark.usefixtures("as_given")
def test_sinks_are_recognized(name: str, te: ModuleType) -> None:
    model = Attention(**SAME[name])
    converted = te_transform.convert(model, sample(), backend="te", verify=False)
    te_transform.report(converted).expect(attention=1)
    assert te_transform.verify(model, converted, sample(9))


@pytest.mark.parametrize("name", ["filled", "filled with the least number"])
@pytest.mark.usefixtures("as_given")
def test_a_query_of_filled_scores_alone_gets_zeros(name: str, te: ModuleType) -> None:
    model, given = Attention(**SAME[name]), sample()
    given["mask"][2] = torch.finfo(torch.float32).min
    converted = te_transform.convert(model, given, backend="te", verify=False)
    te_transform.report(converted).expect(attention=1)
    assert te_transform.verify(model, converted, given)
    assert not converted(**given)[:, 2].any()


@pytest.mark.parametrize("name", OTHER)
def test_other_scores_are_no_sinks(name: str, te: ModuleType) -> None:
    """By the rule itself: a conversion would compare, and take a wrong site back."""
    report = te_transform.inspect(Attention(**OTHER[name]), sample(), backend="te")
    assert [outcome.status for outcome in report.sites if outcome.rule == "attention"] == ["refused"]


def test_sinks_without_kernels_have_a_reason() -> None:
    report = te_transform.inspect(Attention(), sample(), backend="torch")
    (reason,) = next(o for o in report.sites if o.rule == "attention").reasons
    assert "the attention has sinks" in reason


def test_the_op_is_a_softmax_with_a_column_more() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(4, dtype=torch.float64)
    scores = query @ key.mT / 8**0.5
    beside = sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)
    for causal in (False, True):
        kept = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf) if causal else scores
        expected = torch.cat((kept, beside), -1).softmax(-1)[..., :-1] @ value
        found = ops.sdpa(query, key, value, is_causal=causal, sinks=sinks)
        torch.testing.assert_close(found, expected)


@pytest.mark.integration  # of the parts that are tested one by one above
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"graphs": True}], ids=str)
@pytest.mark.usefixtures("compilations", "cuda_graphs", "kernels_of_hopper")
def test_gpt_oss(options: dict, te: ModuleType, bands: list[Band]) -> None:
    """Trained and evaluated, with and without padding, at lengths on both sides of the window."""
    model = gpt_oss.build().bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-3, 3, len(parameter)))
    for module in model.modules():
        if hasattr(module, "top_k"):  # among fewer, rounding decides which of two that are as good is taken
            module.top_k = module.num_experts
    inputs = gpt_oss.sample()
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # PyTorch's grouped products have no fp64
    converted = te_transform.convert(model, inputs, backend="te", **options)
    length = inputs["input_ids"].shape[1]
    masks = [[], [-1, -2, -3], [], range(4, length), [0, 1, 2]]
    errors = []  # of the sinks' gradients in each batch: of the converted model, of the original in bf16
    # each kind of calls is recorded when it comes again
    for hidden in [*masks, *([[-1, -2, -3], range(4, length), [0, 1]] if "graphs" in options else [])]:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, list(hidden)] = 0
        given = inputs | {"attention_mask": mask}
        for training in (True, False):
            for each in (model, exact, converted):
                each.train(training)
            with torch.set_grad_enabled(training):
                wanted = run(exact, given)
                allowed = 1.5 * error(run(model, given), wanted) + 2**-8
                assert error(run(converted, given), wanted) <= allowed
        found, rounded, wide = (
            [grad for name, grad in of_all(each, given).items() if name.endswith("sinks")]
            for each in (converted, model, exact)
        )
        errors.append((error(found, wide), error(rounded, wide)))
    # of four numbers a layer: with one batch, chance alone makes either error three times the other
    of_converted, of_model = (torch.tensor(each).square().mean().sqrt() for each in zip(*errors, strict=True))
    assert of_converted <= 1.5 * of_model + 2**-8
    # with a window, the last queries of a sequence that is much shorter see nothing
    assert {(band.before is None, band.padded, band.blind, band.documents) for band in bands} == {
        (True, False, False, 0), (True, True, False, 0), (False, False, False, 0), (False, True, False, 0),
        (False, True, True, 0), (True, False, True, 4), (False, False, True, 4),
    }  # fmt: skip


@pytest.mark.usefixtures("kernels_of_hopper")
def test_sinks_are_compiled(te: ModuleType, compilations: Compiler) -> None:
    model, inputs = seeded(Looked, True).bfloat16(), {k: tensor.bfloat16() for k, tensor in sample().items()}
    converted = te_transform.convert(model, inputs, backend="te", compile=True, verify=False)
    for each in (model, converted):
        each(**inputs).float().square().sum().backward()
    assert len(compilations) == 1
    assert error([converted.sinks.grad], [model.sinks.grad]) <= 0.02


@pytest.mark.usefixtures("kernels_of_hopper")
def test_a_mask_may_hide_the_query_itself(te: ModuleType) -> None:
    """Without its own, which no kernel's band leaves out."""
    model, inputs = Looked(True).bfloat16(), {k: tensor.bfloat16() for k, tensor in sample().items()}
    converted = te_transform.convert(model, inputs, backend="te")
    given = inputs | {"mask": torch.full((6, 6), torch.finfo(torch.bfloat16).min).triu().bfloat16()}
    assert error([converted(**given)], [model(**given)]) <= 0.02


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "sliding_window": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


@pytest.mark.integration  # of the parts that GPT-OSS has
@pytest.mark.parametrize("name", ["GraniteSWA", "MiMoV2Flash"])
@pytest.mark.usefixtures("kernels_of_hopper")
def test_other_families(name: str, te: ModuleType, bands: list[Band]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    for parameter in model.parameters():
        if parameter.shape == (4,):  # the sinks, one of each head
            nn.init.normal_(parameter)
    ids = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    converted = te_transform.convert(model, given, backend="te")
    te_transform.report(converted).expect(attention=2)
    assert te_transform.verify(model, converted, given)
    assert bands


def of_all(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.train().zero_grad()
    model(**given).logits.double().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


LOOKS: dict[str, Callable] = {
    "viewed": lambda y: 2 * y.view(-1, *y.shape[2:]),
    "turned": lambda y: y.transpose(1, 2).contiguous(),
    "handed out": lambda y: y,
    "strided": lambda y: torch.as_strided(y, (3,), (2,)) + y.sum(),
    "its strides read": lambda y: y * y.stride(1) + y.is_contiguous(),
    "written to": lambda y: y.mul_(2),
}


class Looked(nn.Module):
    """Two heads of width 8 without a projection behind them, and what is done to their output."""

    def __init__(self, has_sinks: bool):
        super().__init__()
        self.qkv, self.sinks, self.look = (
            nn.Linear(8, 48),
            nn.Parameter(torch.tensor([0.5, -1.0])),
            "handed out",
        )
        self.has_sinks = has_sinks

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:-1], 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) * 0.5 + mask
        if self.has_sinks:
            beside = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], 2, x.shape[1], -1)
            scores = torch.cat((scores, beside), dim=-1)
        weights = scores.softmax(-1)
        return LOOKS[self.look]((weights[..., :-1] if self.has_sinks else weights) @ value)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.usefixtures("kernels_of_hopper")
def test_attention_keeps_the_strides_of_its_output(look: str, has_sinks: bool, te: ModuleType) -> None:
    """Kernels have the heads of a token next to each other, and their backward reads what they returned."""
    model = seeded(Looked, has_sinks).bfloat16()
    model.look = look
    given = {name: tensor.bfloat16() for name, tensor in sample().items()}
    converted = te_transform.convert(model, given, backend="te")
    te_transform.report(converted).expect(attention=1)
    found, wanted = converted(**given), model(**given)
    assert found.stride() == wanted.stride()
    assert error([found], [wanted]) <= 0.02
    found.mul_(2)  # whoever gets it may write to it
    found.float().square().sum().backward()
