"""Conversion under other default dtypes and a default device of meta: same numbers, bit by bit."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import te_transform
from te_transform.command_line.explain import explanation
from te_transform.passes import rotary
from tests import ranks, stand_in
from tests.attacks import named
from tests.zoo import seeded

DEFAULTS = ((torch.float64, None), (torch.bfloat16, "meta"))


class Delayed(stand_in.DelayedScaling):
    """The recipe of the stand-in, with the question that verify() asks."""

    def delayed(self) -> bool:
        return True


@contextlib.contextmanager
def under(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    """Set a default dtype and a default device, and restore them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        # a checkpoint that repeats a forward enters the context again, which then restores itself
        if (context := torch._GLOBAL_DEVICE_CONTEXT.device_context) is not None:
            context.prev_mode = None
        torch.set_default_device(None)


def steps(model: nn.Module, batches: list[Tensor]) -> list[Any]:
    """Return the losses of a few steps, and the gradients of the last one."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
    grads = [parameter.grad for parameter in model.parameters()]
    return [*found, *(grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads)]


def converted(model: nn.Module, batches: list[Tensor]) -> tuple[str, list[Any]]:
    """Convert and train a model in FP8, load its scales into another one, and verify that."""
    options = {"backend": "te", "recipe": Delayed()}
    torch.manual_seed(0)
    first = te_transform.convert(model, batches[0], **options)
    losses, state = steps(first, batches), te_transform.scaling_state(first)
    second = te_transform.convert(model, batches[0], **options, verify=False)
    te_transform.load_scaling_state(second, state)
    return str(te_transform.verify(model, second, batches[0])), [losses, state, steps(second, batches)]


@pytest.mark.integration  # test_ranks_in_fp8 converts under the same defaults
@pytest.mark.usefixtures("as_given", "few_draws", "te")
def test_a_conversion_in_fp8() -> None:
    model, batches = ranks.net(1), [ranks.inputs(step) for step in range(2)]
    same_under_all(partial(converted, model, batches))


def same_under_all(work: Callable[[], tuple[str, list[Any]]]) -> None:
    said, numbers = work()
    for default in DEFAULTS:
        with named(str(default)), under(*default):
            now_said, now = work()
            assert now_said == said
            torch.testing.assert_close(now, numbers, rtol=0, atol=0)


class Words(nn.Module):
    """Attention under a mask, behind an embedding; every tensor names its dtype and device."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (t.view(*ids.shape, 2, 16).transpose(1, 2) for t in self.qkv(self.table(ids)).chunk(3, -1))
        places = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
        hidden = (places > places[:, None]) | (places < places[:, None] - 2)
        scores = (q @ k.mT / 4).masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def planned(model: nn.Module) -> tuple[str, list[Any]]:
    """Generate inputs for a model, plan it and convert it."""
    plan = te_transform.inspect(model, backend="te")
    torch.manual_seed(0)
    made = te_transform.convert(model)
    ids = torch.arange(12, dtype=torch.int64, device="cpu").view(2, 6)
    return f"{plan}{te_transform.report(made)}", [made(ids)]


def test_inputs_that_are_generated() -> None:
    same_under_all(partial(planned, seeded(Words)))


def test_an_example_that_makes_tensors_on_the_default_device() -> None:
    for default in DEFAULTS:
        with named(str(default)), under(*default):
            assert "after" in "\n".join(explanation(rotary.RULE))


def on_ranks() -> list[list[Any]]:
    """Return the numbers under each default of a model in DistributedDataParallel, and of a divided one."""
    ranks.install_stand_in()
    model, batches = ranks.net(1), [ranks.inputs(step, torch.distributed.get_rank()) for step in range(3)]
    build = partial(te_transform.convert, backend="te", recipe="fp8-delayed", verify=False)
    found = []
    for default in ((torch.float32, None), *DEFAULTS):
        whole = ranks.ddp(build(model, batches[0]))  # PyTorch's wrapper does not start under meta
        with under(*default):
            divided = te_transform.parallelize(build(model, batches[0]), ranks.mesh(), batches[0])
            losses = [steps(each, batches) for each in (whole, divided)]
            found.append([losses, *map(te_transform.scaling_state, (whole.module, divided))])
    return found


@pytest.mark.xdist_group("distributed")
def test_ranks_in_fp8(tmp_path: Path) -> None:
    for expected, *others in ranks.spawn(on_ranks, 2, tmp_path):
        for default, found in zip(DEFAULTS, others, strict=True):
            with named(str(default)):
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
