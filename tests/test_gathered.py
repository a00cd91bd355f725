"""FSDP2 gathers parameters for a backward only if the backward reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends.ranks import fsdp_groups
from te_transform.execution import gathered
from te_transform.execution.attach import original_forward
from tests import ranks

pytestmark = pytest.mark.usefixtures("at_any_size", "te", "process_group", "compilations")

Forward = Callable[[nn.Module, Tensor], Tensor]


def train(model: nn.Module, forwards: Sequence[Forward]) -> tuple[list[list[Tensor]], list[list[bool]]]:
    """Return the loss and the gradients of each step, and are_left_out() before its backward."""
    found, left_out = [], []
    for step, forward in enumerate(forwards):
        loss = forward(model, ranks.inputs(step))
        left_out.append(are_left_out(model))
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())])
        model.zero_grad()
        assert not any(are_left_out(model))
        del loss  # with its graph
    return found, left_out


def compared(patch: pytest.MonkeyPatch, *forwards: Forward, **options: object) -> list[list[bool]]:
    """Train with and without all-gathers for each backward, and compare. Return what is left out."""
    with patch.context() as always:
        always.setattr(gathered, "_may_skip", lambda call: False)
        wanted, none = train(sharded(**options), forwards)
    found, left_out = train(sharded(**options), forwards)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not any(map(any, none))
    return left_out


def sharded(**options: object) -> nn.Module:
    return ranks.sharded(ranks.in_fp8(**{"compile": True, **options}))


def are_left_out(model: nn.Module) -> list[bool]:
    return [not group.unshard_in_backward for block in model.blocks for group in fsdp_groups(block)]


once: Forward = nn.Module.__call__
FIRST = (once, once, once)  # show which products run in FP8, and give scales
BOTH, NONE = [True, True], [False, False]


@pytest.mark.parametrize("options", [{"compile": False}, {"recipe": None}], ids=["uncompiled", "bf16"])
def test_others_are_gathered_twice(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, *FIRST, once, **options)[-1] == NONE


def twice(first: Forward, second: Forward) -> Forward:
    return lambda model, x: first(model, x) + second(model, x)


def unfused(model: nn.Module, x: Tensor) -> Tensor:
    """Run the user's own code, whose backward reads the parameters."""
    with original_forward(model):
        return model(x)


def offloaded(model: nn.Module, x: Tensor) -> Tensor:
    """Run with hooks on saved tensors, as checkpoints do, which may repeat the forward in the backward."""
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def test_calls_that_read_parameters_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = {
        twice(once, once): BOTH,
        twice(once, unfused): NONE,
        twice(unfused, once): NONE,
        unfused: NONE,
        offloaded: NONE,
        once: BOTH,
    }
    assert compared(monkeypatch, *FIRST, *forwards)[3:] == [*forwards.values()]


@pytest.fixture
def model() -> nn.Module:
    """Return a model of which all calls are compiled from now on."""
    found = sharded()
    train(found, FIRST)
    return found


def test_a_loss_that_is_dropped_ends_its_call(model: nn.Module) -> None:
    loss = model(ranks.inputs(3))
    assert are_left_out(model) == BOTH
    assert gathered.SKIPPED in te_transform.report(model).notes
    del loss
    assert are_left_out(model) == NONE


def test_the_users_own_setting_stays() -> None:
    other = sharded()
    other.blocks[0].set_unshard_in_backward(False)
    for step in range(4):
        other(ranks.inputs(step))
        assert are_left_out(other)[0]


def test_revert_restores_the_setting(model: nn.Module) -> None:
    loss = model(ranks.inputs(3))
    assert are_left_out(model) == BOTH
    te_transform.revert(model)
    assert are_left_out(model) == NONE
    loss.backward()
