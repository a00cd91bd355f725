"""Training: gradients, freezing, hooks on parameters, optimizers, and weights written at the wrong moment."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.attacks import Pair, X, assert_same, named, observed, with_input_gradient
from tests.models.tiny import WIDTH, Attention, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

ATTENTION = "blocks.0.attention"
PROJECTIONS = [f"{ATTENTION}.{name}_proj" for name in "qkv"]
PATHS = ["", "blocks.0.norm1", ATTENTION, "blocks.0.mlp.fc2", "head"]
JOINED = "merge_siblings layernorm_mlp"


def tiny() -> Pair:
    return Pair.of(Tiny, rules=JOINED)


# Freezing


def test_parts_are_frozen_and_thawed_one_by_one() -> None:
    pair = tiny()
    for path in PATHS:
        for model in pair.models:
            model.get_submodule(path).requires_grad_(False)
        found = pair.agree(with_input_gradient)
        assert not any(name.startswith(path) for name in found if path and not name.startswith("output"))
        for model in pair.models:
            model.requires_grad_(True)
    pair.agree(with_input_gradient)


@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.bias"])
def test_one_of_the_joined_is_frozen_later(name: str) -> None:
    pair = tiny()
    for model in pair.models:
        model.get_parameter(f"{ATTENTION}.{name}").requires_grad_(False)
    assert f"{ATTENTION}.{name}" not in pair.agree(with_input_gradient)
    for model in pair.models:
        model.get_parameter(f"{ATTENTION}.{name}").requires_grad_(True)
    assert f"{ATTENTION}.{name}" in pair.agree()


@pytest.mark.parametrize("verify", [True, False])
def test_a_model_that_was_frozen_in_part_stays_so(verify: bool) -> None:
    model = seeded(Tiny)
    for path in PROJECTIONS[:2]:
        model.get_submodule(path).requires_grad_(False)
    pair = Pair.of(model, verify=verify)
    flags = [[p.requires_grad for p in model.parameters()] for model in pair.models]
    assert flags[0] == flags[1]
    pair.agree(with_input_gradient)
    for model in pair.models:
        model.requires_grad_(True)
    pair.agree()


# Gradients


def in_two_steps(model: nn.Module, x: Tensor) -> None:
    """The gradients of two backwards add up."""
    for part in x.split(1):
        model(part).square().sum().backward()


def of_some(model: nn.Module, x: Tensor) -> Any:
    wanted = [model.get_submodule(path).weight for path in PROJECTIONS[1:]]
    return torch.autograd.grad(model(x).square().sum(), wanted)


def into_zeros(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    model(x).square().sum().backward()


def into_kept(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Tensors that the user put into .grad are added to, in place."""
    kept = []
    for path in PROJECTIONS:
        weight = model.get_submodule(path).weight
        weight.grad = torch.ones_like(weight)
        kept.append(weight.grad)
    model(x).square().sum().backward()
    assert all(model.get_submodule(path).weight.grad is g for path, g in zip(PROJECTIONS, kept, strict=True))
    return kept


def without_that_of_a_part(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()
    model.get_submodule(PROJECTIONS[1]).zero_grad()
    model.get_submodule(PROJECTIONS[2]).weight.grad.mul_(2)


def clipped(model: nn.Module, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def of_a_sum(model: nn.Module, x: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.parameters()) + model(x).sum()


def with_inputs(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward(inputs=[model.get_submodule(path).weight for path in PROJECTIONS[:1]])


@pytest.mark.parametrize(
    "act",
    [in_two_steps, of_some, into_zeros, into_kept, without_that_of_a_part, clipped, of_a_sum, with_inputs],
    ids=lambda act: act.__name__,
)
def test_gradients(act: Callable) -> None:
    Pair.shared(Tiny, JOINED).agree(act, atol=1e-4)


def test_gradients_share_no_memory() -> None:
    """An in-place change of a gradient (a hook, clipping, an all-reduce) changes no other gradient."""
    pair = tiny()
    pair.agree()
    gradients = [p.grad for p in pair.converted.parameters()]
    expected = [p.grad.clone() for p in pair.original.parameters()]
    for gradient in gradients:
        gradient.mul_(2)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, 2 * other, atol=1e-4, rtol=1e-4)
        assert gradient.is_contiguous()


def test_hooks_on_parameters() -> None:
    pair = tiny()
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for which, model in enumerate(pair.models):
        k, v = (model.get_submodule(path).weight for path in PROJECTIONS[1:])
        k.register_hook(lambda grad: 2 * grad)
        v.register_hook(lambda grad, which=which: seen[which].append(grad.clone()))
        v.register_post_accumulate_grad_hook(lambda p, which=which: seen[which].append(p.grad.clone()))
        model.norm.weight.register_hook(lambda grad: grad.zero_())
    pair.agree(with_input_gradient)
    assert len(seen[0]) == 2
    assert_same("hooked", torch.stack(seen[1]), torch.stack(seen[0]), 1e-4)


# Weights written between forward and backward


def doubled(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def stepped(parameter: nn.Parameter) -> None:
    torch.optim.SGD([parameter], lr=0.1, foreach=False).step()


WRITES = {
    "in place": doubled,
    "data in place": lambda p: p.data.mul_(2),
    "data assigned": lambda p: setattr(p, "data", 2 * p.data),
}


@pytest.mark.parametrize("trained", ["weights", "weights and input", "input", "input and biases"])
def test_a_weight_written_between_forward_and_backward_is_no_silent_error(trained: str) -> None:
    """If the original raises, the gradient may also be that of the weights of the forward."""
    pair = tiny()
    for name, parameter in (item for model in pair.models for item in model.named_parameters()):
        parameter.requires_grad_("weights" in trained or ("biases" in trained and "bias" in name))
    state = copy.deepcopy(pair.original.state_dict())
    for path in (*PROJECTIONS[:2], "blocks.0.mlp.fc1", "blocks.0.norm1"):
        for name, write in WRITES.items():
            with named(f"{path} {name}"):
                write_between(pair, path, write, "input" in trained)
                for model in pair.models:
                    model.load_state_dict(copy.deepcopy(state))


def write_between(pair: Pair, path: str, write: Callable, of_input: bool) -> None:
    def act(model: nn.Module, x: Tensor, write: Callable | None = write) -> None:
        out = model(x.requires_grad_(of_input))
        if write is not None:
            write(model.get_submodule(path).weight)
        out.square().sum().backward()

    right = observed(pair.original, lambda model, x: act(model, x, None), X)
    expected, actual = (observed(model, act, X) for model in pair.models)
    if "error" in expected and "error" not in actual:
        expected = right
    assert actual.keys() == expected.keys(), actual.get("error")
    for name, value in expected.items():
        assert_same(name, actual[name], value, 1e-4)


@pytest.mark.parametrize("trained", ["all", "norms frozen", "one of the joined"])
def test_tensors_that_no_backward_reads_may_be_written_before_it(trained: str) -> None:
    """A bias, a weight whose input needs no gradient, one of which autocast has made a copy."""
    pair = tiny()
    for name, parameter in (item for model in pair.models for item in model.named_parameters()):
        parameter.requires_grad_(trained != "one of the joined" or "v_proj" in name)
        parameter.requires_grad_(parameter.requires_grad and (trained == "all" or "norm" not in name))
    found = [
        "error" in pair.agree(partial(written_between, name, low), atol=2e-2 if low else 1e-5)
        for name in ("q_proj.bias", "q_proj.weight")
        for low in (False, True)
    ]
    assert found == [False, False, trained == "all", False]


def written_between(name: str, low: bool, model: nn.Module, x: Tensor, path: str = "") -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        out = model(x)
    parameter = model.get_parameter(path or f"{ATTENTION}.{name}")
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(2)
    try:
        out.square().sum().backward()
    finally:
        parameter.data = before


class Twice(nn.Module):
    """One attention for two inputs, of which the first needs no gradient: its backward reads no weight."""

    def __init__(self):
        super().__init__()
        self.embedded, self.norm, self.attention = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.norm(x.detach())) + self.attention(self.norm(self.embedded(x)))


@pytest.mark.parametrize("path", ["attention.q_proj.weight", "attention.q_proj.bias"])
def test_one_product_of_two_reads_what_is_written_to(path: str) -> None:
    pair = Pair.of(Twice, rules="merge_siblings merge_siblings")
    for model in pair.models:
        model.norm.requires_grad_(False)
    found = pair.agree(partial(written_between, "", False, path=path))
    assert ("error" in found) == path.endswith("weight")


class Grouped(nn.Module):
    """Attention over keys and values that it is given, of two heads for four, repeated as models do."""

    def __init__(self, written_out: bool):
        super().__init__()
        self.q, self.o, self.written_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), written_out
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (key, value))
        if self.written_out:
            out = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("through_data", [False, True])
def test_keys_that_are_given_may_be_written_to_before_the_backward(
    written_out: bool, through_data: bool
) -> None:
    """The original's backward reads the copies that repeat them."""
    cache = torch.randn(2, 2, 7, WIDTH // 4, generator=torch.Generator().manual_seed(1))
    pair = Pair.of(seeded(Grouped, written_out), (X, cache, cache.flip(-1)), rules="attention" * written_out)

    def act(model: nn.Module, x: Tensor) -> Tensor:
        key, value = cache.clone(), cache.flip(-1)
        out = model(x, key, value)
        for each in (key, value):
            (each.data if through_data else each).mul_(2)
        return out

    assert "error" not in pair.agree(act)


# Optimizers


def groups_of(model: nn.Module) -> list[dict]:
    """Weight decay for matrices only, as everybody does."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def groups_by_name(model: nn.Module) -> list[dict]:
    """Queries learn at another rate than keys; values not at all."""
    chosen = [[p for n, p in model.named_parameters() if part in n] for part in ("q_proj", "k_proj", "mlp")]
    return [{"params": chosen[0], "lr": 0.1}, {"params": chosen[1]}, {"params": chosen[2]}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def test_training_goes_on_converted_in_place_and_reverted() -> None:
    """The optimizer that was made before is the one that goes on: there is nothing to move."""
    reference, model = seeded(Tiny), seeded(Tiny)
    expected, optimizer = adam(reference), adam(model)
    train(reference, expected), train(model, optimizer)
    assert te_transform.convert(model, X, inplace=True, verify=False) is model
    te_transform.report(model).expect(merge_siblings=1)
    train(reference, expected), train(model, optimizer)
    Pair(reference, model, X).agree(atol=1e-4)
    assert te_transform.revert(model) is model
    train(reference, expected), train(model, optimizer)
    Pair(reference, model, X).agree(atol=1e-4)
    assert_same("state", flat_state(optimizer), flat_state(expected), 1e-3)


def flat_state(optimizer: torch.optim.Optimizer) -> Tensor:
    held = [value for state in optimizer.state.values() for value in state.values()]
    return torch.cat([v.double().flatten() for v in held if isinstance(v, Tensor)] or [torch.zeros(0)])


def test_parameters_of_one_product_in_several_groups() -> None:
    pair = tiny()
    for model in pair.models:
        train(model, torch.optim.AdamW(groups_by_name(model), lr=1e-2, weight_decay=0.1))
    before, after = seeded(Tiny).state_dict(), pair.converted.state_dict()
    assert torch.equal(after[f"{PROJECTIONS[2]}.weight"], before[f"{PROJECTIONS[2]}.weight"])
    assert not torch.equal(after[f"{PROJECTIONS[1]}.weight"], before[f"{PROJECTIONS[1]}.weight"])
    pair.agree(atol=1e-4)


def test_an_optimizers_state_loads_across() -> None:
    pair = tiny()
    optimizers = [adam(model) for model in pair.models]
    for model, optimizer in zip(pair.models, optimizers, strict=True):
        train(model, optimizer)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    for model, optimizer, state in zip(pair.models, optimizers, states[::-1], strict=True):
        optimizer.load_state_dict(state)
        train(model, optimizer)
    pair.agree(atol=1e-4)


def test_a_scheduler_goes_on() -> None:
    model = seeded(Tiny)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    te_transform.convert(model, X, inplace=True, verify=False)
    train(model, optimizer), scheduler.step()
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        *map(id, model.parameters())
    }
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


def test_dropout_draws_the_originals_numbers() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Dropout(0.2), Tiny(), nn.Dropout(0.5), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    pair = Pair.of(seeded(build))
    pair.agree(with_input_gradient)
    for model in pair.models:
        model[2].p = 0.1
    pair.agree(with_input_gradient)
    for model in pair.models:
        model[0].eval()
    pair.agree(with_input_gradient)


class ReturnsWeights(nn.Module):
    """Attention that is written out and returns its dropped weights."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.q_proj(query) @ self.k_proj(key).mT * WIDTH**-0.5
        weights = self.dropout(scores.softmax(-1))
        return weights @ self.v_proj(value), weights.mean(0)


class DropsWeights(nn.Module):
    """A block that does not read the weights that its attention returns."""

    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.norm, self.attention, self.after = nn.LayerNorm(WIDTH), attention(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.attention(*[self.norm(x)] * 3)[0])


WEIGHTS_UNREAD = {
    "PyTorch's attention": partial(nn.MultiheadAttention, WIDTH, 2, dropout=0.2, batch_first=True),
    "attention that is written out": ReturnsWeights,
}


@pytest.mark.parametrize("name", WEIGHTS_UNREAD)
def test_attention_whose_weights_are_unread_draws_its_dropout_once(name: str) -> None:
    """The mean of the weights kept the captured attention beside the fused one."""
    model = seeded(partial(DropsWeights, WEIGHTS_UNREAD[name]))
    Pair.of(model, rules="attention").agree(with_input_gradient)


class DrawsUnread(nn.Module):
    """A block that draws numbers which nothing reads, but which later draws depend on."""

    def __init__(self, draw: Callable[[Tensor], Any]):
        super().__init__()
        self.norm, self.linear, self.draw = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.norm(x))
        self.draw(hidden)
        return x + F.dropout(hidden, 0.5)


DRAWS_UNREAD = {
    "dropout": lambda x: F.dropout(x, 0.5).mean(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "a pooling": lambda x: F.fractional_max_pool2d(x[None], 2, output_size=2),
    "numbers": lambda x: torch.binomial(torch.ones(2), torch.ones(2) / 2).sum(),
    "an operator of aten": lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True)[0].sum(),
}


@pytest.mark.parametrize("name", DRAWS_UNREAD)
def test_unread_random_numbers_are_drawn(name: str) -> None:
    pair = Pair.of(seeded(partial(DrawsUnread, DRAWS_UNREAD[name])), rules="layernorm_linear")
    pair.agree(with_input_gradient)
