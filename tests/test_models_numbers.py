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

ULP = 2**-8  # of bf16
FRESH = 1  # the seed of inputs that no model was converted with

NAMES = [*CASES, "llama_eager", "gpt2_eager"]  # the last two: attention that Hugging Face looks up by name
every_case = each(NAMES)


# Of these all kinds of inputs are tried, of the others one, of sizes that nothing was captured for yet: every
# capture takes its time.
WIDE = ("quickstart", "nanogpt_manual", "gpt2", "llama", "bert")


def samples(case: Case, converted_with: bool = False) -> list[tuple[str, Inputs]]:
    """Inputs, padded where the model takes a mask, with a label for messages; if asked for, of the sizes
    that the model was converted with too."""
    found = [("(2, 12)", case.sample(2, 12, seed=FRESH))] * (converted_with or case.name in WIDE)
    if case.name in WIDE or not case.padded_inputs:
        found.append(("(3, 7)", case.sample(3, 7, seed=FRESH)))
    if case.padded_inputs:
        found.append(("(3, 7) padded", case.sample(3, 7, seed=FRESH, padded=True)))
    return found


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
    for label, inputs in samples(pair.case, converted_with=True):
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE, label


# The linears and attentions that run fused

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
    **dict.fromkeys(("torch_mha", "torch_mha_bare"), (2, 0)),
}
# which PyTorch evaluates by a kernel of its own, some calls of them
FASTPATH = {"torch_encoder_pre", "torch_encoder_post", "torch_mha", "torch_mha_bare"}


@every_case
def test_the_fused_ops_are_what_runs(name: str) -> None:
    pair = as_built(name)
    linears, attentions = RUN[name]
    for training in (True,) if name in FASTPATH else (False, True):
        for label, inputs in samples(pair.case, converted_with=training):
            with calls(pair.converted) as found:
                run(pair.converted, inputs, training)
            assert found["linear"] == linears, (label, training)
            assert found["attention"] == attentions or "padded" in label, (label, training)


@each(["llama", "gpt2", "bert", "t5"])
def test_hands_out_hidden_states_and_attentions(name: str) -> None:
    pair = as_built(name).copy()  # transformers hooks itself into the models
    for wanted in ("output_hidden_states", "output_attentions"):
        expected, actual = pair.run({**pair.case.sample(), wanted: True})
        assert len(actual) == len(expected)
        assert error(actual, expected) <= EVERYWHERE


@each(["quickstart", "nanogpt_manual", "llama", "bert", "t5", "torch_encoder_pre"])
def test_where_no_weights_are_joined_nothing_differs(name: str) -> None:
    passes = (layernorm_linear.RULE, linear.RULE)
    model = ALL[name].build()
    converted = te_transform.convert(model, ALL[name].sample(), passes=passes, verify=False)
    inputs = ALL[name].sample(seed=FRESH)
    for training in (False, True):
        expected, actual = Pair(ALL[name], model, converted).run(inputs, training)
        assert all(map(torch.equal, actual, expected)), training


# bf16


@every_case
def test_bf16_is_as_exact_as_the_original_in_bf16(name: str) -> None:
    pair = in_bf16(name)
    # attention written out in fp64 is NaN where a row is hidden: it casts the least fp64 to fp32, to -inf
    wide = torch.float32 if name.endswith("eager") else torch.float64
    exact = copy.deepcopy(pair.original).to(wide)
    narrow = cast(pair.case.sample(seed=FRESH), torch.bfloat16)
    training = not drops(name)
    reference = [out.double() for out in run(exact, cast(narrow, wide), training)]
    for e, own, fused in zip(reference, *pair.run(narrow, training), strict=True):
        assert fused.dtype == own.dtype == torch.bfloat16
        allowed = 1.2 * (own.double() - e).norm() + ULP * e.norm()
        assert (fused.double() - e).norm() <= allowed


# Gradients


def check_gradients(pair: Pair, inputs: Inputs, label: str = "") -> None:
    expected, actual = gradients(pair.original, inputs), gradients(pair.converted, inputs)
    assert list(actual) == list(expected)
    largest = max(gradient.norm() for gradient in expected.values() if gradient is not None)
    for parameter, gradient in expected.items():
        assert (actual[parameter] is None) == (gradient is None), (label, parameter)
        if gradient is not None:
            assert (actual[parameter] - gradient).norm() <= EVERYWHERE * largest, (label, parameter)


@every_case
def test_gradients_of_every_parameter(name: str) -> None:
    pair = undropped(name)
    for label, inputs in samples(pair.case, converted_with=True):
        check_gradients(pair, inputs, label)


@each(["llama", "gpt2", "bert", "t5"])
def test_gradients_through_checkpoints(name: str) -> None:
    pair = undropped(name).copy()
    for model in (pair.original, pair.converted):
        model.gradient_checkpointing_enable()
    check_gradients(pair, pair.case.sample(seed=FRESH))
    with calls(pair.converted) as found:
        check_gradients(pair, pair.case.sample(seed=FRESH))
    assert found["linear"] > 0


# Generation

GENERATING = [name for name in NAMES if ALL[name].hf and (ALL[name].causal_lm or name == "t5")]


@pytest.mark.parametrize(("batch", "cached"), [(1, False), (2, True)], ids=["1, no cache", "2, cache"])
@each(GENERATING)
def test_generates_the_same_tokens(name: str, batch: int, cached: bool) -> None:
    pair = as_built(name)
    inputs = pair.case.sample(batch, 7, seed=FRESH, padded=batch > 1)
    inputs.pop("decoder_input_ids", None)
    expected, actual = (_generated(model, inputs, cached) for model in (pair.original, pair.converted))
    assert expected.shape[1] > 8
    assert torch.equal(actual, expected)


@each([name for name in GENERATING if name != "t5"])
def test_a_prompt_runs_fused_and_a_step_of_decoding_as_it_is(name: str) -> None:
    model, ids = as_built(name).converted.eval(), ALL[name].sample(2, 7)["input_ids"]
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


@every_case
def test_drops_the_same_values(name: str) -> None:
    assert drops(name) == (name in DROPPING)
    pair = as_built(name)
    if drops(name):
        expected, actual = pair.run(pair.case.sample(seed=FRESH), training=True)
        assert error(actual, expected) <= EVERYWHERE


@each(["quickstart", "nanogpt_manual", "gpt2", "t5", "torch_mha"])
def test_a_dropout_changed_after_conversion_counts(name: str) -> None:
    pair, inputs = as_built(name).copy(), ALL[name].sample(seed=FRESH)
    for model in (pair.original, pair.converted):
        zero_dropout(model)
    expected, actual = pair.run(inputs, training=True)
    assert error(actual, expected) <= EVERYWHERE
    assert all(map(torch.equal, actual, run(pair.converted, inputs, training=True, seed=1)))
