"""Converted models compute what the originals do: forward, gradients, generated tokens, in fp32 and bf16."""

import copy

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.passes import layernorm_linear, linear
from tests.conversions import (
    ALL,
    DISTINCT,
    EVERYWHERE,
    IN_BF16,
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
)
from tests.zoo import CASES, Case, Inputs, zero_dropout

pytestmark = pytest.mark.usefixtures("at_any_size")

ULP = 2**-8  # of bf16
FRESH = 1  # the seed of inputs that no model was converted with

NAMES = [name for name in DISTINCT if name in CASES or name == "llama_eager"]  # which looks attention up
# in `make test`: one from Hugging Face, one with a mask, a loss and dropouts that is written by hand, and
# PyTorch's own modules
HERE = {"nanogpt_manual", "llama", "torch_encoder_pre", "torch_mha", "torch_mha_bare"}
every_case = each(NAMES, later={*ALL} - HERE)


# Every capture takes its time: of this model all kinds of inputs are tried, of the others the sizes that they
# were converted with, in evaluation padded where they take a mask.
WIDE = "nanogpt_manual"


def samples(case: Case) -> list[tuple[str, Inputs]]:
    """Inputs for an evaluation, with a label for messages."""
    kinds = [((2, 12), case.padded_inputs is not None)]
    if case.name == WIDE:
        kinds = [((2, 12), False), *dict.fromkeys([*kinds, ((3, 7), kinds[0][1])])]
    return [
        (f"{shape}{' padded' if padded else ''}", case.sample(*shape, seed=FRESH, padded=padded))
        for shape, padded in dict.fromkeys(kinds)
    ]


def trained(case: Case) -> list[tuple[str, Inputs]]:
    """Inputs for a training: most models see those that they were converted with, in other values."""
    return [("as converted", case.sample(seed=FRESH)), *(samples(case)[1:] if case.name == WIDE else ())]


# Forward


# whisper's encoder and decoder are T5's here
@each([name for name in DISTINCT if name != "whisper"], later={*ALL} - HERE)
def test_forward_in_evaluation(name: str) -> None:
    pair = as_built(name)
    for label, inputs in samples(pair.case):
        expected, actual = pair.run(inputs)
        assert error(actual, expected) <= EVERYWHERE, label


@every_case
def test_forward_in_training(name: str) -> None:
    """With the dropouts that the model has: they draw what the original's do."""
    pair = as_built(name)
    for label, inputs in trained(pair.case):
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE, label


# The linears and attentions that run fused

RUN = {
    **dict.fromkeys(("quickstart", "quickstart_mask"), (8, 2)),
    **dict.fromkeys(("nanogpt_manual", "gpt2", "gpt_neox"), (9, 2)),
    **dict.fromkeys(("llama", "llama_eager", "qwen3"), (8, 1)),
    "bert": (14, 2),
    "opt": (7, 1),
    "vit": (13, 2),
    "t5": (23, 4),
    "torch_encoder_pre": (8, 0),
    **dict.fromkeys(("torch_mha", "torch_mha_bare"), (2, 0)),
}
# which PyTorch evaluates by a kernel of its own, some calls of them
FASTPATH = {"torch_encoder_pre", "torch_mha", "torch_mha_bare"}


@every_case
def test_the_fused_ops_are_what_runs(name: str) -> None:
    pair = as_built(name)
    linears, attentions = RUN[name]
    for training in (True,) if name in FASTPATH else (False, True):
        for label, inputs in trained(pair.case) if training else samples(pair.case):
            with calls(pair.converted) as found:
                run(pair.converted, inputs, training)
            assert found["linear"] == linears, (label, training)
            assert found["attention"] == attentions or "padded" in label, (label, training)


@each(["llama"], later=["llama"])
def test_hands_out_hidden_states_and_attentions(name: str) -> None:
    pair = as_built(name).copy()  # transformers hooks itself into the models
    wanted = {"output_hidden_states": True, "output_attentions": True}
    expected, actual = pair.run({**pair.case.sample(), **wanted})
    assert len(actual) == len(expected)
    assert error(actual, expected) <= EVERYWHERE


@each(["nanogpt_manual", "llama", "torch_encoder_pre"], later=["llama"])
def test_models_without_joined_weights_are_bitwise_equal(name: str) -> None:
    passes = (layernorm_linear.RULE, linear.RULE)
    model = ALL[name].build()
    converted = te_transform.convert(model, ALL[name].sample(), passes=passes, verify=False)
    expected, actual = Pair(ALL[name], model, converted).run(ALL[name].sample(seed=FRESH), training=True)
    assert all(map(torch.equal, actual, expected))


# bf16


@each(IN_BF16, later={*ALL} - {"llama", "torch_encoder_pre"})
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
    pair = as_built(name)
    for label, inputs in trained(pair.case):
        check_gradients(pair, inputs, label)


@each(["llama", "bert"], later=["bert"])
def test_gradients_through_checkpoints(name: str) -> None:
    pair = as_built(name).copy()
    for model in (pair.original, pair.converted):
        model.gradient_checkpointing_enable()
    check_gradients(pair, pair.case.sample(seed=FRESH))
    with calls(pair.converted) as found:
        check_gradients(pair, pair.case.sample(seed=FRESH))
    assert found["linear"] > 0


# Generation

GENERATING = ["gpt2", "llama", "gpt_neox", "t5"]


@each(GENERATING, later={*GENERATING} - {"llama"})
def test_generates_the_same_tokens(name: str) -> None:
    pair = as_built(name)
    inputs = pair.case.sample(2, 7, seed=FRESH, padded=True)
    inputs.pop("decoder_input_ids", None)
    expected, actual = (_generated(m, inputs) for m in (pair.original, pair.converted))
    assert expected.shape[1] > 8
    assert torch.equal(actual, expected)


@each(["llama", "gpt2"], later=["gpt2"])
def test_a_prompt_runs_fused_and_a_step_of_decoding_as_it_is(name: str) -> None:
    model, ids = as_built(name).converted.eval(), ALL[name].sample(2, 7)["input_ids"]
    with torch.no_grad(), calls(model) as found:
        cache = model(input_ids=ids, use_cache=True).past_key_values
        assert (found["linear"], found["attention"]) == RUN[name]
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
        assert (found["linear"], found["attention"]) == RUN[name]


@each(["t5"], later=["t5"])
def test_the_encoder_that_generate_calls_by_itself_runs_fused(name: str) -> None:
    pair, (linears, attentions) = as_built(name), RUN[name]
    inputs = pair.case.sample(2, 7)
    del inputs["decoder_input_ids"]
    with calls(pair.converted) as found:
        _generated(pair.converted, inputs)
    assert found["attention"] == attentions // 2  # the decoder's own, and to the encoder, are as many in all
    assert 0 < found["linear"] < linears


def _generated(model: nn.Module, inputs: Inputs) -> Tensor:
    # more tokens than the sliding window of Mistral holds; no early end, whatever the weights say
    length = {"max_new_tokens": 10, "min_new_tokens": 10}
    return model.eval().generate(**inputs, do_sample=False, use_cache=True, **length)


# Dropout

DROPPING = [
    "quickstart",
    "quickstart_mask",
    "nanogpt_manual",
    "gpt2",
    "bert",
    "opt",
    "t5",
    "torch_encoder_pre",
    "torch_mha",
    "torch_mha_bare",
]


@every_case
def test_drops_where_the_original_drops(name: str) -> None:
    assert drops(name) == (name in DROPPING)
    inputs = ALL[name].sample(seed=FRESH)
    one, other = (run(as_built(name).converted, inputs, training=True, seed=seed) for seed in (0, 1))
    assert all(map(torch.equal, one, other)) == (name not in DROPPING)


@each(["quickstart", "nanogpt_manual", "torch_mha"], later=["quickstart"])
def test_a_dropout_changed_after_conversion_counts(name: str) -> None:
    pair, inputs = as_built(name).copy(), ALL[name].sample(seed=FRESH)
    for model in (pair.original, pair.converted):
        zero_dropout(model)
    expected, actual = pair.run(inputs, training=True)
    assert error(actual, expected) <= EVERYWHERE
    assert all(map(torch.equal, actual, run(pair.converted, inputs, training=True, seed=1)))
