"""Weights that are held in FP8 alone compute what casts of them did."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import te_transform
from te_transform.backends import few_rows
from te_transform.fp8_only.weights import quantize_together
from tests.gpu.llama import batch, converted, gradients, llama
from tests.zoo import seeded

RECIPES = ("fp8-delayed", "fp8-current")  # those with one scale for a weight
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def frozen(recipe: str, model: nn.Module | None = None) -> nn.Module:
    """In evaluation, its scales settled."""
    made = converted(recipe, model).eval().requires_grad_(False)
    for _ in range(3):
        logits(made)
    return made


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
    assert set(found.names) == {name for name in original.state_dict() if "_proj" in name}
    assert "does not run in FP8" in found.left_out["lm_head.weight"]
    assert "no fused product" in found.left_out["model.norm.weight"]
    result = te_transform.verify(original, model, batch())
    assert result, str(result)


@each_recipe
def test_takes_half_the_memory(recipe: str) -> None:
    model = frozen(recipe)
    numbers = sum(tensor.numel() for name, tensor in model.state_dict().items() if "_proj" in name)
    model.train().eval()  # without the casts that evaluation keeps
    gc.collect()
    before = torch.cuda.memory_allocated()
    te_transform.quantize_weights(model)
    logits(model)  # captured anew: the parameters are of another class
    gc.collect()
    assert before - torch.cuda.memory_allocated() > 0.95 * numbers  # one byte of two each, less the scales


@each_recipe
def test_state_dicts_have_their_names_and_load(recipe: str) -> None:
    original = seeded(llama)
    model = frozen(recipe, original)
    te_transform.quantize_weights(model)
    before, state = logits(model), model.state_dict()
    assert list(state) == list(original.state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    seeded(llama).load_state_dict(state)
    for name, tensor in original.state_dict().items():
        error = (state[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert (0 < error < 2**-4) if "_proj" in name else error == 0
    model.load_state_dict({name: -tensor for name, tensor in original.state_dict().items()})
    assert not torch.equal(logits(model), before)
    model.load_state_dict(original.state_dict())
    assert torch.equal(logits(model), before)


@each_recipe
def test_trained_parameters_beside_fp8_only_weights_get_the_same_gradients(recipe: str) -> None:
    def trained(alone: bool) -> dict[str, torch.Tensor]:
        model = converted(recipe)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("_proj" not in name)
        for number in range(4):
            if alone and number == 2:
                assert te_transform.quantize_weights(model).names
            model.zero_grad()
            model(**batch()).loss.backward()
        return gradients(model)

    own, alone = trained(False), trained(True)
    assert own.keys() == alone.keys()
    assert own
    assert all((own[name] - alone[name]).norm() <= 2e-3 * own[name].norm() for name in own)


@each_recipe
def test_copies_compute_the_same(recipe: str) -> None:
    original = seeded(llama)
    model = frozen(recipe, original)
    te_transform.quantize_weights(model)
    before, exact = logits(model).double(), logits(original.double().eval())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):  # the first call of delayed scaling finds its scales, which are those of one batch
            found = logits(copied).double()
        assert (found - exact).norm() <= 1.1 * (before - exact).norm()
        if recipe == "fp8-current":
            assert (found - before).norm() < 0.02 * before.norm()


@each_recipe
def test_revert_gives_the_rounded_values(recipe: str) -> None:
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


@pytest.mark.parametrize("outs", [1, 48, 4096])
@pytest.mark.parametrize("ins", [16, 80, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_few_rows(outs: int, ins: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outs, ins, device="cuda", dtype=dtype)
    (held,) = quantize_together([weight])
    wide = held.quantized.view(torch.float8_e4m3fn).double() * held.inverse
    for rows in range(1, few_rows.MAX_ROWS + 1):
        x = torch.randn(rows, ins, device="cuda", dtype=dtype)
        for bias in (None, torch.randn(outs, device="cuda", dtype=dtype)):
            expected = torch.nn.functional.linear(x.double(), wide, None if bias is None else bias.double())
            found = torch.nn.functional.linear(x, held, bias)
            assert found.dtype is dtype
            assert (found - expected).norm() <= 2**-8 * expected.norm()
