"""Weights that are held in FP8 alone compute what casts of them did."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import te_transform
from te_transform.autocast import precisions
from te_transform.originals import fusions, original_parameters
from tests.gpu.test_training import RECIPES, batch, converted, gradients, llama
from tests.zoo import seeded

each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def frozen(recipe: str, model: nn.Module | None = None) -> nn.Module:
    return converted(recipe, model).eval().requires_grad_(False)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(**batch()).logits


@each_recipe
def test_computes_what_it_did_and_is_verified(recipe: str) -> None:
    original = seeded(llama).requires_grad_(False)
    model = frozen(recipe, original)
    before = logits(model)
    found = te_transform.quantize_weights(model)
    assert torch.equal(logits(model), before)
    inside = {name for name in original.state_dict() if "_proj" in name}
    assert set(found.names) == inside
    assert "does not run in FP8" in found.left_out["lm_head.weight"]
    assert "no fused product" in found.left_out["model.norm.weight"]
    result = te_transform.verify(original, model, batch())
    assert result, str(result)


@each_recipe
def test_takes_half_the_memory(recipe: str) -> None:
    model = frozen(recipe)
    names = [name for name in model.state_dict() if "_proj" in name]
    numbers = sum(model.state_dict()[name].numel() for name in names)
    for precision in precisions(model).values():
        precision.forget()
    gc.collect()
    before = torch.cuda.memory_allocated()
    te_transform.quantize_weights(model)
    gc.collect()
    logits(model)
    assert before - torch.cuda.memory_allocated() > 0.95 * numbers  # one byte of two each, less the scales


@each_recipe
def test_state_dicts_have_their_names_and_load(recipe: str) -> None:
    original = seeded(llama)
    model = frozen(recipe, original)
    before = logits(model)
    te_transform.quantize_weights(model)
    state = model.state_dict()
    assert list(state) == list(original.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    fresh = seeded(llama)
    fresh.load_state_dict(state)
    for name, tensor in original.state_dict().items():
        error = (state[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert (0 < error < 2**-4) if "_proj" in name else error == 0
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(-1)
    model.load_state_dict(original.state_dict())
    assert not torch.equal(logits(model), before)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(-1)
    model.load_state_dict(original.state_dict())
    assert torch.equal(logits(model), before)


@each_recipe
def test_what_is_trained_beside_them_gets_the_same_gradients(recipe: str) -> None:
    def trained(alone: bool) -> dict[str, torch.Tensor]:
        model = converted(recipe)
        for name, original in original_parameters(model).items():
            original.held.requires_grad_("_proj" not in name)
        if alone:
            te_transform.quantize_weights(model)
        for _ in range(2):
            model.zero_grad()
            model(**batch()).loss.backward()
        return gradients(model)

    own, alone = trained(False), trained(True)
    assert own.keys() == alone.keys()
    assert own
    assert all(torch.equal(own[name], alone[name]) for name in own)


def test_weights_that_are_trained_stay() -> None:
    model = converted("fp8-current")
    found = te_transform.quantize_weights(model)
    assert not found.names
    assert "an optimizer needs it" in found.left_out["model.layers.0.mlp.down_proj.weight"]


@each_recipe
def test_copies_compute_the_same(recipe: str) -> None:
    model = frozen(recipe)
    te_transform.quantize_weights(model)
    before = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), before)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), before)


@each_recipe
def test_plain_calls_have_the_dequantised_values(recipe: str) -> None:
    model = frozen(recipe)
    te_transform.quantize_weights(model)
    own = seeded(llama)
    own.load_state_dict(model.state_dict())
    exact = logits(own)
    for fusion in fusions(model):
        fusion.enabled = False
    found = logits(model)
    assert (found - exact).norm() < 0.02 * exact.norm()


@each_recipe
def test_revert_gives_plain_parameters(recipe: str) -> None:
    model = frozen(recipe)
    te_transform.quantize_weights(model)
    state = model.state_dict()
    te_transform.revert(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    logits(model)


def test_generates() -> None:
    model = frozen("fp8-current")
    te_transform.quantize_weights(model)
    ids = batch()["input_ids"][:, :8]
    out = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 16)
