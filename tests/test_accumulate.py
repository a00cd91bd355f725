"""accumulate() hands the sums of kernels over as gradients, and lists what takes no part in that."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends.fp8.registry import state_of
from te_transform.execution.attach import runner_of
from tests import stand_in

pytestmark = pytest.mark.usefixtures("at_any_size")

WIDTH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.stored = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)  # [in, out], as GPT-2 has it

    def forward(self, x: Tensor) -> Tensor:
        """Two linears that read a norm, and one whose weight is stored transposed."""
        y = self.norm(x)
        return x + torch.cat([self.q(y), self.k(y)], -1) @ self.stored


X = [torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]
TAKING_PART = {"q.weight", "k.weight", "stored"}


@pytest.fixture
def model(te: object) -> nn.Module:
    torch.manual_seed(0)
    return te_transform.convert(Net().bfloat16(), X[0], backend="te", verify=False).train()


def train(model: Callable[[Tensor], Tensor], batches: list[Tensor]) -> None:
    for x in batches:
        model(x).float().square().sum().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected(model: nn.Module) -> dict[str, Tensor]:
    """In fp32, by the original."""
    wide = Net()
    wide.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    train(wide, [x.float() for x in X])
    return gradients(wide)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all((one[n].float() - other[n]).norm() < 2e-2 * other[n].norm() for n in one)


def test_sums_are_handed_over(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X)
        assert all(model.get_parameter(name).grad is None for name in TAKING_PART)
        assert model.norm.weight.grad is not None
    assert close(gradients(model), expected(model))
    assert accumulation.taken == 3
    assert set(accumulation.fused) == TAKING_PART
    assert (
        accumulation.left_out["norm.weight"] == "it is not a matrix, so its gradient is not a matrix product"
    )
    assert not any("main_grad" in vars(parameter) for parameter in model.parameters())
    assert all(state_of(parameter).gradients is None for parameter in model.parameters())


def test_a_forward_that_a_checkpoint_repeats_is_no_step(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(partial(checkpoint, model, use_reentrant=False), X)
    assert close(gradients(model), expected(model))
    assert accumulation.taken == 3


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.stored = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.stored) @ self.stored.t()


def test_a_square_weight_that_is_read_both_ways_has_a_sum_for_each(te: object) -> None:
    torch.manual_seed(0)
    model = BothWays().bfloat16()
    wide = BothWays()
    wide.load_state_dict(model.state_dict())
    model = te_transform.convert(model, X[0], backend="te", verify=False).train()
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X)
    train(wide, [x.float() for x in X])
    assert accumulation.fused == ("stored",)
    assert close(gradients(model), gradients(wide))


def test_sums_are_kept_in_the_dtype_that_was_asked_for(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=1, dtype=torch.bfloat16) as accumulation:
        train(model, X[:1])
        buffers = list(accumulation.gradients.by_parameter().values())
    assert buffers
    assert {buffer.dtype for buffer in buffers} == {torch.bfloat16}


def test_gradients_from_before_are_added_to(model: nn.Module) -> None:
    train(model, X[:1])
    with te_transform.accumulate(model, steps=2):
        train(model, X[1:])
    assert close(gradients(model), expected(model))


def test_a_projection_that_the_loss_does_not_go_through_has_no_gradient(te: object) -> None:
    """Not one of zeros, with which an optimizer would take a step."""

    class Half(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            """Both projections, of which the loss reads one."""
            y = self.norm(x)
            return self.q(y), self.k(y)

    model = te_transform.convert(Half().bfloat16(), X[0], backend="te", verify=False).train()
    with te_transform.accumulate(model, steps=1) as accumulation:
        model(X[0])[0].float().square().sum().backward()
    assert accumulation.fused == ("q.weight",)
    assert model.q.weight.grad is not None
    assert model.k.weight.grad is None


def test_entering_captures_nothing_anew(model: nn.Module) -> None:
    train(model, X[:1])
    before = captures(model)
    with te_transform.accumulate(model, steps=1):
        train(model, X[:1])
    train(model, X[:1])
    assert captures(model) == before


def captures(model: nn.Module) -> int:
    return len(runner_of(model).graphs)


def test_frozen_parts_take_no_part(model: nn.Module) -> None:
    model.k.weight.requires_grad_(False)
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X)
    assert model.k.weight.grad is None
    assert accumulation.left_out["k.weight"] == "it is frozen"
    assert "q.weight" not in accumulation.left_out  # which no product joins with a frozen one
    wanted = expected(model)
    del wanted["k.weight"]
    assert close(gradients(model), wanted)


def test_weights_are_quantized_once_in_an_accumulation(te: object, model: nn.Module) -> None:
    recipe = te.recipe_of("fp8-current")
    with te_transform.accumulate(model, steps=3):
        before = stand_in.Base.quantized
        for x in X:
            with te.autocast(recipe):
                out = model(x)
            out.float().square().sum().backward()
        assert stand_in.Base.quantized - before == 2
    kernels = [kernel for p in model.parameters() for kernel in state_of(p).kernels.values()]
    assert not any(kernel.built._fp8_workspaces for kernel in kernels if kernel.built is not None)


def test_weights_that_change_in_an_accumulation_are_quantized_anew(te: object, model: nn.Module) -> None:
    recipe = te.recipe_of("fp8-current")
    with te_transform.accumulate(model, steps=2), torch.no_grad(), te.autocast(recipe):
        model(X[0])
        for parameter in model.parameters():
            parameter.mul_(2)
        found = model(X[0])
    with torch.no_grad(), te.autocast(recipe):
        assert torch.equal(found, model(X[0]))


def test_a_body_that_raises_sets_no_gradients(model: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError), te_transform.accumulate(model, steps=3):
        _train_and_fail(model)
    assert all(model.get_parameter(name).grad is None for name in TAKING_PART)
    assert all(state_of(parameter).gradients is None for parameter in model.parameters())
    assert not model._forward_pre_hooks
    model.zero_grad()
    train(model, X)  # as if nothing had been
    assert close(gradients(model), expected(model))


def _train_and_fail(model: nn.Module) -> None:
    train(model, X[:1])
    raise ZeroDivisionError


def test_mistakes_are_named(model: nn.Module) -> None:
    for steps in (0, -1, 2.5, None, True):
        with pytest.raises(
            te_transform.AccumulationError, match=r"expected 1 or more forward passes for steps"
        ):
            te_transform.accumulate(model, steps=steps).__enter__()
    for dtype in ("bfloat16", torch.int32):
        with pytest.raises(
            te_transform.AccumulationError,
            match=r"expected a floating-point dtype to accumulate gradients, got",
        ):
            te_transform.accumulate(model, steps=1, dtype=dtype).__enter__()
    with te_transform.accumulate(model, steps=1):
        train(model, X[:1])
        with pytest.raises(te_transform.AccumulationError, match=r"in accumulate\(steps=1\), got 2;"):
            model(X[1])
        with pytest.raises(
            te_transform.AccumulationError, match=r"one accumulate\(\) of this model at a time"
        ):
            te_transform.accumulate(model, steps=1).__enter__()
        with torch.no_grad():
            model(X[1])  # no step of training
    model.q.weight.main_grad = torch.zeros(1)
    with pytest.raises(te_transform.AccumulationError, match=r"without main_grad, got one on q.weight"):
        te_transform.accumulate(model, steps=1).__enter__()


def test_a_backward_after_the_context_is_an_error(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=1):
        loss = model(X[0]).float().sum()
    with pytest.raises(RuntimeError, match=r"expected backward\(\) within accumulate\(\), got one after it"):
        loss.backward()


def test_gradients_that_a_backward_returns_are_an_error(model: nn.Module) -> None:
    x = X[0].clone().requires_grad_()
    with te_transform.accumulate(model, steps=4) as accumulation:
        for inputs in ([x], [model.q.weight], [*model.parameters()]):
            with pytest.raises(RuntimeError, match=r"within accumulate\(\), got torch.autograd.grad\(\) or"):
                torch.autograd.grad(model(x).float().sum(), inputs)
        with pytest.raises(RuntimeError, match=r"or backward\(inputs=...\), for which kernels"):
            model(x).float().sum().backward(inputs=[model.q.weight, model.norm.weight])
        assert not any(each.buffer.any() for each in accumulation.gradients.sums.values())


def test_a_copy_that_is_made_within_counts_no_step(model: nn.Module) -> None:
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, X[:1])
        twin = copy.deepcopy(model)
        train(model, X[1:])
    twin.zero_grad()
    train(twin, X)
    assert accumulation.taken == 3
    assert close(gradients(twin), expected(model))


def test_ddp_is_refused(model: nn.Module, process_group: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(te_transform.AccumulationError, match="DistributedDataParallel"):
        te_transform.accumulate(wrapped, steps=1).__enter__()
    with te_transform.accumulate(model, steps=1) as accumulation:
        with pytest.raises(te_transform.AccumulationError, match="DistributedDataParallel"):
            wrapped(X[0])
        train(model, X[:1])  # DDP's hooks reduce nothing
    assert set(accumulation.fused) == TAKING_PART


def test_accumulate_changes_nothing_in_plain_pytorch() -> None:
    model = te_transform.convert(Net(), X[0].float(), verify=False).train()
    train(model, [x.float() for x in X])
    wanted = gradients(model)
    model.zero_grad()
    with te_transform.accumulate(model, steps=3) as accumulation:
        train(model, [x.float() for x in X])
    assert not accumulation.fused
    assert accumulation.left_out["q.weight"] == "it is not on the GPU"
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(model).items())
