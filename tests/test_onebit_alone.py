"""1-bit optimizers in one process: what they refuse, and what a group of one rank computes."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from te_transform.training import OneBitAdam, OneBitError, OneBitLamb, ZeroOneAdam
from te_transform.training.one_bit import checks, signs


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(f"{tmp_path}/store", 1))
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def step(run: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (run(x) - x.sin()).square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).item()


def test_no_process_group() -> None:
    with pytest.raises(OneBitError, match="expected a process group, got none; call"):
        OneBitAdam(model().parameters())


WRONG = {
    "lr": ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
    "not a number": ({"eps": float("nan")}, "expected eps >= 0, got nan"),
    "betas": ({"betas": (0.9, 1.0)}, r"expected betas in \[0, 1\), got \(0.9, 1.0\)"),
    "one beta": ({"betas": (0.9,)}, r"expected betas in \[0, 1\), got \(0.9,\); pass two such numbers"),
    "no numbers": ({"betas": 0.9}, r"expected betas in \[0, 1\), got 0.9"),
    "no rate": ({"lr": None}, "expected lr >= 0, got None"),
    "a rate in a text": ({"lr": "0.1"}, "expected lr >= 0, got '0.1'"),
    "no steps": ({"freeze_step": 0}, "expected freeze_step to be a number of steps >= 1, got 0"),
    "True": ({"freeze_step": True}, "expected freeze_step to be a number of steps >= 1, got True"),
    "a text": ({"freeze_step": "never"}, "expected freeze_step to be a number of steps >= 1, got 'never'"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRONG)
def test_options_out_of_range(name: str) -> None:
    options, sentence = WRONG[name]
    with pytest.raises(OneBitError, match=sentence):
        OneBitAdam(model().parameters(), **options)


def fsdp2() -> nn.Module:
    return fully_shard(model(), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))


def fsdp1(**options: Any) -> nn.Module:
    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"), **options)


SHARDED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "FSDP2": (fsdp2, "got a DTensor"),
    "FSDP1": (fsdp1, "got one of FullyShardedDataParallel"),
    "FSDP1, original parameters": (
        lambda: fsdp1(use_orig_params=True),
        "got one of FullyShardedDataParallel",
    ),
    "float64": (
        lambda: model().double(),
        "expected parameters in float32, bfloat16 or float16, got torch.float64",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
def test_other_parameters(name: str, kind: type[OneBitAdam]) -> None:
    make, sentence = SHARDED[name]
    with pytest.raises(OneBitError, match=sentence):
        kind(make().parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_in_a_group_twice() -> None:
    own = model()
    with pytest.raises(OneBitError, match="expected each parameter once, got 1 twice in a group"):
        OneBitAdam([*own.parameters(), own[0].weight])


@pytest.mark.usefixtures("group")
def test_models_that_cannot_be_registered() -> None:
    own = model()
    optimizer = OneBitAdam(own.parameters())
    with pytest.raises(OneBitError, match="expected a DistributedDataParallel model, got Sequential"):
        optimizer.register(own)
    with pytest.raises(OneBitError, match="got 4 it does not hold and 4 that are not in the model"):
        optimizer.register(DistributedDataParallel(model()))
    own[0].requires_grad_(False)
    optimizer.register(DistributedDataParallel(own))  # frozen parameters take no part
    with pytest.raises(OneBitError, match="expected all parameters before register"):
        optimizer.add_param_group({"params": model().parameters()})
    own[0].requires_grad_(True)
    with pytest.raises(
        OneBitError, match=r"expected the parameters that trained at register\(\), got 2 more"
    ):
        step(own, optimizer)


@pytest.mark.usefixtures("group")
def test_parameters_and_register_after_the_first_step_raise() -> None:
    own = model()
    own[2].bias.requires_grad_(False)
    optimizer = OneBitAdam(own[0].parameters())
    optimizer.add_param_group({"params": own[2].parameters(), "lr": 0.1})
    step(own, optimizer)
    with pytest.raises(OneBitError, match="expected all parameters before the first step"):
        optimizer.add_param_group({"params": model().parameters()})
    assert len(optimizer.param_groups) == 2
    own[2].bias.requires_grad_(True)
    with pytest.raises(OneBitError, match="expected parameters that train from the first step on"):
        step(own, optimizer)


@pytest.mark.usefixtures("group")
def test_states_of_other_optimizers() -> None:
    own = model()
    other = torch.optim.Adam(own.parameters(), amsgrad=True)
    step(own, other)
    with pytest.raises(OneBitError, match="got one of another optimizer with max_exp_avg_sq"):
        OneBitAdam(own.parameters()).load_state_dict(other.state_dict())


def with_group(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return a state with other options of the parameter group."""
    return state | {"param_groups": [state["param_groups"][0] | options]}


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "expected a state of OneBitAdam with state and param_groups, got none": lambda state: {},
    "expected a state of OneBitAdam with state and param_groups, got NoneType": lambda state: None,
    r"expected exp_avg of shape \(7, 5\) for a parameter of shape \(7, 5\), got \(1, 5\)": lambda state: (
        changed(state, exp_avg=torch.ones(1, 5))
    ),
    r"expected errors of shape \(2, 36\) for a parameter of shape \(7, 5\), got \(2, 5\)": lambda state: (
        changed(state, errors=torch.ones(2, 5))
    ),
    r"a state of every trained parameter after the freeze, got none for shape \(5, 7\)": lambda state: (
        state | {"state": {index: state["state"][index] for index in (0, 1, 3)}}
    ),
}


STATES |= {
    message: partial(with_group, **{name: value})
    for message, name, value in (
        ("expected lr >= 0, got -1.0", "lr", -1.0),
        (r"expected betas in \[0, 1\), got None", "betas", None),
        ("expected steps of 0 or more, got 'many'", "steps", "many"),
    )
}


def changed(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a state with other values for the first parameter."""
    return state | {"state": state["state"] | {0: state["state"][0] | values}}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("message", STATES)
def test_a_state_of_other_parameters_changes_nothing(message: str) -> None:
    own = model()
    optimizer = OneBitAdam(own.parameters(), freeze_step=1)
    step(own, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OneBitError, match=message):
        optimizer.load_state_dict(STATES[message](copy.deepcopy(before)))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = OneBitAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OneBitError, match="expected dense gradients, got a sparse one"):
        optimizer.step()


@pytest.mark.usefixtures("group")
def test_one_rank_compresses_nothing() -> None:
    """After the freeze, the optimizer is Adam with the variance and the bias correction of the freeze."""
    own, by_hand = model(), model()
    optimizer, adam = OneBitAdam(own.parameters(), freeze_step=3), torch.optim.Adam(by_hand.parameters())
    for seed in range(3):
        assert step(own, optimizer, seed) == step(by_hand, adam, seed)
    states = [adam.state[p] for p in by_hand.parameters()]
    momenta = [state["exp_avg"] / (1 - 0.9**3) for state in states]
    sizes = [(state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8 for state in states]
    for seed in range(3, 9):
        step(own, optimizer, seed)
        adam.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        (by_hand(x) - x.sin()).square().mean().backward()
        for parameter, momentum, size in zip(by_hand.parameters(), momenta, sizes, strict=True):
            momentum.lerp_(parameter.grad, 0.1)
            parameter.data -= 1e-3 * momentum / size
    for ours, theirs in zip(own.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("group")
def test_auto_freezes_once_the_variance_is_steady() -> None:
    own = model()
    optimizer = OneBitAdam(own.parameters(), lr=0.0, betas=(0.9, 0.9))  # gradients of one size
    taken = next(taken for taken in range(1, 99) if step(own, optimizer) and optimizer.frozen)
    assert taken == 11  # norms of ten steps apart


@pytest.mark.usefixtures("group")
def test_a_checkpoint_before_the_first_step_freezes_nothing() -> None:
    """get_optimizer_state_dict() makes the state by a step with gradients of zero."""
    own = model()
    before = [parameter.detach().clone() for parameter in own.parameters()]
    optimizer = OneBitAdam(own.parameters(), freeze_step=1)
    get_optimizer_state_dict(own, optimizer)
    assert all(map(torch.equal, before, own.parameters()))
    assert not optimizer.frozen
    step(own, optimizer)
    assert optimizer.frozen
    assert not any(map(torch.equal, before, own.parameters()))


@pytest.mark.usefixtures("group")
def test_auto_waits_for_the_warm_up_of_the_learning_rate() -> None:
    own = model()
    optimizer = OneBitAdam(own.parameters(), lr=1e-12, betas=(0.9, 0.9))  # gradients of one size
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda taken: min(taken + 1, 15))
    frozen_at = []
    for taken in range(1, 30):
        step(own, optimizer)
        schedule.step()
        frozen_at += [taken] * optimizer.frozen
    assert frozen_at[0] == 15 + 10  # the rate rises until step 15


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_warms_up_as_the_paper_writes_it(weight_decay: float) -> None:
    own, by_hand = model(), model()
    own[0].bias.data.zero_(), by_hand[0].bias.data.zero_()  # a norm of zero, at first
    optimizer = OneBitLamb(own.parameters(), lr=0.01, weight_decay=weight_decay, freeze_step=9)
    momenta, variances = ([torch.zeros_like(p) for p in by_hand.parameters()] for _ in range(2))
    for taken in range(1, 6):
        step(own, optimizer, taken)
        by_hand.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(taken))
        (by_hand(x) - x.sin()).square().mean().backward()
        for parameter, momentum, variance in zip(by_hand.parameters(), momenta, variances, strict=True):
            momentum.lerp_(parameter.grad, 0.1)
            variance.lerp_(parameter.grad.square(), 0.001)
            update = momentum / (1 - 0.9**taken) / ((variance / (1 - 0.999**taken)).sqrt() + 1e-8)
            update += weight_decay * parameter.data
            size = parameter.data.norm()
            ratio = (size / update.norm()).clamp(0.01, 10) if size > 0 else 1.0
            parameter.data -= 0.01 * ratio * update
    for ours, theirs in zip(own.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def gradients(by_hand: nn.Module, seed: int) -> list[torch.Tensor]:
    """The gradients of step(own, optimizer, seed)."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    return list(torch.autograd.grad((by_hand(x) - x.sin()).square().mean(), [*by_hand.parameters()]))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_lamb_after_the_freeze_as_the_paper_writes_it(weight_decay: float) -> None:
    """The factor follows the variance of the gradients that the momentum implies, arXiv 2104.06069."""
    settings = {"lr": 0.01, "weight_decay": weight_decay}
    own, by_hand = model(), model()
    optimizer = OneBitLamb(own.parameters(), freeze_step=3, **settings)
    warm = OneBitLamb(by_hand.parameters(), freeze_step=99, **settings)
    for seed in range(3):
        step(own, optimizer, seed)
        step(by_hand, warm, seed)
    states = [warm.state[p] for p in by_hand.parameters()]
    coefficients = [state["coefficient"] / (1 - 0.9**3) for state in states]
    sizes = [(state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8 for state in states]
    updates = [state["exp_avg"] / (1 - 0.9**3) / size for state, size in zip(states, sizes, strict=True)]
    weights = [*by_hand.parameters()]
    fresh, factors = [(size - 1e-8).square() for size in sizes], [1.0] * len(sizes)
    for seed in range(3, 12):
        step(own, optimizer, seed)
        for i, gradient in enumerate(gradients(by_hand, seed)):
            updates[i] = updates[i].lerp(gradient / sizes[i], 0.1)
            fresh[i] = fresh[i].lerp(gradient.square(), 0.001)
            update = updates[i] + weight_decay * weights[i].data
            factor = (sizes[i] / (fresh[i].sqrt() + 1e-8)).max().item()
            share = min(1.0, (updates[i].norm() / update.norm()).item())
            factor = min(max(factor * share + 1 - share, 0.5), 4.0)
            factors[i] = min(max(factor, 0.9 * factors[i]), 1.1 * factors[i])
            weights[i].data -= 0.01 * coefficients[i] * factors[i] * update
    for ours, theirs in zip(own.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("group")
def test_zero_one_adam_updates_its_variance_at_intervals() -> None:
    """The interval doubles after two updates of the variance, arXiv 2202.06009."""
    own, by_hand = model(), model()
    optimizer = ZeroOneAdam(own.parameters(), lr=0.01, var_freeze_step=12, var_update_scaler=2)
    momenta, variances = ([torch.zeros_like(p) for p in by_hand.parameters()] for _ in range(2))
    updates, weights = 0, [*by_hand.parameters()]
    for taken in range(1, 17):
        step(own, optimizer, taken)
        is_update = taken in (1, 2, 4, 6, 8, 12)
        updates += is_update
        for i, gradient in enumerate(gradients(by_hand, taken)):
            momenta[i] = momenta[i].lerp(gradient, 0.1)
            if is_update:
                variances[i] = variances[i].lerp(gradient.square(), 0.001)
            size = (variances[i] / (1 - 0.999**updates)).sqrt() + 1e-8
            update = momenta[i] / (1 - 0.9**taken) if taken <= 12 else momenta[i]
            momenta[i] = update if taken == 12 else momenta[i]  # the freeze corrects the bias once
            weights[i].data -= 0.01 * update / size
    for ours, theirs in zip(own.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("group")
def test_accelerators_move_a_state_before_the_first_step() -> None:
    own = model()
    for optimizer in (OneBitLamb(own.parameters()), ZeroOneAdam(own.parameters(), var_freeze_step=2)):
        optimizer.load_state_dict(optimizer.state_dict())
        losses = [step(own, optimizer) for _ in range(9)]
        assert losses[-1] < losses[0]


def test_bits_are_in_the_order_of_numbers() -> None:
    values, bits = torch.tensor([[1.0, -1, 0, -0.0, -2, 3, -1, -1]]), torch.zeros(1, 1, dtype=torch.uint8)
    signs.pack_(values, torch.tensor(1.0), bits)
    assert bits.item() == 0b101101
    assert values.tolist() == [[0, 0, -1, -1, -1, 2, 0, 0]]


@pytest.mark.usefixtures("group")
def test_the_group_that_is_given() -> None:
    given = dist.new_group()
    assert checks.process_group(given) is given
    with pytest.raises(OneBitError, match="expected a process group that contains this rank, got -100; make"):
        checks.process_group(dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.usefixtures("group")
def test_parameters_that_are_all_frozen_at_first() -> None:
    own = model().requires_grad_(False)
    optimizer = OneBitAdam(own.parameters())
    optimizer.step()
    own.requires_grad_(True)
    with pytest.raises(OneBitError, match="expected parameters that train from the first step on"):
        step(own, optimizer)


@pytest.mark.usefixtures("group")
def test_a_copy_has_no_process_group() -> None:
    optimizer = OneBitAdam(model().parameters())
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            OneBitError, match="expected a OneBitAdam to stay in its process, got a deepcopy or"
        ):
            duplicate(optimizer)
