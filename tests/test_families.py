"""Hugging Face's families and the models of others, converted: the numbers are the originals'."""

import copy
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import te_transform
from tests.conversions import EVERYWHERE, Pair, each, error, gradients, inspected
from tests.families import FAMILIES, READERS
from tests.others import OTHERS
from tests.zoo import Inputs, zero_dropout

MODELS = FAMILIES | OTHERS
every_model = each(MODELS, later=MODELS)
GENERATING = [
    name
    for name, case in FAMILIES.items()
    if case.causal_lm or name in READERS or "decoder_input_ids" in case.sample()
]
# Their own code turns queries and keys in fp32 and multiplies them with values in bf16, which raises.
IN_FP32_ALONE = ("lucid_local",)
FRESH = 1  # the seed of inputs that no model was converted with


@cache
def converted(name: str) -> Pair:
    """Verified by the conversion, and without dropouts after it."""
    case = MODELS[name]
    model = case.build()
    made = te_transform.convert(model, case.sample())
    return Pair(case, zero_dropout(model), zero_dropout(made))


def samples(name: str) -> Iterable[Inputs]:
    """Yield inputs of the conversion's sizes, of others, and padded if the model takes a mask."""
    case = MODELS[name]
    yield from (case.sample(*size, seed=FRESH) for size in ((2, 12), (3, 7), (1, 16)))
    if case.padded_inputs is not None:
        yield case.sample(2, 12, seed=FRESH, padded=True)


def off(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the distance of outputs. The same rows must be NaN in both: rows that see no keys."""
    assert all(torch.equal(a.isnan(), e.isnan()) for a, e in zip(actual, expected, strict=True))
    known = [(a.nan_to_num(), e.nan_to_num()) for a, e in zip(actual, expected, strict=True) if e.any()]
    return error([a for a, _ in known], [e for _, e in known])


@every_model
def test_forward_in_evaluation(name: str) -> None:
    assert not [note for note in converted(name).report.notes if "rolled back" in note]
    for inputs in samples(name):
        expected, actual = converted(name).run(inputs)
        assert off(actual, expected) <= EVERYWHERE, {key: value.shape for key, value in inputs.items()}


@every_model
def test_gradients(name: str) -> None:
    pair, inputs = converted(name), MODELS[name].sample(seed=FRESH)
    expected, actual = (gradients(model.train(), inputs) for model in (pair.original, pair.converted))
    known = {name: grad for name, grad in expected.items() if grad is not None}
    assert known.keys() == {name for name, grad in actual.items() if grad is not None}
    largest = max(grad.norm() for grad in known.values())
    # of a bias before a softmax it is zero, but for rounding
    bounds = {name: EVERYWHERE * max(grad.norm(), 0.01 * largest) for name, grad in known.items()}
    apart = [name for name, grad in known.items() if (actual[name] - grad).norm() > bounds[name]]
    # the sum of a scalar's gradient may cancel so far that the original's own is off by more than the bound
    exact = gradients(copy.deepcopy(pair.original).double(), _wide(inputs)) if apart else {}
    for name in apart:
        own, original = ((each[name] - exact[name]).norm() for each in (actual, expected))
        assert own <= max(bounds[name], 2 * original), name


def _wide(inputs: Inputs) -> Inputs:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)


@each(GENERATING, later=GENERATING)
def test_generated_tokens(name: str) -> None:
    pair = converted(name)
    inputs = pair.case.sample(seed=FRESH)
    inputs.pop("decoder_input_ids", None)
    how = {"max_new_tokens": 5, "do_sample": False}
    expected, actual = (m.eval().generate(**inputs, **how) for m in (pair.original, pair.converted))
    assert torch.equal(actual, expected)


@every_model
def test_state_dict_is_the_originals_and_so_is_the_model_again(name: str) -> None:
    case = MODELS[name]
    model = case.build()
    state = copy.deepcopy(model.state_dict())
    made = te_transform.convert(model, case.sample(), verify=False, inplace=True)
    found = made.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert type(te_transform.revert(made)) is type(case.build())


@every_model
def test_is_planned_in_fp8(name: str) -> None:
    if name not in IN_FP32_ALONE:
        assert inspected(MODELS[name], recipe="fp8-delayed").fused
        return
    case = MODELS[name]
    with pytest.raises(RuntimeError, match="same dtype"):
        case.build().bfloat16()(**case.sample())
    assert te_transform.inspect(case.build(), case.sample(), backend="te", recipe="fp8-delayed").fused
