"""A converted model saves, loads and goes home under the original names, bit by bit."""

import copy

import pytest
import torch
from torch import Tensor, nn

import te_transform
from tests.conversions import ALL, EVERYWHERE, as_built, each, error, run, same_bits
from tests.zoo import CASES

pytestmark = pytest.mark.usefixtures("at_any_size")

every_case = each(ALL)
HERE = {
    "nanogpt_manual",
    "llama",
    "torch_encoder_pre",
    "torch_mha",
    "torch_mha_bare",
}  # where models are called


def ties(model: nn.Module) -> list[set[str]]:
    """The names in the state dict that are one storage, where more than one is."""
    names: dict[tuple, set[str]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel():
            names.setdefault((tensor.data_ptr(), tensor.shape), set()).add(name)
    return [tied for tied in names.values() if len(tied) > 1]


def tied_parameters(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def perturbed(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with other values in every parameter, tied ones alike; buffers stay."""
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other.state_dict()


@every_case
def test_state_dict_is_the_original_one(name: str) -> None:
    pair = as_built(name)
    expected, actual = pair.original.state_dict(), pair.converted.state_dict()
    assert same_bits(actual, expected)
    assert same_bits(expected, pair.case.build().state_dict())  # convert() left the original alone
    assert {n: (t.shape, t.stride()) for n, t in actual.items()}.keys() == expected.keys()
    assert ties(pair.converted) == ties(pair.original)
    assert all(t.requires_grad is False for t in actual.values())


@every_case
def test_the_original_stays_as_it_was(name: str) -> None:
    original, built = as_built(name).original, ALL[name].build()
    assert str(original) == str(built)
    for one, other in zip(original.modules(), built.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()


@every_case
def test_the_parameters_are_the_original_ones(name: str) -> None:
    pair = as_built(name)
    models = (pair.original, pair.converted)
    expected, actual = (dict(model.named_parameters(remove_duplicate=False)) for model in models)
    assert list(actual) == list(expected)
    assert list(dict(pair.converted.named_modules())) == list(dict(pair.original.named_modules()))
    assert tied_parameters(pair.converted) == tied_parameters(pair.original)
    for one, other in zip(actual.values(), expected.values(), strict=True):
        assert type(one) is nn.Parameter
        assert (one.stride(), one.requires_grad, one.grad) == (other.stride(), other.requires_grad, None)
        assert one.untyped_storage().nbytes() == one.nbytes


@each(["llama", "gpt2", "t5", "torch_mha"], later=["gpt2", "t5"])
def test_parameters_stay_the_users_own_objects_in_place(name: str) -> None:
    model = ALL[name].build()
    parameters = list(model.named_parameters(remove_duplicate=False))
    converted = te_transform.convert(model, ALL[name].sample(), inplace=True, verify=False)
    assert converted is model
    after = list(model.named_parameters(remove_duplicate=False))
    assert [(path, id(parameter)) for path, parameter in after] == [(path, id(p)) for path, p in parameters]
    reverted = te_transform.revert(model)
    assert reverted is model
    assert [id(parameter) for _, parameter in parameters] == [id(p) for p in dict(after).values()]


@each(CASES, later={*CASES} - HERE)
def test_loads_an_original_state_dict(name: str) -> None:
    pair, inputs = as_built(name), ALL[name].sample()
    before, state = copy.deepcopy(pair.original.state_dict()), perturbed(pair.original)
    original, converted = pair.run(inputs, training=True)
    try:
        for model in (pair.original, pair.converted):
            result = model.load_state_dict(state, strict=True)
            assert not result.missing_keys
            assert not result.unexpected_keys
        assert same_bits(pair.converted.state_dict(), state)
        expected, actual = pair.run(inputs, training=True)
        assert error(actual, expected) <= EVERYWHERE
        assert error(actual, original) > EVERYWHERE
    finally:
        for model in (pair.original, pair.converted):
            model.load_state_dict(before)
    again = run(pair.converted, inputs, training=True)
    assert all(map(torch.equal, again, converted))  # the graphs hold nothing of the weights


@each(["llama", "gpt2", "t5", "torch_mha"], later=["gpt2", "t5"])
def test_a_copy_shares_nothing(name: str) -> None:
    pair, other = as_built(name), as_built(name).copy()
    state = perturbed(pair.original)
    for model in (other.original, other.converted):
        model.load_state_dict(state)
    assert same_bits(pair.converted.state_dict(), pair.original.state_dict())
    expected, actual = other.run(pair.case.sample(), training=True)
    assert error(actual, expected) <= EVERYWHERE


@each(CASES, later={*CASES} - HERE)
def test_reverts_to_what_it_was(name: str) -> None:
    pair = as_built(name).copy()
    original, converted = pair.original.eval(), pair.converted.eval()
    state = perturbed(original)
    for model in (original, converted):
        model.load_state_dict(state)

    reverted = te_transform.revert(converted)

    assert reverted is converted
    assert same_bits(reverted.state_dict(), state)
    assert str(reverted) == str(original)
    assert tied_parameters(reverted) == tied_parameters(original)
    for (path, one), (other_path, other) in zip(
        reverted.named_modules(), original.named_modules(), strict=True
    ):
        assert path == other_path
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
        assert list(one._parameters) == list(other._parameters)
        assert one.training == other.training
    for training in (False, True):
        actual, expected = (run(m, pair.case.sample(), training) for m in (reverted, original))
        assert all(map(torch.equal, actual, expected))
