"""Converted models compute what the originals do: forward, gradients, generated tokens, in fp32 and bf16."""

import copy

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.passes import layernorm_linear, linear
from tests.conversions import (
    ALL,
    EVERYWHERE,
    Pair,
    as_built,
    calls,
    cast,
    drops,
    each,
    error,
    gradients,
    in_bf16,
    run,
    undropped,
)
from tests.zoo import CASES, Case, Inputs, zero_dropout

SHAPES = ((2, 12), (3, 7))
ULP = 2**-8  # of bf16
FRESH = 1  # the seed of inputs that no model was converted with

NAMES = [*CASES, "llama_eager", "gpt2_eager"]  # the last two: attention that Hugging Face looks up by name
every_case = each(NAMES)


def samples(case: Case) -> list[tuple[str, Inputs]]:
    """Inputs at each shape, padded too where the model takes a mask, with a label for messages."""
    paddings = (False, True) if case.padded_inputs else (False,)
    return [
        (f"{shape}{' padded' if padding else ''}", case.sample(*shape, seed=FRESH, padded=padding))
        for shape in SHAPES
        for padding in paddings
    ]


# Forward


@each(ALL)
def test_forward_in_evaluation(name: str) -> None:
    pair = as_built(name)
    for label, inputs in samples(pair.case):
        expected, actual = pair.run(inputs)
        assert error(actual, expected) <= EVERYWHERE, label


@every_case
def test_forward_in_training(name: str) -> None:
    pair = undropped(name)
    for label, inputs in samples(pair.case):
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE, label


# Linears and attentions that run fused, however the model is called

RUN = {
    **dict.fromkeys(("quickstart", "quickstart_mask"), (8, 2)),
    "nanogpt_flash": (9, 0),
    **dict.fromkeys(("nanogpt_manual", "gpt2", "gpt2_eager", "gpt_neox"), (9, 2)),
    **dict.fromkeys(("llama", "llama_eager", "mistral", "qwen2", "qwen3", "gemma"), (15, 2)),
    "bert": (14, 2),
    "opt": (13, 2),
    "vit": (13, 2),
    "t5": (33, 6),
    **dict.fromkeys(("torch_encoder_pre", "torch_encoder_post"), (8, 0)),
    **dict.fromkeys(("torch_mha", "torch_mha_bare"), (1, 0)),
}
FASTPATH = {"torch_encoder_pre", "torch_encoder_post", "torch_mha", "torch_mha_bare"}  # in evaluation, PyTorch's


@every_case
def test_the_fused_ops_are_what_runs(name: str) -> None:
    pair = undropped(name)
    for training in (False, True):
        expected = (0, 0) if name in FASTPATH and not training else RUN[name]
        for label, inputs in samples(pair.case):
            with calls(pair.converted) as found:
                run(pair.converted, inputs, training)
            masked = expected[1] or found["attention"]  # nothing is gained by attention without a mask
            assert (found["linear"], found["attention"]) == (expected[0], masked), (label, training)


@each([name for name, case in ALL.items() if case.hf])
def test_hands_out_hidden_states_and_attentions(name: str) -> None:
    pair = as_built(name).copy()  # transformers hooks itself into the models
    for wanted in ("output_hidden_states", "output_attentions"):
        expected, actual = pair.run({**pair.case.sample(), wanted: True})
        assert len(actual) == len(expected)
        assert error(actual, expected) <= EVERYWHERE


TRANSPOSED = ("gpt2", "gpt2_eager")  # how their weights are stored, which other products read


@each([name for name in NAMES if name not in TRANSPOSED])
def test_where_no_weights_are_joined_nothing_differs(name: str) -> None:
    passes = (layernorm_linear.RULE, linear.RULE)
    model = ALL[name].build()
    converted = te_transform.convert(model, ALL[name].sample(), passes=passes, verify=False)
    pair = Pair(ALL[name], model, converted)
    for label, inputs in samples(pair.case):
        for training in (False, True):
            expected, actual = pair.run(inputs, training)
            assert all(map(torch.equal, actual, expected)), (label, training)


# bf16


@every_case
def test_bf16_is_as_exact_as_the_original_in_bf16(name: str) -> None:
    pair = in_bf16(name)
    # attention written out in fp64 is NaN where a row is hidden: it casts the least fp64 to fp32, to -inf
    wide = torch.float32 if name.endswith("eager") else torch.float64
    exact = copy.deepcopy(pair.original).to(wide)
    for training in (False,) if drops(name) else (False, True):
        for label, inputs in samples(pair.case):
            narrow = cast(inputs, torch.bfloat16)
            reference = [out.double() for out in run(exact, cast(narrow, wide), training)]
            for e, own, fused in zip(reference, *pair.run(narrow, training), strict=True):
                assert fused.dtype == own.dtype == torch.bfloat16
                allowed = 1.2 * (own.double() - e).norm() + ULP * e.norm()
                assert (fused.double() - e).norm() <= allowed, (label, training)


# Gradients


def check_gradients(pair: Pair, inputs: Inputs, label: str = "") -> None:
    expected, actual = gradients(pair.original, inputs), gradients(pair.converted, inputs)
    assert list(actual) == [name for name, p in pair.original.named_parameters() if p.requires_grad]
    largest = max(gradient.norm() for gradient in expected.values() if gradient is not None)
    for parameter, gradient in expected.items():
        assert (actual[parameter] is None) == (gradient is None), (label, parameter)
        if gradient is not None:
            assert (actual[parameter] - gradient).norm() <= EVERYWHERE * largest, (label, parameter)


@every_case
def test_gradients_of_every_original_parameter(name: str) -> None:
    pair = undropped(name)
    for label, inputs in samples(pair.case):
        check_gradients(pair, inputs, label)


@each([name for name in NAMES if ALL[name].hf])
def test_gradients_through_checkpoints(name: str) -> None:
    pair = undropped(name).copy()
    for model in (pair.original, pair.converted):
        model.gradient_checkpointing_enable()
    check_gradients(pair, pair.case.sample(seed=FRESH))
    with calls(pair.converted) as found:
        check_gradients(pair, pair.case.sample(seed=FRESH))  # by blocks, which the first call shows to be needed
    assert found["linear"] > 0


# Generation

GENERATING = [name for name in NAMES if ALL[name].hf and (ALL[name].causal_lm or name == "t5")]


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("batch", [1, 2])
@each(GENERATING)
def test_generates_the_same_tokens(name: str, batch: int, cached: bool) -> None:
    pair = as_built(name)
    for padded in (False, True):
        inputs = pair.case.sample(batch, 7, seed=FRESH, padded=padded)
        inputs.pop("decoder_input_ids", None)
        expected, actual = (_generated(model, inputs, cached) for model in (pair.original, pair.converted))
        assert expected.shape[1] > 8
        assert torch.equal(actual, expected), padded


@pytest.mark.parametrize("batch", [1, 2])
@each([name for name in GENERATING if name != "t5"])
def test_a_prompt_runs_fused_and_a_step_of_decoding_as_it_is(name: str, batch: int) -> None:
    model, ids = as_built(name).converted.eval(), ALL[name].sample(batch, 7)["input_ids"]
    with torch.no_grad(), calls(model) as found:
        cache = model(input_ids=ids, use_cache=True).past_key_values
        assert (found["linear"], found["attention"]) == RUN[name]
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        assert (found["linear"], found["attention"]) == RUN[name]


def _generated(model: nn.Module, inputs: Inputs, cached: bool) -> Tensor:
    # more tokens than the sliding window of Mistral holds; no early end, whatever the weights say
    length = {"max_new_tokens": 10, "min_new_tokens": 10}
    return model.eval().generate(**inputs, do_sample=False, use_cache=cached, **length)


# Dropout

DROPPING = [
    "quickstart",
    "quickstart_mask",
    "nanogpt_flash",
    "nanogpt_manual",
    "gpt2",
    "bert",
    "opt",
    "t5",
    "torch_encoder_pre",
    "torch_encoder_post",
    "torch_mha",
    "torch_mha_bare",
    "gpt2_eager",
]
CALLS = 100


@every_case
def test_drops_as_often_as_the_original(name: str) -> None:
    assert drops(name) == (name in DROPPING)
    pair, inputs = as_built(name), ALL[name].sample(2, 6, seed=FRESH)
    if not drops(name):
        return
    expected, actual = (_draws(m, inputs, seed) for m, seed in ((pair.original, 0), (pair.converted, CALLS)))
    for e, a in zip(expected, actual, strict=True):
        assert (a[0] != a[1]).any()
        spread = (e.var(0) + a.var(0)).clamp(min=1e-12) / CALLS
        assert ((a.mean(0) - e.mean(0)).abs() <= 6 * spread.sqrt() + 1e-5).all()
        assert 0.8 <= a.var(0).mean() / e.var(0).mean() <= 1.25


def _draws(model: nn.Module, inputs: Inputs, seed: int) -> list[Tensor]:
    draws = [run(model, inputs, training=True, seed=seed + call) for call in range(CALLS)]
    return [torch.stack(outputs) for outputs in zip(*draws, strict=True)]


@each(DROPPING)
def test_drops_the_same_values(name: str) -> None:
    pair = as_built(name)
    for _, inputs in samples(pair.case):
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE


@each(DROPPING)
def test_a_dropout_changed_after_conversion_counts(name: str) -> None:
    pair = as_built(name).copy()
    for model in (pair.original, pair.converted):
        zero_dropout(model)
    for _, inputs in samples(pair.case):
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE
        assert all(map(torch.equal, actual, run(pair.converted, inputs, training=True, seed=1)))
