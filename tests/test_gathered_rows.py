"""FSDP2 gathers q, k and v into adjacent memory, so that no call joins them by a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import te_transform
from te_transform.backends import joined
from te_transform.backends.ranks import fsdp_groups
from te_transform.execution import model_ref
from tests import compilers, ranks
from tests.ranks import WIDTH

pytestmark = pytest.mark.xdist_group("distributed")  # `found` once a process
STEPS = 4


def x(step: int, model: nn.Module | None = None) -> Tensor:
    return ranks.inputs(step).to(torch.float64 if model is None else next(model.parameters()).dtype)


Make = Callable[[], nn.Module]
Change = Callable[[nn.Module], nn.Module]
Step = Callable[[nn.Module, int], list[Tensor]]
Trained = tuple[list[Tensor], list[int]]


def once(model: nn.Module, step: int) -> list[Tensor]:
    loss = model(x(step, model))
    loss.backward()
    return [loss.detach()]


def two_forwards(model: nn.Module, step: int) -> list[Tensor]:
    losses = [model(x(step)), model(x(step + 1))]
    sum(losses).backward()
    return [loss.detach() for loss in losses]


def backward_in_the_next_step(model: nn.Module, step: int) -> list[Tensor]:
    """The parameters may move while a graph waits for its backward."""
    loss = model(x(step))
    waiting, model.waiting = getattr(model, "waiting", None), loss
    if waiting is not None:
        waiting.backward()
    return [loss.detach()]


def evaluated_between(model: nn.Module, step: int) -> list[Tensor]:
    found = once(model, step)
    with torch.inference_mode():
        found.append(model.eval()(x(step)).clone())
    with torch.no_grad():
        return [*found, model.train()(x(step))]


def evaluated_first(model: nn.Module, step: int) -> list[Tensor]:
    """Memory of inference mode stays as it is."""
    with torch.inference_mode():
        return [model(x(step)).clone()]


def unsharded_before(model: nn.Module, step: int) -> list[Tensor]:
    handles = [block.unshard(async_op=bool(step % 2)) for block in model.blocks]
    assert len(handles) == 2
    return once(model, step)


def kept_in_odd_steps(model: nn.Module, step: int) -> list[Tensor]:
    model.set_reshard_after_forward(step % 2 == 0)
    return once(model, step)


def written_between(model: nn.Module, step: int) -> list[Tensor]:
    with torch.no_grad():
        model.blocks[0].k.weight.mul_(2)
    return once(model, step)


def written_in_the_call(model: nn.Module, step: int) -> list[Tensor]:
    """The backward reads what FSDP2 gathers again, without the write, except after the first call's copy."""

    def write(block: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            block.k.weight.mul_(2 if step else 1)

    with model.blocks[1].register_forward_pre_hook(write):
        return once(model, step)


def saved_between(model: nn.Module, step: int) -> list[Tensor]:
    found = once(model, step)
    state = model.state_dict()
    model.load_state_dict({name: tensor * 1.5 for name, tensor in state.items()})
    return found


def kept(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    return fully_shard(model)


def blocks_alone(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return model


def kept_on_two(model: nn.Module) -> nn.Module:
    """Between forward and backward, two ranks have the parameters."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    return fully_shard(model)


class Odd(nn.Module):
    """Linears whose rows FSDP2 cannot divide among two ranks, so it pads them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 7, bias=False), nn.Linear(WIDTH, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x).relu(), self.k(x)], -1)


def net() -> nn.Module:
    return ranks.net().double()


def odd() -> nn.Module:
    model = net()
    model.blocks, model.head = nn.ModuleList([Odd()]), nn.Linear(12, 16)
    return model.double()


def train(model: nn.Module, step: Step) -> Trained:
    """Return the losses, and how often each step joined parameters by a copy."""
    optimizer, losses, copies = torch.optim.AdamW(model.parameters(), lr=1e-3), [], []
    with pytest.MonkeyPatch.context() as patch:
        made, join = [], joined.ops.join
        patch.setattr(joined.ops, "join", lambda *parts: made.append(parts) or join(*parts))
        for number in range(STEPS):
            made.clear()
            losses += step(model, number)
            copies.append(len(made))
            optimizer.step()
            optimizer.zero_grad()
    return losses, copies


# of each: what is sharded, how, and what a step is
CASES: dict[str, tuple[Make, Change, Step]] = {
    **{
        step.__name__: (net, ranks.sharded, step)
        for step in (once, two_forwards, backward_in_the_next_step, evaluated_between, unsharded_before)
    },
    **{
        step.__name__: (net, ranks.sharded, step)
        for step in (kept_in_odd_steps, written_between, written_in_the_call, saved_between)
    },
    **{wrap.__name__: (net, wrap, two_forwards) for wrap in (kept, blocks_alone, ranks.sharded_whole)},
}
COPIED = {"evaluated_first": (net, ranks.sharded, evaluated_first), "odd": (odd, ranks.sharded, once)}
ON_MORE = {"hybrid": (net, ranks.hybrid, two_forwards), "kept_on_two": (net, kept_on_two, two_forwards)}


def trained(names: Iterable[str]) -> dict[str, list[Trained]]:
    """Train the original and the converted model."""
    ranks.install_stand_in()
    found = {}
    for name in names:
        make, wrap, step = {**CASES, **COPIED, **ON_MORE}[name]
        converted = te_transform.convert(make(), x(0), verify=False)
        found[name] = [train(wrap(model), step) for model in (make(), converted)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Trained]]]:
    return ranks.spawn(trained, 2, tmp_path_factory.mktemp("ranks"), [*CASES, *COPIED])


def check(found: list[dict[str, list[Trained]]], name: str, is_copied: bool) -> None:
    for rank in found:
        (losses, _), (actual, copies) = rank[name]
        torch.testing.assert_close(actual, losses)
        assert copies[0] > 0
        assert bool(copies[-1]) == is_copied


@pytest.mark.parametrize("name", CASES)
def test_no_call_copies(name: str, found: list[dict[str, list[Trained]]]) -> None:
    check(found, name, is_copied=False)


@pytest.mark.parametrize("name", COPIED)
def test_calls_copy(name: str, found: list[dict[str, list[Trained]]]) -> None:
    check(found, name, is_copied=True)


@pytest.mark.integration
@pytest.mark.parametrize("number", [4, 8])
def test_more_ranks(number: int, tmp_path: Path) -> None:
    found = ranks.spawn(trained, number, tmp_path, ON_MORE)
    check(found, "hybrid", is_copied=False)
    check(found, "kept_on_two", is_copied=True)


def both_ways_in_fp8() -> list[list[Trained]]:
    """Train with parameters that are joined by copies, and gathered together; uncompiled, then compiled."""
    ranks.install_stand_in()
    compilers.install()
    found = []
    for compile in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_ref, "make_gathered_adjacent", lambda model, groups: [])
            copied = train(ranks.sharded(ranks.in_fp8(compile=compile)), once)
        found.append([copied, train(ranks.sharded(ranks.in_fp8(compile=compile)), once)])
    return found


def test_no_call_in_fp8_copies(tmp_path: Path) -> None:
    for rank in ranks.spawn(both_ways_in_fp8, 2, tmp_path):
        for (losses, copies), (actual, its_copies) in rank:
            torch.testing.assert_close(actual, losses, rtol=0, atol=0)
            assert copies[-1] > its_copies[-1] == 0


def memory_of_rows() -> list[list[int]]:
    """Return the bytes for q and k of each block: in the second block's call, after a forward, and a step."""
    ranks.install_stand_in()
    model = ranks.sharded(te_transform.convert(net(), x(0), verify=False))
    train(model, once)
    groups = [group for block in model.blocks for group in fsdp_groups(block)]
    members = [
        {member._param_fqn.split(".", 2)[-1]: member for member in group.fsdp_params} for group in groups
    ]
    found = []

    def note(*_: Any) -> None:
        storages = [
            [named[f"{name}.weight"]._unsharded_param.untyped_storage() for name in "qk"] for named in members
        ]
        assert all(one._cdata == other._cdata for one, other in storages)
        found.append([one.size() for one, _ in storages])

    model.blocks[1].register_forward_pre_hook(note)
    loss = model(x(0))
    note()
    loss.backward()
    note()
    return found


def test_the_memory_is_freed_after_forward_and_backward(tmp_path: Path) -> None:
    whole = 2 * 48 * WIDTH * torch.float64.itemsize
    for rank in ranks.spawn(memory_of_rows, 2, tmp_path):
        assert rank == [[0, whole], [0, 0], [0, 0]]
