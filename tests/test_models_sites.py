"""The fused and refused sites of real models: every site and every sentence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import te_transform
from te_transform.report.places import gather
from te_transform.report.report import Report
from tests.conversions import ALIKE, ALL, IN_BF16, as_built, each, in_bf16, same_bits
from tests.models.tiny import WIDTH, Tiny
from tests.packages import LLAMA_IDS
from tests.zoo import CASES, seeded, zero_dropout

# The sentences

DROPPED = "a dropout of 0.1 precedes the second linear, but LayerNormMLP has no dropout there: set it to 0"
NORM_DROPPED = (
    "the linear reads a norm through dropout, but LayerNormLinear has nothing between the two: set the "
    "dropout to 0"
)
NORM_SCALED = (
    "the linear reads a norm through dropout, mul, but LayerNormLinear has nothing between the two: "
    "compile=True joins these operations"
)
NORM_SLICED = (
    "the linear reads a norm through getitem, but LayerNormLinear has nothing between the two: take the rows "
    "before the norm"
)
HANDED_OUT = (
    "the attention's scores or probabilities are also read by mean, but fused attention does not return "
    "them: pass need_weights=False or output_attentions=False, or let nothing else read them"
)
# The tables: how many sites of each rule are fused, and (rule, reasons ...) -> where it is refused

LLAMA = {"merge_siblings": 4, "attention": 2, "layernorm_mlp": 2, "layernorm_linear": 3, "linear": 2}
LLAMA_1 = {"merge_siblings": 2, "attention": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 1}
GPT2 = {"attention": 2, "layernorm_mlp": 2, "layernorm_linear": 3, "linear": 2}
ENCODER = {"merge_siblings": 2, "attention": 2, "layernorm_mlp": 2, "layernorm_linear": 3, "linear": 3}
QUICKSTART = {"attention": 2, "layernorm_mlp": 2, "layernorm_linear": 2, "linear": 2}
CLIP = {"merge_siblings": 2, "layernorm_mlp": 2, "layernorm_linear": 2, "linear": 2}
VISION = CLIP | {"linear": 3}  # and its patches
COUNTS = {
    "quickstart": QUICKSTART,
    "quickstart_mask": QUICKSTART,
    "nanogpt_flash": {"layernorm_mlp": 2, "layernorm_linear": 3, "linear": 2},
    **dict.fromkeys(("nanogpt_manual", "gpt2"), GPT2),
    **dict.fromkeys(("llama", "llama_eager", "qwen3"), LLAMA_1),
    **dict.fromkeys(("mistral", "qwen2", "gemma"), LLAMA),
    "bert": ENCODER,
    "gpt_neox": GPT2,
    "opt": {"merge_siblings": 1, "attention": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 1},
    "vit": {"attention": 2} | VISION,
    "t5": {"merge_siblings": 4, "attention": 4, "layernorm_linear": 7, "linear": 9},
    "torch_encoder_pre": {"layernorm_linear": 4, "linear": 4},
    "torch_encoder_post": {"layernorm_linear": 3, "linear": 5},
    "torch_mha": {"layernorm_linear": 1, "linear": 1},
    "torch_mha_bare": {"linear": 2},
    "gpt2_eager": GPT2,
    "phi3": GPT2,
    "falcon": {"merge_siblings": 2, "attention": 2, "layernorm_linear": 3, "linear": 4},
    "bloom": GPT2,
    **dict.fromkeys(("gemma2", "gemma3_text"), LLAMA),
    "mixtral": {"merge_siblings": 1, "attention": 1, "layernorm_linear": 3, "linear": 1},
    **dict.fromkeys(("distilbert", "roberta"), ENCODER),
    "clip_text": {"attention": 2} | CLIP,
    "clip_vision": CLIP,
    "whisper": {"merge_siblings": 5, "attention": 2, "layernorm_mlp": 4, "layernorm_linear": 8, "linear": 6},
    "bart": {"merge_siblings": 5, "attention": 6, "layernorm_mlp": 4, "layernorm_linear": 6, "linear": 8},
}

# whisper as OpenAI has it is in test_styles.py, and GPT2's table is that of its parts
SPELLED_AS_OTHERS = ("whisper", "phi3", "bloom")
# and what these have of their own, rules and drawn models have too: norms of queries and keys, a parallel
# residual, attention written out, quick_gelu
NOT_HERE = (
    *ALIKE, *SPELLED_AS_OTHERS, "qwen3", "gpt_neox", "llama_eager", "clip_text", "gemma3_text", "opt", "vit",
    "bert",
)  # fmt: skip

REFUSED = {
    "bert": {("layernorm_linear", NORM_DROPPED): ["bert.encoder.layer.0.attention.self  x1"]},
    "vit": {("layernorm_linear", NORM_SLICED): ["classifier  x1"]},
    "t5": {
        ("layernorm_mlp", DROPPED): [
            "encoder.block.{0,1}.layer.1.DenseReluDense  x2",
            "decoder.block.0.layer.2.DenseReluDense  x1",
        ],
        ("layernorm_linear", NORM_DROPPED): ["decoder.block.0.layer.1.EncDecAttention  x1"],
        ("layernorm_linear", NORM_SCALED): ["lm_head  x1"],
    },
    "torch_encoder_pre": {
        ("layernorm_mlp", DROPPED): ["layers.{0,1}  x2"],
    },
    "torch_encoder_post": {
        ("layernorm_mlp", DROPPED): ["layers.{0,1}  x2"],
    },
    "torch_mha": {},
    "torch_mha_bare": {("attention", HANDED_OUT): ["(the model itself)  x1"]},
}


def refused(report: Report) -> dict[tuple[str, ...], list[str]]:
    return {(places.rule, *places.reasons): places.lines for places in gather(report.refused)}


@each(ALL, later=NOT_HERE)
def test_fuses_and_verification_takes_nothing_back(name: str) -> None:
    assert as_built(name).report.counts == COUNTS[name]


# the others are of the same parts: `make integrations` inspects them too
INSPECTED = {"quickstart", "nanogpt_manual", "llama", "torch_mha"}


@each(CASES, later=NOT_HERE)
def test_refuses_with_these_reasons(name: str) -> None:
    assert refused(as_built(name).report) == REFUSED.get(name, {})


@each(CASES, later=CASES.keys() - INSPECTED)
def test_inspect_says_what_convert_does_and_changes_nothing(name: str) -> None:
    model, untouched = CASES[name].build(), CASES[name].build()
    model.register_forward_hook(lambda *_: None)
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    hooks = dict(model._forward_hooks)
    random = torch.get_rng_state()

    report = te_transform.inspect(model, CASES[name].sample())

    assert report.sites == as_built(name).report.sites
    assert torch.equal(random, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes
    assert model._forward_hooks == hooks
    for module, before in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[key] is value for key, value in before.items())
    assert [type(module) for module in model.modules()] == [type(module) for module in untouched.modules()]
    assert same_bits(model.state_dict(), untouched.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())


@each(IN_BF16, later={*IN_BF16} - {"llama", "torch_encoder_pre"})
def test_another_dtype_in_place_is_converted_alike(name: str) -> None:
    pair = in_bf16(name)
    assert pair.report.sites == as_built(name).report.sites
    assert same_bits(pair.converted.state_dict(), pair.original.state_dict())


WITHOUT_DROPOUT = {"t5": 3, "torch_encoder_pre": 2}


@each(WITHOUT_DROPOUT, later=["t5"])
def test_a_dropout_set_to_0_is_all_that_its_reason_asks_for(name: str) -> None:
    report = te_transform.inspect(zero_dropout(CASES[name].build()), CASES[name].sample())
    assert report.counts["layernorm_mlp"] == WITHOUT_DROPOUT[name]
    assert "layernorm_mlp" not in {rule for rule, *_ in refused(report)}


class Lm(Tiny):
    """More layers than eight, a head, and its loss."""

    def __init__(self) -> None:
        super().__init__(9)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(x).flatten(0, 1), labels.flatten())


DEEP = {
    "as it is": {},
    "unverified, a loss in chunks": {"chunked_loss": True, "verify": False},
    "compiled": {"compile": True, "verify": False},
    "skipped": {"skip": "blocks.3.*", "verify": False},
}


LATER = ("compiled", "skipped")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.integration] * (name in LATER))
        for name, options in DEEP.items()
    ],
)
def test_deep_models_have_the_same_sites_before_and_after_the_first_call(options: dict[str, Any]) -> None:
    model, batch = seeded(Lm), (torch.randn(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.int64))
    planned = te_transform.inspect(model, batch, **options)
    converted = te_transform.convert(model, batch, inplace=True, **options)
    made = te_transform.report(converted)
    if "compile" not in options:
        converted(*batch).backward()
    for found in (made, te_transform.report(converted)):
        found.expect(**planned.counts)
        assert [(site.rule, site.path, site.status) for site in found.sites] == [
            (site.rule, site.path, site.status) for site in planned.sites
        ]
    assert planned.counts["layernorm_mlp"] == 9 - ("skip" in options)
    assert planned.counts["chunked_loss"] == ("chunked_loss" in options)


def test_predicting_times_changes_no_sites() -> None:
    batch = torch.randn(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.int64)
    planned, timed = (te_transform.inspect(seeded(Lm), batch, compile=way) for way in (False, "auto"))
    assert timed.sites == planned.sites


@pytest.mark.integration
def test_a_deep_llama_has_the_same_sites_before_and_after_the_first_call() -> None:
    model = CASES["llama"].build(num_hidden_layers=9)
    batch = {"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2]}
    planned, converted = te_transform.inspect(model, batch), te_transform.convert(model, batch)
    converted(**batch).loss.backward()
    assert te_transform.report(converted).sites == planned.sites
    assert planned.counts["attention"] == planned.counts["layernorm_mlp"] == 9
