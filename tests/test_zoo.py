"""The zoo itself: its models build the same way every time and run at any shape, padded or not."""

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import CASES, EXTRA, Case, Inputs, left_padding, quickstart_masked, tensors, zero_dropout

ALL = CASES | EXTRA
every_case = pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())


def run(model: nn.Module, inputs: Inputs, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    outputs = list(tensors(model(**inputs)))
    assert outputs
    return outputs


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@every_case
def test_models_run_at_any_shape_in_both_modes(case: Case) -> None:
    model = case.build()
    for training in (True, False):
        model.train(training)
        for batch, seq in ((2, 12), (3, 7)):
            for padded in (False, True) if case.padded_inputs else (False,):
                outputs = run(model, case.sample(batch, seq, padded=padded))
                assert all(output.isfinite().all() for output in outputs), (training, batch, seq, padded)


@every_case
def test_models_are_deterministic(case: Case) -> None:
    before = torch.get_rng_state()
    first, second = case.build(), case.build()
    assert torch.equal(before, torch.get_rng_state())

    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    assert same(list(states[0].values()), list(states[1].values()))
    assert same(list(case.sample().values()), list(case.sample().values()))
    for training in (True, False):
        pair = first.train(training), second.train(training)
        assert same(run(pair[0], case.sample()), run(pair[1], case.sample()))


@every_case
def test_parameters_hide_nothing(case: Case) -> None:
    for name, parameter in case.build().named_parameters():
        assert not (parameter == 0).any(), name
        assert not (parameter == 1).any(), name


@every_case
def test_zero_dropout_leaves_nothing_random(case: Case) -> None:
    model = zero_dropout(case.build().train())
    inputs = case.sample()
    assert same(run(model, inputs, seed=0), run(model, inputs, seed=1))


@pytest.mark.parametrize("case", [c for c in ALL.values() if c.padded_inputs], ids=lambda case: case.name)
def test_padding_is_seen(case: Case) -> None:
    model = case.build().eval()
    padded = case.sample(padded=True)
    whole = {name: value for name, value in padded.items() if "mask" not in name}
    assert not same(run(model, padded), run(model, whole))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "bloom"])
def test_causal_models_do_not_look_ahead(name: str) -> None:
    model = ALL[name].build().eval()
    ids = ALL[name].sample()["input_ids"]
    changed = torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 99], dim=1)
    left, right = model(input_ids=ids).logits, model(input_ids=changed).logits
    torch.testing.assert_close(left[:, :-1], right[:, :-1])
    assert not torch.equal(left[:, -1], right[:, -1])


def test_left_padding_leaves_a_token_in_every_row() -> None:
    for batch in (1, 2, 5):
        for seq in (2, 7, 12):
            padding = left_padding(batch, seq)
            assert padding[0, 0]
            assert not padding[:, -1].any()
            assert (padding.int().diff(dim=1) <= 0).all()


@pytest.mark.parametrize("left", [False, True])
def test_quickstart_masks_hide_a_whole_row_only_on_request(left: bool) -> None:
    for fully_masked_row in (False, True):
        generator = torch.Generator().manual_seed(0)
        mask = quickstart_masked(2, 12, generator, left, fully_masked_row)["attention_mask"]
        assert mask.dtype == torch.bool
        assert mask.all(dim=-1).any() == fully_masked_row
