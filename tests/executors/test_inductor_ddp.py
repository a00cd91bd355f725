"""The executor of inductor under DDP: gradients are reduced while the backward goes on.

Two processes over gloo; tests/compilers.py traces graphs in the place of inductor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import te_transform
from tests import compilers, ranks
from tests.compilers import Compiler

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("distributed")]
BUCKET = 1e-3  # MiB: the head has as many gradients, and each product in a block
BEGIN = "a backward begins"
RECIPES = (None, "fp8-delayed")
ATTENTION, MLP = ("norm", "q", "k", "o"), ("norm2", "mlp.0", "mlp.2")  # what a block calls

Events = list[str]


def reduced(events: Events, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own reduction, noted."""
    events.append("reduced")
    return allreduce_hook(None, bucket)


class Trained:
    """A model that is compiled under DDP, and what happens in its steps."""

    def __init__(self, bucket: float | None = BUCKET, **options: Any):
        ranks.install_stand_in()
        self.events: Events = []
        self.compiler = compilers.install(Compiler(lambda: self.events.append(BEGIN)))
        self.model = ranks.in_fp8(**{"compile": True, **options})
        self.ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, **({} if bucket is None else {"bucket_cap_mb": bucket})
        )
        self.ddp.register_comm_hook(self.events, reduced)
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _note(self, name: str, _: Tensor) -> None:
        self.events.append(name)

    def step(self, number: int, run: nn.Module | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the gradients; `events` are then the events of the backward."""
        loss = (run or self.ddp)(ranks.inputs(number, dist.get_rank()))
        self.events.clear()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), gradients


def order_of_events(recipe: str | None) -> tuple[Events, list[int], list[str]]:
    """Return the events of a fourth step, the compilations after each step, and uncompiled graphs."""
    trained, compilations = Trained(recipe=recipe), []
    for number in range(4):
        trained.step(number)
        compilations.append(len(trained.compiler))
    notes = [note for note in te_transform.report(trained.model).notes if "uncompiled" in note]
    return trained.events, compilations, notes


def with_pieces_and_whole(recipe: str | None) -> list[list[tuple[Tensor, dict[str, Tensor]]]]:
    """Losses and gradients of four steps."""
    found = []
    for bucket, compilations in ((BUCKET, 4), (None, 1)):  # the small model is one of DDP's own buckets
        trained = Trained(bucket, recipe=recipe)
        found.append([trained.step(number) for number in range(4)])
        assert len(trained.compiler) == compilations
    return found


class Repeated(nn.Module):
    """A checkpoint around a model, whose forward is repeated outside of DDP's own."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.model, x, use_reentrant=False)


def ways_to_call() -> dict[str, int]:
    """Return how many graphs each caller of one model compiles, at its first call and later."""
    trained = Trained(recipe=None)
    repeated = DistributedDataParallel(Repeated(trained.model), bucket_cap_mb=BUCKET)

    def without_reduction(x: Tensor) -> Tensor:
        with trained.ddp.no_sync():
            return trained.ddp(x)

    def evaluated(x: Tensor) -> Tensor:
        with torch.no_grad():
            trained.ddp(x)
        return trained.ddp(x)

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "DDP": trained.ddp,
        "no_sync": without_reduction,
        "alone": trained.model,
        "evaluated": evaluated,
        "a checkpoint": repeated,
    }
    found = {}
    for again in ("", ", again"):
        for name, run in ways.items():
            before = len(trained.compiler)
            trained.step(0, run)
            found[name + again] = len(trained.compiler) - before
    return found


def in_cuda_graphs() -> int:
    """Return the number of compiled graphs."""
    trained = Trained(recipe=None, compile="reduce-overhead")
    for number in range(2):
        trained.step(number)
    return len(trained.compiler)


def all_of_them() -> dict[str, Any]:
    return {
        "events": {recipe: order_of_events(recipe) for recipe in RECIPES},
        "steps": {recipe: with_pieces_and_whole(recipe) for recipe in RECIPES},
        "ways": ways_to_call(),
        "in CUDA graphs": in_cuda_graphs(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.spawn(all_of_them, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_reduced_layer_by_layer(recipe: str | None, results: list[dict[str, Any]]) -> None:
    """The head's come first, then each block's, the first block's in two parts."""
    for rank in results:
        events, compilations, notes = rank["events"][recipe]
        begins = [place for place, event in enumerate(events) if event == BEGIN]
        pieces = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)], strict=True)]
        assert [{name.rpartition(".")[0] for name in piece} - {""} for piece in pieces] == [
            {"head"},
            {f"blocks.1.{name}" for name in (*ATTENTION, *MLP)},
            {f"blocks.0.{name}" for name in MLP},
            {f"blocks.0.{name}" for name in ATTENTION},
        ]
        # DDP begins to reduce those of a piece before the next one runs
        assert all("reduced" in piece for piece in pieces)
        assert compilations[1:] == [len(pieces)] * 3
        assert not notes


@pytest.mark.parametrize("recipe", RECIPES)
def test_pieces_compute_what_the_whole_graph_computes(
    recipe: str | None, results: list[dict[str, Any]]
) -> None:
    """Bitwise, where nothing is fused."""
    for rank in results:
        pieces, whole = rank["steps"][recipe]
        torch.testing.assert_close(pieces, whole, rtol=0, atol=0)
        assert all(loss.isfinite() for loss, _ in pieces)


def test_calls_outside_of_ddp_are_compiled_whole(results: list[dict[str, Any]]) -> None:
    """Each kind once, however often and by turns they are called."""
    first = {"DDP": 4, "no_sync": 0, "alone": 1, "evaluated": 1, "a checkpoint": 0}
    for rank in results:
        assert rank["ways"] == first | {f"{name}, again": 0 for name in first}


def test_modes_with_cuda_graphs_compile_the_whole_graph(results: list[dict[str, Any]]) -> None:
    assert [rank["in CUDA graphs"] for rank in results] == [1, 1]
