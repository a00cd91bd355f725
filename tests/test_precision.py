"""A model in a recipe's precision is the same object to everybody, and never runs on weights of yesterday."""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import te_transform
from te_transform import PrecisionPlan
from te_transform.backends.fp8.current_model import is_evaluating
from te_transform.backends.fp8.precision import Precision
from te_transform.backends.fp8.registry import state_of
from tests import stand_in
from tests.attacks import named
from tests.ranks import WIDTH, Block

STATE = stand_in.FP8GlobalStateManager.quantization_state
RECIPES = ("fp8-delayed", "fp8-current")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
# which have a state beside the weights, as current scales have none; those in `make integrations`
by_delayed_scales = pytest.mark.parametrize(
    "recipe", ["fp8-delayed", pytest.param("fp8-current", marks=pytest.mark.integration)]
)
pytestmark = pytest.mark.usefixtures("at_any_size", "te")


class Net(nn.Module):
    def __init__(self, blocks: int = 1):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> [batch, length, 16]."""
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def net(blocks: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(blocks).to(torch.bfloat16)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def converted(recipe: Any, model: nn.Module | None = None, x: Tensor | None = None) -> nn.Module:
    model, x = net() if model is None else model, inputs() if x is None else x
    return te_transform.convert(model, x, backend="te", recipe=recipe, verify=False)


def step(model: nn.Module, seed: int = 0, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad()
    x = inputs(seed).to(next(model.parameters()).dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def answer(model: nn.Module) -> Tensor:
    return model.eval()(inputs())


def all_of(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors.values()])


def distance(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


# The model


@each_recipe
def test_a_model_in_a_recipe_rounds_and_is_its_own_class(recipe: str) -> None:
    model = net()
    fused = converted(recipe, model)
    assert isinstance(fused, type(model))
    assert inspect.signature(fused.forward) == inspect.signature(model.forward)
    assert list(fused.state_dict()) == list(model.state_dict())
    answer(fused)
    assert 1e-2 < distance(answer(fused), answer(model)) < 0.2


@by_delayed_scales
def test_later_captures_are_checked_in_the_dtype_of_the_model(recipe: str) -> None:
    fused = te_transform.convert(net(), inputs(), backend="te", recipe=recipe)
    before = STATE.steps
    assert distance(answer(fused), answer(net())) < 0.2  # another mode, and so another graph
    assert STATE.steps == before + 1
    assert not any("rolled back" in note for note in te_transform.report(fused).notes)


class Holds(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * 2


@by_delayed_scales
def test_a_part_that_is_called_by_itself_runs_in_the_recipe(recipe: str) -> None:
    model = Holds(net())
    fused = converted(recipe, model)
    answer(fused.net)
    before = STATE.steps
    assert 1e-2 < distance(answer(fused.net), answer(model.net)) < 0.2
    assert STATE.steps == before + 1


class Adds(nn.Module):
    """Adds to what a product gives, in place, as Falcon does."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x))))
        y += x
        return y


@each_recipe
def test_outputs_of_products_may_be_written_in_place(recipe: str) -> None:
    model = Adds().to(torch.bfloat16)
    fused = converted(recipe, model)
    for number in range(3):
        (_, found), (_, expected) = step(fused, number), step(model, number)
    assert all(distance(found[name], expected[name]) < 0.3 for name in expected)
    assert any(kernel.in_fp8 for p in fused.parameters() for kernel in state_of(p).kernels.values())


@by_delayed_scales
def test_a_forward_is_one_step_of_the_recipe(recipe: str) -> None:
    fused = converted(recipe)
    before = STATE.steps
    for number in range(3):
        step(fused, number)
    assert STATE.steps == before + 3
    assert STATE.autocast_depth == 0


def shrinking_step(model: nn.Module, number: int) -> dict[str, Tensor]:
    """One that a history of scales shows in, for a while."""
    loss, grads = step(model, number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    return {"loss": loss, **grads}


class Around(nn.Module):
    def __init__(self, net: nn.Module, reentrant: bool):
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Tensor:
        selects = {} if self.reentrant else {"context_fn": saving_products}
        return checkpoint(self.net, x, use_reentrant=self.reentrant, **selects)


def saving_products() -> tuple:
    """A selective checkpoint's modes, which find what was saved by the order of operations."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.clone.default]
    return create_selective_checkpoint_contexts(saved)


@by_delayed_scales
@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.integration), False])
def test_activation_checkpointing_is_a_part_of_the_same_step(recipe: str, reentrant: bool) -> None:
    inside, found = converted(recipe), []
    inside.reentrant = reentrant
    # one after the other: TE's steps are those of all models
    for model in (converted(recipe), inside, Around(converted(recipe), reentrant)):
        before = STATE.steps
        found.append(torch.cat([all_of(shrinking_step(model, number)) for number in range(8)]))
        assert STATE.steps == before + 8
    assert all(
        torch.equal(one, other) for each in found[1:] for one, other in zip(each, found[0], strict=True)
    )
    kernels = [k for p in inside.parameters() for k in state_of(p).kernels.values()]
    assert sum(kernel.in_fp8 for kernel in kernels) == 3  # of the block: q and k, o, the MLP


def scales_after_steps(inside: bool | None, around: bool | None) -> tuple[Tensor, Tensor]:
    """Return the scales and the gradients after three steps, each with two forwards and one in between."""
    fused, found = converted("fp8-delayed").train(), []
    for number in range(3):
        fused.reentrant = inside if number else None  # the first scales are those without checkpoints
        call = fused if not number or around is None else partial(checkpoint, fused, use_reentrant=around)
        losses = [
            call(inputs(seed).mul_(3**seed).requires_grad_()).float().square().mean() for seed in (0, 1)
        ]
        fused(inputs(2).requires_grad_()).float().square().mean().backward()
        fused.zero_grad()
        sum(losses).backward()
        found.append(all_of({name: parameter.grad for name, parameter in fused.named_parameters()}))
    kernels = [kernel for p in fused.parameters() for kernel in state_of(p).kernels.values()]
    scales = [state.scale for kernel in kernels for state in kernel.delayed().values()]
    return torch.cat(scales), torch.cat(found)


def test_reentrant_checkpoints_update_scales_once_per_forward() -> None:
    scales, gradients = scales_after_steps(None, None)
    assert scales.unique().numel() > 8
    for inside, around in ((True, None), (None, True), (True, True)):
        with named(f"{inside} {around}"):
            found = scales_after_steps(inside, around)
            assert torch.equal(found[0], scales)
            assert torch.equal(found[1], gradients)


@pytest.mark.parametrize(
    ("recipe", "compile"),
    [
        ("fp8-current", False),
        pytest.param("fp8-delayed", True, marks=pytest.mark.integration),
        pytest.param("fp8-delayed", False, marks=pytest.mark.integration),
        pytest.param("fp8-current", True, marks=pytest.mark.integration),
    ],
)
def test_weights_in_float32_run_in_fp8_under_autocast(recipe: str, compile: bool) -> None:
    """Trainer and accelerate train in bf16 by autocast."""
    exact, options = net().float(), {"backend": "te", "recipe": recipe, "compile": compile}
    fused = te_transform.convert(exact, inputs().float(), **options)
    assert any("only under torch.autocast" in note for note in te_transform.report(fused).notes)
    assert distance(fused(inputs().float()), exact(inputs().float())) < 1e-5
    assert "float32, which runs in FP8 only under torch.autocast" in te_transform.report(fused).plain_calls
    narrow = te_transform.convert(net(), inputs(), **options)
    wanted, errors = [all_of(step(exact, seed)[1]) for seed in range(3)], []
    for model in (narrow, fused):
        step(model, autocast=model is fused)
        found = [step(model, seed, autocast=model is fused)[1] for seed in range(3)]
        assert {grad.dtype for each in found for grad in each.values()} == {next(model.parameters()).dtype}
        errors.append(distance(torch.cat([*map(all_of, found)]), torch.cat(wanted)))
    assert errors[1] <= 1.1 * errors[0]
    ran = [k.in_fp8 for p in fused.parameters() for k in state_of(p).kernels.values()]
    assert sum(ran) == 3  # of the block: q and k, o, the MLP


def test_an_exception_leaves_the_recipe() -> None:
    fused = converted("fp8-current")
    expected = answer(fused)
    with pytest.raises(Exception, match=r"shape|size|dim"):
        fused(inputs()[..., :5])
    assert STATE.autocast_depth == 0
    assert not stand_in.FP8GlobalStateManager.is_fp8_enabled()
    assert torch.equal(answer(fused), expected)


@pytest.mark.parametrize("differentiate", [torch.func.jacfwd, torch.func.hessian])
def test_function_transforms_update_no_scales(differentiate: Callable) -> None:
    model = net()
    fused = converted("fp8-delayed", model)
    for _ in range(2):
        step(fused)
    expected, found = (
        differentiate(lambda x, of=of: of.eval()(x).square().sum())(inputs()[:1, :2]) for of in (model, fused)
    )
    assert distance(found, expected) < 0.02


def test_revert_leaves_the_recipe() -> None:
    model = net()
    expected = answer(model)
    reverted = te_transform.revert(converted("fp8-current", model))
    assert type(reverted) is type(model)
    before = STATE.steps
    assert torch.equal(answer(reverted), expected)
    assert STATE.steps == before


@pytest.mark.parametrize(
    ("recipe", "copied"),
    [("fp8-current", copy.deepcopy), ("fp8-delayed", lambda model: pickle.loads(pickle.dumps(model)))],
)
def test_copies_go_on_by_themselves(recipe: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    fused = converted(recipe, model)
    step(fused)
    other = copied(fused)
    _, exact = step(copy.deepcopy(model).float(), seed=1)
    errors = []
    for one in (fused, other):
        found = step(one, seed=1)[1]
        errors.append(max(distance(found[name], grad) for name, grad in exact.items()))
    assert errors[1] <= 1.1 * errors[0]
    for name, parameter in fused.named_parameters():
        own, its = (state_of(p).kernels.values() for p in (parameter, other.get_parameter(name)))
        assert not {*map(id, own)} & {*map(id, its)}


def test_the_users_own_autocast_is_heard(te: ModuleType) -> None:
    model = net()
    fused = converted(None, model)
    plain = answer(fused)
    with te.autocast(te.recipe_of("fp8-current")):
        found = answer(fused)
    assert not torch.equal(found, plain)
    assert distance(found, plain) < 0.2


# The plan


def runs_in_fp8(module: nn.Module) -> bool:
    kernels = [kernel for parameter in module.parameters() for kernel in state_of(parameter).kernels.values()]
    return any(kernel.in_fp8 for kernel in kernels)


def test_a_plan_has_the_last_word_in_copies_too() -> None:
    for recipe, inside in (
        ("fp8-current", True),
        (PrecisionPlan("fp8-current", {"blocks.1.mlp": "no"}), False),
    ):
        fused = converted(recipe, net(blocks=2))
        for one in (fused, copy.deepcopy(fused)):
            answer(one)
            assert runs_in_fp8(one.blocks[0].mlp)
            assert runs_in_fp8(one.blocks[1].mlp) == inside


class Other(Net):
    """Another model with the same blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


def sharing(other: Any, own: Any = "fp8-current") -> tuple[nn.Module, nn.Module]:
    """A model in the recipe `own`, and one in `other` that has its blocks."""
    models = net(), Other().bfloat16()
    models[1].blocks, models[1].head = models[0].blocks, models[0].head
    for model, recipe in zip(models, (own, other), strict=True):
        te_transform.convert(model, inputs(), backend="te", recipe=recipe, verify=False, inplace=True)
    return models


def test_models_that_share_weights_have_a_plan_each() -> None:
    stays = PrecisionPlan("fp8-current", {"blocks.0.o": "as it was"})
    alone, (one, other) = converted(stays), sharing("fp8-current", own=stays)
    for _ in range(2):
        assert not torch.equal(torch.tanh(answer(one)), answer(other))
        assert torch.equal(answer(one), answer(alone))


def test_models_that_share_weights_have_a_recipe_each() -> None:
    """The scales of one are gone after a call of the other; it takes them anew."""
    one, other = sharing("fp8-current", own="fp8-delayed")
    expected, _ = step(net())
    answer(one)
    answer(one)
    for _ in range(3):
        answer(other)
        assert distance(step(one)[0], expected) < 0.01


def test_the_head_stays_out_unless_a_plan_has_it_in() -> None:
    model = net(blocks=2)
    for recipe, inside in (("fp8-current", False), (PrecisionPlan("fp8-current", {"head": None}), True)):
        fused = converted(recipe, copy.deepcopy(model))
        answer(fused)
        assert runs_in_fp8(fused.blocks[-1].mlp)
        assert runs_in_fp8(fused.head) == inside
        assert (te_transform.report(fused).precision.sites["head"] is None) == inside


@pytest.mark.parametrize("path", ["blocks.3.norm", "blocks.0.q", "missing", "last", "table"])
def test_a_plan_names_products_of_deep_models(path: str) -> None:
    model = net()
    model.blocks = nn.ModuleList(Block() for _ in range(9)).to(torch.bfloat16)
    model.last, model.table = nn.LayerNorm(WIDTH), nn.Embedding(16, WIDTH)  # which are no products
    with pytest.raises(
        te_transform.PrecisionError,
        match=f"expected paths of fused products in the precision plan, got {path};",
    ):
        converted(PrecisionPlan("fp8-current", {path: None}), model)


class Tied(Net):
    """Whose head is known by the name of the embedding that it shares its weight with."""

    def __init__(self):
        nn.Module.__init__(self)
        self.table = nn.Embedding(16, WIDTH)
        self.inner, self.head = Net(), nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table(torch.zeros(x.shape[:2], dtype=torch.int64))
        for block in self.inner.blocks:
            x = block(x)
        return self.head(x)


def test_a_tied_head_stays_out_too() -> None:
    fused = converted("fp8-current", Tied().to(torch.bfloat16))
    answer(fused)
    assert runs_in_fp8(fused.inner.blocks[0].mlp)
    assert not runs_in_fp8(fused.head)


# Weights that are kept


def quantized(model: nn.Module, calls: int = 1) -> list[int]:
    """Return how often each of some evaluation calls quantizes weights. A fresh copy must agree."""
    counts = []
    fresh = converted("fp8-current", te_transform.revert(copy.deepcopy(model))).eval()
    expected = run_original(fresh)
    for _ in range(calls):
        before = stand_in.Base.quantized
        assert torch.equal(run_original(model), expected)
        counts.append(stand_in.Base.quantized - before)
    return counts


@torch.no_grad()
def run_original(model: nn.Module) -> Tensor:
    return model(inputs())


@pytest.fixture
def served() -> nn.Module:
    return converted("fp8-current").eval()


def test_float32_weights_under_autocast_are_quantized_once() -> None:
    fused = converted("fp8-current", net().float(), inputs().float()).eval()
    counts = []
    for _ in range(3):
        before = stand_in.Base.quantized
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            fused(inputs().float())
        counts.append(stand_in.Base.quantized - before)
    assert counts == [WEIGHTS, 0, 0]


WEIGHTS = 4  # q and k, o, the MLP's two; the head stays out of the recipe


def stepped(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model.zero_grad()


def stepped_by_one_kernel(model: nn.Module) -> None:
    """Step by a kernel that leaves versions unchanged. No sampled bf16 weight shows the change."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.blocks[0].mlp[0].weight.grad[0, 1] = 1
    torch.optim.AdamW(model.parameters(), lr=1, weight_decay=0, fused=True).step()
    model.zero_grad()


def averaged(model: nn.Module) -> None:
    """Replace weights by .data, as averages of weights and merged adapters do."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.9)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def loaded_anew(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def of_another_dtype_and_back(model: nn.Module) -> None:
    model.half().bfloat16()


def data_of_their_own(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


WRITES = (
    stepped, stepped_by_one_kernel, averaged, loaded, loaded_anew, of_another_dtype_and_back,
    data_of_their_own,
)  # fmt: skip


def test_weights_are_quantized_once_until_they_are_written_to(served: nn.Module) -> None:
    assert quantized(served, 2) == [WEIGHTS, 0]
    for write in WRITES:
        write(served)
        first, _, third = quantized(served, 3)  # joined ones a second time, if they have been laid anew
        assert (first, third) == (WEIGHTS, 0), write.__name__


def test_weights_in_memory_of_before_are_quantized(served: nn.Module) -> None:
    """The second tensor that is assigned to .data has the memory that the first assignment freed."""
    weight = served.blocks[0].o.weight
    memory = bytearray(weight.numel() * weight.element_size())

    def assign(numbers: Tensor) -> int:
        weight.data = torch.frombuffer(memory, dtype=weight.dtype).view_as(weight).copy_(numbers)
        return weight.data_ptr()

    place = assign(weight + 1)
    assert quantized(served, 3)[2] == 0
    assert assign(weight + 1) == place
    assert quantized(served, 3) == [1, 0, 0]


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    model.train()
    yield
    model.eval()


def test_kept_weights_are_forgotten_in_another_mode(served: nn.Module) -> None:
    assert quantized(served) == [WEIGHTS]
    for mode in (training(served), torch.enable_grad()):
        with mode:
            served(inputs())
        assert quantized(served) == [WEIGHTS]
    for switched, mode in itertools.product((served, nn.Sequential(served)), (True, False)):
        served.blocks[0].mlp[0].weight.data.mul_(2)  # which no version counts
        switched.train(mode)
        assert quantized(served.eval()) == [WEIGHTS]


def test_a_sharded_models_weights_are_not_kept(te: ModuleType) -> None:
    """FSDP fills their memory anew, and their versions stay."""
    from torch.distributed.fsdp import FSDPModule

    precision = Precision(te.recipe_of("fp8-current"))
    for kind, expected in ((nn.Linear, True), (type("Linear", (FSDPModule, nn.Linear), {}), False)):
        model = nn.Linear(2, 2).eval()
        model.__class__ = kind
        with precision.running(model), torch.no_grad():
            assert is_evaluating() == expected
