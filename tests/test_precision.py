"""A model in a recipe's precision is the same object to everybody, and never runs on weights of yesterday."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import PrecisionPlan
from te_transform.backends.joined import state_of
from te_transform.backends.weight_cache import is_evaluating
from te_transform.runtime.precision import Precision
from tests import stand_in
from tests.zoo import CASES

te = stand_in.te  # a fixture
STATE = stand_in.FP8GlobalStateManager.quantization_state
RECIPES = ("fp8-delayed", "fp8-current")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
pytestmark = pytest.mark.usefixtures("te")


def llama() -> nn.Module:
    return CASES["llama"].build().to(torch.bfloat16)


def inputs(seed: int = 0) -> dict[str, Tensor]:
    ids = CASES["llama"].sample(seed=seed)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def converted(recipe: Any, model: nn.Module | None = None) -> nn.Module:
    model = llama() if model is None else model
    return te_transform.convert(model, inputs(), backend="te", recipe=recipe, verify=False)


def step(model: nn.Module, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    loss = model(**inputs(seed)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=inputs()["input_ids"]).logits


def distance(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


# The model


@each_recipe
def test_a_model_in_a_recipe_rounds_and_is_its_own_class(recipe: str) -> None:
    model = llama()
    fused = converted(recipe, model)
    assert isinstance(fused, type(model))
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    assert list(fused.state_dict()) == list(model.state_dict())
    logits(fused)
    assert 1e-2 < distance(logits(fused), logits(model)) < 0.2


@each_recipe
def test_a_forward_is_one_step_of_the_recipe(recipe: str) -> None:
    fused = converted(recipe)
    before = STATE.steps
    for number in range(3):
        step(fused, number)
    assert STATE.steps == before + 3
    assert STATE.autocast_depth == 0


@each_recipe
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(recipe: str, reentrant: bool) -> None:
    plain, checkpointed = converted(recipe), converted(recipe)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = STATE.steps
    for number in range(3):
        (loss, expected), (again, found) = step(plain, number), step(checkpointed, number)
        assert torch.equal(loss, again)
        assert all(distance(found[name], grad) < 2e-3 for name, grad in expected.items())
    assert STATE.steps == before + 6


def test_what_is_raised_leaves_the_recipe() -> None:
    fused = converted("fp8-current")
    expected = logits(fused)
    with pytest.raises(Exception, match="shape|size|dim"):
        fused(input_ids=torch.zeros(2, 3, 4, 5, dtype=torch.long))
    assert STATE.autocast_depth == 0
    assert not stand_in.FP8GlobalStateManager.is_fp8_enabled()
    assert torch.equal(logits(fused), expected)


def test_generation_enters_the_recipe_for_each_token() -> None:
    fused, ids = converted("fp8-current").eval(), inputs()["input_ids"]
    before = STATE.steps
    fused.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert STATE.steps == before + 5


def test_revert_leaves_the_recipe() -> None:
    model = llama()
    expected = logits(model)
    reverted = te_transform.revert(converted("fp8-current", model))
    assert type(reverted) is type(model)
    before = STATE.steps
    assert torch.equal(logits(reverted), expected)
    assert STATE.steps == before


@each_recipe
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_by_themselves(recipe: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    fused = converted(recipe, model)
    step(fused)
    other = copied(fused)
    _, exact = step(copy.deepcopy(model).float(), seed=1)
    errors = []
    for one in (fused, other):
        found = step(one, seed=1)[1]
        errors.append(max(distance(found[name], grad) for name, grad in exact.items()))
    assert errors[1] <= 1.1 * errors[0]
    names = [name for name, _ in fused.named_parameters()]
    for name in names:
        own, its = (set(map(id, state_of(m.get_parameter(name)).kernels.values())) for m in (fused, other))
        assert not own & its
    step(other, seed=2)
    assert logits(other).isfinite().all()


def test_the_users_own_autocast_is_heard(te: ModuleType) -> None:
    model = llama()
    fused = converted(None, model)
    plain = logits(fused)
    with te.autocast(te.recipe_of("fp8-current")):
        found = logits(fused)
    assert not torch.equal(found, plain)
    assert torch.equal(found[..., :1].isfinite(), plain[..., :1].isfinite())
    assert distance(found, plain) < 0.2


# The plan


def test_a_plan_has_the_last_word_for_each_layer_of_a_shared_graph() -> None:
    kept = "model.layers.1.mlp"
    for recipe, inside in (("fp8-current", True), (PrecisionPlan("fp8-current", {kept: "as it was"}), False)):
        fused = converted(recipe)
        for one in (fused, copy.deepcopy(fused)):
            logits(one)
            for layer, wanted in ((0, True), (1, inside)):
                ran = [
                    kernel.in_fp8
                    for parameter in one.model.layers[layer].mlp.parameters()
                    for kernel in state_of(parameter).kernels.values()
                ]
                assert any(ran) == wanted


def test_the_head_stays_out_unless_a_plan_has_it_in() -> None:
    for recipe, wanted in (("fp8-current", False), (PrecisionPlan("fp8-current", {"lm_head": None}), True)):
        model = CASES["llama"].build()
        model.lm_head = nn.Linear(model.config.hidden_size, 64, bias=False)
        fused = te_transform.convert(
            model.to(torch.bfloat16), CASES["llama"].sample(), backend="te", recipe=recipe, verify=False
        )
        fused(**CASES["llama"].sample())
        kernels = state_of(fused.lm_head.weight).kernels.values()
        assert any(kernel.in_fp8 for kernel in kernels) == wanted


# Weights that are kept


def quantized(model: nn.Module) -> int:
    """How often weights are quantized in a call of evaluation, whose answer is that of a fresh copy."""
    before = stand_in.Base.quantized
    found = logits_without_mode(model)
    count = stand_in.Base.quantized - before
    fresh = converted("fp8-current", te_transform.revert(copy.deepcopy(model))).eval()
    assert torch.equal(found, logits_without_mode(fresh))
    return count


@torch.no_grad()
def logits_without_mode(model: nn.Module) -> Tensor:
    return model(input_ids=inputs()["input_ids"]).logits


@pytest.fixture
def served() -> Iterator[nn.Module]:
    yield converted("fp8-current").eval()


WEIGHTS = 2 * 4  # of two layers: q, k and v, o, gate and up, down


def stepped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.zero_grad()


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def loaded_anew(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def of_another_dtype_and_back(model: nn.Module) -> None:
    model.half().bfloat16()


def data_of_their_own(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


@pytest.mark.parametrize("write", [stepped, loaded, loaded_anew, of_another_dtype_and_back, data_of_their_own])
def test_weights_are_quantized_once_until_they_are_written_to(
    served: nn.Module, write: Callable[[nn.Module], None]
) -> None:
    assert [quantized(served) for _ in range(2)] == [WEIGHTS, 0]
    write(served)
    assert [quantized(served) for _ in range(2)] == [WEIGHTS, 0]


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@pytest.mark.parametrize("mode", [training, lambda model: torch.enable_grad()], ids=["training", "gradients"])
def test_a_call_in_another_mode_forgets_them(served: nn.Module, mode: Callable) -> None:
    assert quantized(served) == WEIGHTS
    with mode(served):
        served(**inputs())
    assert quantized(served) == WEIGHTS


@pytest.mark.parametrize("mode", [True, False])
def test_train_and_eval_forget_what_was_kept(served: nn.Module, mode: bool) -> None:
    outer = nn.Sequential(served)
    for switched in (served, outer):
        quantized(served)
        served.model.layers[1].mlp.down_proj.weight.data.mul_(2)  # which no version counts
        switched.train(mode)
        assert quantized(served.eval()) == WEIGHTS


def test_a_sharded_models_weights_are_not_kept(te: ModuleType) -> None:
    """FSDP fills their memory anew, and their versions stay."""
    from torch.distributed.fsdp import FSDPModule

    precision = Precision(te.recipe_of("fp8-current"))
    for kind, expected in ((nn.Linear, True), (type("Linear", (FSDPModule, nn.Linear), {}), False)):
        model = nn.Linear(2, 2).eval()
        model.__class__ = kind
        with precision.running(model), torch.no_grad():
            assert is_evaluating() == expected
