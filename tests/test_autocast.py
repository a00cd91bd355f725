"""A model in a recipe's precision is the same object to everybody, and never runs on weights of yesterday."""

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.autocast import AutocastSlot, Kept, Precision
from te_transform.backends import torch as plain
from te_transform.emit import enter_precision, leave
from tests import stand_in
from tests.bitwise import untouched
from tests.conversions import ALL, same_bits
from tests.stand_in import Te

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Te:
    return stand_in.install(monkeypatch)


class Rounded(nn.Linear):
    """A linear on weights rounded to bf16, in a recipe; it may keep them as TE's modules do."""

    kept: Kept | None = None
    weight_names = ("weight",)
    held: Tensor | None = None
    times = 0  # they were rounded

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept.may_be_used()
        held = self.held if kept else None
        if held is None:
            held = self.weight + (self.weight.bfloat16().float() - self.weight).detach()
            self.times += 1
        if kept:
            self.held = held
        return F.linear(x, held, self.bias)

    def forget_weights(self) -> None:
        self.held = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Rounded(8, 16), Rounded(16, 8)
        self.fails = False

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Two products."""
        if self.fails:
            raise ZeroDivisionError
        return self.down(torch.relu(self.up(x))) * scale


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
    enter_precision(model, Precision("recipe", [model.up, model.down]))
    return model.eval()


# The root


def test_the_class_is_kept() -> None:
    model, original = net(), Net()
    assert isinstance(model, Net)
    assert isinstance(model, AutocastSlot)
    assert type(model).__name__ == "Net"
    assert type(model).__qualname__ == Net.__qualname__
    assert type(model).__module__ == Net.__module__
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    assert model.forward.__doc__ == "Two products."


def test_a_forward_runs_within_the_recipe(te: Te) -> None:
    net()(X, scale=2.0)
    assert te.entered == ["in recipe", "out"]


def test_what_is_raised_leaves_the_recipe(te: Te) -> None:
    model = net()
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        model(X)
    assert te.entered == ["in recipe", "out"]
    model.fails = False
    assert torch.equal(model(X), fresh(model))


def test_the_class_comes_back() -> None:
    model = net()
    leave(model)
    assert type(model) is Net
    assert "_te_transform_precision" not in vars(model)


# Weights that are kept


def fresh(model: Net) -> Tensor:
    """The answer on the weights as they are now."""
    with torch.no_grad():
        hidden = torch.relu(F.linear(X, model.up.weight.bfloat16().float(), model.up.bias))
        return F.linear(hidden, model.down.weight.bfloat16().float(), model.down.bias)


def times(model: Net) -> int:
    """How often the weights were rounded, both of them."""
    assert model.up.times == model.down.times
    return model.up.times


@torch.no_grad()
def evaluate(model: Net) -> int:
    """How often the weights are rounded in one call, which is right."""
    before = times(model)
    assert torch.equal(model(X), fresh(model))
    return times(model) - before


def test_evaluation_keeps_weights() -> None:
    model = net()
    assert [evaluate(model) for _ in range(3)] == [1, 0, 0]


def test_calls_that_use_no_quantised_weight_look_at_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looked = net(), []
    monkeypatch.setattr(Precision, "_keep", lambda *_: looked.append(True))
    with torch.no_grad():
        model(X)
        assert looked == [True]  # once, for both modules
        monkeypatch.setattr(Rounded, "forward", nn.Linear.forward)
        model(X)
    assert looked == [True]
    assert model._te_transform_precision.kept.settle is None


def test_calls_with_gradients_and_in_training_keep_none() -> None:
    model = net()
    for _ in range(2):
        assert torch.equal(model(X), fresh(model))
    model.train()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(X), fresh(model))
    assert times(model) == 4
    assert model.up.held is model.down.held is None


@contextmanager
def training(model: Net) -> Any:
    model.train()
    yield
    model.eval()


@pytest.mark.parametrize("mode", [training, lambda model: torch.enable_grad()], ids=["training", "gradients"])
def test_a_call_in_another_mode_forgets_them(mode: Callable) -> None:
    model = net()
    assert evaluate(model) == 1
    with mode(model):
        model(X)
    assert model.up.held is model.down.held is None
    assert evaluate(model) == 1


def stepped(model: Net) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def loaded(model: Net) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def loaded_anew(model: Net) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def copied_into(model: Net) -> None:
    with torch.no_grad():
        model.down.weight.copy_(model.down.weight * 2)


def through_the_state_dict(model: Net) -> None:
    model.state_dict()["up.weight"].mul_(2)


def through_a_view(model: Net) -> None:
    model.down.weight.detach()[1:2].zero_()


def of_another_dtype_and_back(model: Net) -> None:
    model.half().float()


def data_of_its_own(model: Net) -> None:
    model.up.weight.data = model.up.weight.data + 1


WRITES = [stepped, loaded, loaded_anew, copied_into, through_the_state_dict, through_a_view]


@pytest.mark.parametrize("write", [*WRITES, of_another_dtype_and_back, data_of_its_own])
def test_weights_that_were_written_to_are_not_used(write: Callable[[Net], None]) -> None:
    model = net()
    assert evaluate(model) == 1
    write(model)
    assert evaluate(model) == 1
    assert evaluate(model) == 0


def test_a_parameter_in_the_place_of_one_that_is_gone_is_another() -> None:
    model = net()
    values = torch.arange(128.0).view(16, 8)
    for _ in range(20):  # sooner or later the memory, and the id, of one that was freed is used again
        evaluate(model)
        for _ in range(2):
            model.up.weight = None
            model.up.weight = nn.Parameter(values.clone())
            values = values.flip(0) + 1
        assert evaluate(model) == 1


@pytest.mark.parametrize("mode", [True, False])
def test_train_and_eval_forget_what_was_kept(mode: bool) -> None:
    model = net()
    outer = nn.Sequential(model)
    for switched in (model, outer):
        evaluate(model)
        model.up.weight.data.mul_(2)  # which no version counts
        switched.train(mode)
        assert model.up.held is model.down.held is None
        assert evaluate(model.eval()) == 1


def test_weights_of_inference_mode_are_not_kept() -> None:
    with torch.inference_mode():
        model = net()
        assert [evaluate(model) for _ in range(2)] == [1, 1]
        model.up.weight.mul_(2)
        assert evaluate(model) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_weights_of_their_own(copied: Callable[[Net], Net], te: Te) -> None:
    model = net()
    evaluate(model)
    other = copied(model)
    assert isinstance(other, AutocastSlot)
    assert other._te_transform_precision.modules == [other.up, other.down]
    assert other.up.kept is other.down.kept is other._te_transform_precision.kept
    assert other.up.kept is not model.up.kept
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert evaluate(other) == 1
    with torch.no_grad():
        other.up.weight.mul_(3)
    assert evaluate(other) == evaluate(model) == 1
    assert te.entered == ["in recipe", "out"] * 4


def test_a_compiled_model_runs_eagerly_and_right() -> None:
    model = net()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(compiled(X), fresh(model))
        copied_into(model)
    assert times(model) == 2
    assert torch.equal(compiled(X, scale=1.0), fresh(model))


def test_training_gives_the_weights_their_gradients() -> None:
    model = net()
    evaluate(model)
    model.train()(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# A model of Hugging Face's


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch, te: Te) -> None:
    """Let the modules of the stand-in have what those of TE have for a recipe."""
    for name in ("recipe_of", "multiple", "is_delayed", "calibrate", "Amax"):
        monkeypatch.setattr(plain, name, getattr(te, name), raising=False)
    for kind in (plain.Linear, plain.LayerNormLinear, plain.LayerNormMLP):
        weights = ("fc1_weight", "fc2_weight") if kind is plain.LayerNormMLP else ("weight",)
        monkeypatch.setattr(kind, "weight_names", weights, raising=False)
        monkeypatch.setattr(kind, "forget_weights", lambda self: None, raising=False)
        monkeypatch.setattr(kind, "kept", None, raising=False)


def quantised(model: nn.Module, **options: Any) -> nn.Module:
    return te_transform.convert(model, ALL["llama"].sample(), recipe="fp8-current", verify=False, **options)


@pytest.mark.usefixtures("recipes")
def test_generation_enters_the_recipe_for_each_token(te: Te) -> None:
    model = ALL["llama"].build().eval()
    converted, ids = quantised(model), ALL["llama"].sample()["input_ids"]
    te.entered.clear()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(converted.generate(ids, **options), model.generate(ids, **options))
    assert te.entered == ["in fp8-current", "out"] * 5


@pytest.mark.usefixtures("recipes")
def test_a_model_in_a_recipe_is_its_own_class() -> None:
    model = ALL["llama"].build()
    converted = quantised(model)
    assert isinstance(converted, type(model))
    assert type(converted).__name__ == type(model).__name__
    assert inspect.signature(converted.forward) == inspect.signature(model.forward)
    assert same_bits(converted.state_dict(), model.state_dict())


@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_run_in_the_recipe(te: Te, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = ALL["llama"].build().eval()
    converted = copied(quantised(model))
    te.entered.clear()
    with torch.no_grad():
        found, wanted = (m(**ALL["llama"].sample()).logits for m in (converted, model))
    torch.testing.assert_close(found, wanted)
    assert te.entered == ["in fp8-current", "out"]


@pytest.mark.usefixtures("recipes")
def test_revert_leaves_the_recipe(te: Te) -> None:
    model = ALL["llama"].build()
    reverted = te_transform.revert(quantised(model))
    assert type(reverted) is type(model)
    te.entered.clear()
    reverted(**ALL["llama"].sample())
    assert te.entered == []
    assert same_bits(reverted.state_dict(), model.state_dict())


@pytest.mark.usefixtures("recipes")
def test_what_fails_after_it_entered_the_recipe_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = ALL["llama"].build(), []

    def fail(converted: nn.Module, options: Any) -> None:
        seen.append(isinstance(converted, AutocastSlot))
        raise KeyboardInterrupt

    monkeypatch.setitem(te_transform.convert.__globals__, "finalise", fail)
    with untouched(model, storages=False), pytest.raises(KeyboardInterrupt):
        quantised(model, inplace=True)
    assert seen == [True]
