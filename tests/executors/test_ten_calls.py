"""The executor of each call, and the reason, as docs/architecture.md and the report give them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.execution import call_context
from te_transform.execution.executors import captured, cuda_graph, fused, inductor, user_code
from tests.attacks import Block
from tests.models.tiny import WIDTH
from tests.zoo import seeded

OWN, CAPTURED, FUSED = user_code.UserCode.name, captured.Captured.name, fused.Fused.name
COMPILED, REPLAYED = inductor.Inductor.name, cuda_graph.CudaGraph.name
X = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
IN_FP8 = {"recipe": te_transform.PrecisionPlan("fp8-current", small_calls=True), "compile": True}
DELAYED = {"recipe": te_transform.PrecisionPlan("fp8-delayed", small_calls=True), "compile": True}

MODES = {
    "is_grad_enabled", "is_inference_mode_enabled", "_current_graph_task_id",
    "_top_saved_tensors_default_hooks", "are_deterministic_algorithms_enabled", "recorded", "transformed",
    "is_dispatch_mode_on", "is_foreign_mode_on", "is_graph_mode_on",
}  # fmt: skip

Call = Callable[[nn.Module], Any]


def in_training(model: nn.Module) -> None:
    model(X).sum().backward()


def decoding(model: nn.Module) -> None:
    with torch.no_grad():
        model(X[:, :1])


def checkpointed(model: nn.Module) -> None:
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()


def reentrant(model: nn.Module) -> None:
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=True).sum().backward()


def under_ddp(model: nn.Module) -> None:
    in_training(DistributedDataParallel(model))


def in_vmap(model: nn.Module) -> None:
    torch.vmap(model)(X[:, None])


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model(X)


def replayed(model: nn.Module) -> None:
    for _ in range(2):
        in_training(model)


def add_hook(model: nn.Module) -> None:
    in_training(model)
    model.mlp.register_forward_hook(lambda module, args, out: out * 2)


def divide(model: nn.Module) -> None:
    te_transform.parallelize(model, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), X)


def nothing(model: nn.Module) -> None:
    """Do nothing: the call is the first one."""


@dataclass
class Row:
    """A call of a model in bf16.

    Attributes:
        executor: the file of the executor that runs the call.
        options: of the conversion.
        call: the call.
        ran: the executors that run it, one for each forward.
        why: the sentences of the report.
        before: what is done to the model before.
        fixtures: of the call.
    """

    executor: ModuleType
    options: dict[str, Any]
    call: Call
    ran: list[str]
    why: tuple[str, ...]
    before: Call = in_training
    fixtures: tuple[str, ...] = ()


REPEATED = (
    "2 calls of graphs did not run compiled: a checkpoint repeats a call that ran fused, or it is reentrant",
)
FIRST = (
    "1 call ran in plain PyTorch: a first call in FP8, from which delayed scaling takes its scales",
    "1 call of graphs did not run compiled: its matrix products have no scales for these weights yet",
)
IN_VMAP = (
    f"dynamo cannot capture forward() at attacks.py:{Block.forward.__code__.co_firstlineno} (Unsupported "
    "functorch tracing attempt): your own code runs there",
)
SMALL = ("1 call ran in plain PyTorch: a graph without gated MLPs, which is as fast as captured",)
COMPILE, DDP = {"compile": True}, ("process_group",)

ONE_TOKEN = (
    "1 call ran in plain PyTorch: one token per sequence and no gradients, which fused kernels do not speed "
    "up",
)
NEW_HOOK = (
    "the first calls with a new hook, or with other frozen parameters, run your own code, because many hooks "
    "exist for one call",
)
AS_ASKED = ()  # the executor of the options ran the call

CALLS: dict[str, Row] = {
    "decoding": Row(user_code, COMPILE, decoding, [OWN], ONE_TOKEN),
    "in vmap": Row(user_code, COMPILE, in_vmap, [OWN], IN_VMAP),
    "with a new hook": Row(user_code, COMPILE, in_training, [OWN], NEW_HOOK, before=add_hook),
    "third of a shape": Row(cuda_graph, {"graphs": True}, in_training, [REPLAYED], AS_ASKED, before=replayed),
    "compiled in FP8": Row(inductor, IN_FP8, in_training, [COMPILED], AS_ASKED),
    "checkpointed in FP8": Row(
        inductor, IN_FP8, checkpointed, [COMPILED, COMPILED], AS_ASKED, before=checkpointed
    ),
    "under DDP": Row(inductor, COMPILE, under_ddp, [COMPILED], AS_ASKED, fixtures=DDP),
    "divided": Row(inductor, COMPILE, in_training, [COMPILED], AS_ASKED, before=divide, fixtures=DDP),
    "in inference mode": Row(inductor, COMPILE, in_inference_mode, [COMPILED], AS_ASKED),
    "first in FP8": Row(fused, DELAYED, in_training, [FUSED], FIRST, before=nothing),
    "reentrantly checkpointed": Row(fused, IN_FP8, reentrant, [COMPILED, FUSED], REPEATED, before=reentrant),
    "too small": Row(captured, {}, in_training, [CAPTURED], SMALL, before=nothing),
}


@pytest.mark.usefixtures("te", "compilations", "cuda_graphs")
@pytest.mark.parametrize("name", CALLS)
def test_the_executor_and_its_reason(name: str, ran: list[str], request: pytest.FixtureRequest) -> None:
    row, model = prepared(name, request)
    ran.clear()
    row.call(model)
    assert (ran or [OWN]) == row.ran  # dynamo itself runs the user's own code where it captures nothing
    assert (*reasons(te_transform.report(model)),) == row.why


@pytest.mark.usefixtures("te", "compilations", "cuda_graphs")
@pytest.mark.parametrize("name", CALLS)
def test_a_mode_is_read_once(name: str, request: pytest.FixtureRequest) -> None:
    row, model = prepared(name, request)
    reads: Counter[tuple[Any, str]] = Counter()

    def count(frame: FrameType | None, event: str, function: Any) -> None:
        called = function.__name__ if event == "c_call" else frame.f_code.co_name
        caller = frame if event == "c_call" else frame.f_back
        is_read = event in ("call", "c_call") and called in MODES and caller is not None
        if is_read and caller.f_code.co_filename == call_context.__file__:
            reads[caller.f_locals["self"], called] += 1

    sys.setprofile(count)
    try:
        row.call(model)
    finally:
        sys.setprofile(None)
    assert {*reads.values()} == {1}


def prepared(name: str, request: pytest.FixtureRequest) -> tuple[Row, nn.Module]:
    """Return a row, and the converted model before its call."""
    row = CALLS[name]
    for fixture in row.fixtures:
        request.getfixturevalue(fixture)
    model = seeded(Block).bfloat16()
    model = te_transform.convert(model, X, verify=False, backend="te", **row.options)
    row.before(model)
    return row, model


def reasons(report: te_transform.Report) -> Iterator[str]:
    """Yield the sentences of the report on calls that run otherwise than asked for."""
    told = (*report.fallbacks, *report.plain_calls, *report.breaks, *NEW_HOOK)
    return (note for note in report.all_notes() if note.endswith(told))


def test_architecture_has_the_calls_of_each_executor() -> None:
    text = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")
    for module in (user_code, cuda_graph, inductor, fused, captured):
        row = next(line for line in text.splitlines() if f"| `{Path(module.__file__).name}` |" in line)
        examples = row.split("|")[4].strip().split(", ")
        assert examples == [name for name, call in CALLS.items() if call.executor is module]
