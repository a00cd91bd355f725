"""Calls in which nothing gains run captured graphs or the user's own code, whichever is faster."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends import limits
from te_transform.execution.captured_graph import CapturedGraph
from te_transform.execution.runner import Runner, runner_of
from te_transform.execution.trials import IN_A_ROW, LASTS, MOST, ROWS, TOLD, Trial
from tests import stand_in
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import CASES, seeded

te = stand_in.te  # a fixture
OWN, CAPTURED = True, False
TRIAL = ([CAPTURED] * IN_A_ROW + [OWN] * IN_A_ROW) * (ROWS // 2)

pytestmark = pytest.mark.usefixtures("by_size")


class Dropping(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.3, self.training)), 0.3, self.training)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which way each call ran, in their order."""
    found: list[bool] = []
    call, captured = Runner._run, Runner._run_captured

    def called(*args: Any) -> Any:
        found.append(OWN)
        return call(*args)

    def ran_captured(*args: Any) -> Any:
        found[-1] = CAPTURED
        return captured(*args)

    monkeypatch.setattr(Runner, "_run", called)
    monkeypatch.setattr(Runner, "_run_captured", ran_captured)
    return found


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says which way is faster, the user's own code until then."""
    note, seconds = Trial.note, {OWN: 1.0, CAPTURED: 2.0}

    def set_to(way: bool) -> None:
        seconds.update({way: 1.0, not way: 2.0})

    monkeypatch.setattr(Trial, "note", lambda self, own, *_: note(self, own, 0.0, seconds[own]))
    return set_to


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def converted(model: nn.Module, sample: Tensor, **options: Any) -> nn.Module:
    return te_transform.convert(copy.deepcopy(model), sample, verify=False, **options)


def end_trial(model: nn.Module, x: Tensor) -> None:
    """Call the model until it is settled what such calls run."""
    for _ in range(len(TRIAL)):
        model(x)


@pytest.mark.parametrize("way", [OWN, CAPTURED])
def test_the_faster_way_is_found_and_taken(way: bool, ran: list[bool], faster: Callable) -> None:
    faster(way)
    x = rows(2, 3)
    model = converted(seeded(Tiny), x)
    ran.clear()
    for _ in range(len(TRIAL) + 3):
        model(x)
    assert ran == [*TRIAL, way, way, way]
    told = te_transform.report(model).plain_calls
    assert told.get(TOLD, 0) == (3 if way is OWN else 0)


@pytest.mark.usefixtures("faster")
def test_both_ways_compute_the_same_bits_and_draw_the_same_numbers(ran: list[bool]) -> None:
    original, x = seeded(Dropping), rows(2, 3)
    model = converted(original, x)
    ran.clear()
    for seed in range(len(TRIAL) + 2):
        found = []
        for each in (original, model):
            torch.manual_seed(seed)
            each.zero_grad()
            out = each(x)
            out.square().sum().backward()
            found.append([out, *(parameter.grad for parameter in each.parameters())])
        assert all(map(torch.equal, *found))
    assert set(ran) == {OWN, CAPTURED}


@pytest.mark.usefixtures("faster")
def test_each_kind_of_call_has_a_trial(ran: list[bool]) -> None:
    model = converted(seeded(Tiny), rows(2, 3))
    for _ in range(len(TRIAL)):
        model(rows(2, 3))
    kinds: list[tuple[Callable[[], Any], Tensor]] = [
        (contextlib.nullcontext, rows(2, 4)),
        (torch.no_grad, rows(2, 3)),
        (lambda: torch.autocast("cpu", torch.bfloat16), rows(2, 3)),
    ]
    for around, x in kinds:
        with around():
            model(x)  # which may capture a graph
            ran.clear()
            for _ in range(len(TRIAL)):
                model(x)
        assert ran[-len(TRIAL) + IN_A_ROW :] == TRIAL[IN_A_ROW:]
    ran.clear()
    model(rows(2, 3))
    assert ran == [OWN]
    for length in range(1, MOST + 3):
        model(rows(1, length))
    assert len(runner_of(model).user_code.trials.trials) <= MOST


@pytest.mark.usefixtures("faster")
def test_a_choice_does_not_last_for_ever(ran: list[bool]) -> None:
    x = rows(1, 2)
    model = converted(seeded(Tiny), x)
    end_trial(model, x)
    ran.clear()
    for _ in range(LASTS + 1):
        model(x)
    assert ran == [OWN] * LASTS + [CAPTURED]


def _checkpointed(model: nn.Module, x: Tensor) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()


def _repeated(model: nn.Module, x: Tensor) -> None:
    """The second call is made in the backward."""
    checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _in_a_mode(model: nn.Module, x: Tensor) -> None:
    with _Mode():
        model(x)


def _deterministic(model: nn.Module, x: Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model(x)
    finally:
        torch.use_deterministic_algorithms(False)


def _checked(model: nn.Module, x: Tensor) -> None:
    with limits.ignore_size_limits:
        model(x)


def _accumulating(model: nn.Module, x: Tensor) -> None:
    with te_transform.accumulate(model, steps=1):
        model(x).sum().backward()


CALLS = [_checkpointed, _repeated, _in_a_mode, _deterministic, _checked]


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_repeated_or_looked_at_are_captured(
    call: Callable[[nn.Module, Tensor], None], ran: list[bool]
) -> None:
    x = rows(2, 3)
    model = converted(seeded(Tiny), x)
    end_trial(model, x)
    model(x)
    assert ran[-1] is OWN
    ran.clear()
    call(model, rows(2, 3))
    assert ran[-1] is CAPTURED


@pytest.mark.usefixtures("faster", "as_given")
def test_verify_looks_at_captured_graphs(ran: list[bool]) -> None:
    x = rows(2, 3)
    original = seeded(Tiny)
    model = converted(original, x)
    end_trial(model, x)
    ran.clear()
    assert te_transform.verify(original, model, x)
    assert ran
    assert OWN not in ran


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.integration)])
def test_graphs_that_have_fewer_operations_run_always(name: str, ran: list[bool]) -> None:
    """An activation or a norm of many operations is one: it needs less memory, too."""
    inputs = CASES[name].sample()
    one_layer = {"n_layer": 1} if name == "gpt2" else {}
    model = te_transform.convert(CASES[name].build(**one_layer), inputs, backend="torch", verify=False)
    ran.clear()
    for _ in range(len(TRIAL) + 1):
        model(**inputs)
    assert OWN not in ran


class WrittenOut(nn.Module):
    """Attention whose scores are in memory as a whole."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x)[:, None] @ self.k(x)[:, None].transpose(-2, -1) / WIDTH**0.5
        return (scores.softmax(-1) @ self.v(x)[:, None])[:, 0]


@pytest.mark.usefixtures("faster")
def test_attention_that_was_written_out_runs_fused_always(ran: list[bool]) -> None:
    x = rows(2, 3)
    model = converted(seeded(WrittenOut), x)
    assert te_transform.report(model).fused
    ran.clear()
    for _ in range(len(TRIAL) + 1):
        model(x)
    assert OWN not in ran


class FourDimensions(nn.Module):
    """Attention as kernels take it, of x [batch, length, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class WithAttention(Tiny):
    def __init__(self):
        super().__init__()
        self.attention = FourDimensions()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(super().forward(x))


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("takes", [True, False])
def test_calls_that_kernels_take_are_captured(
    takes: bool, ran: list[bool], te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_transform.backends import cudnn

    monkeypatch.setattr(cudnn, "without_attention", lambda *_: None if takes else "no kernel")
    x = rows(2, 8, dtype=torch.bfloat16)
    model = converted(seeded(WithAttention).bfloat16(), x, backend="te")
    ran.clear()
    for _ in range(len(TRIAL) + 1):
        model(x)
    assert (OWN in ran) is not takes


@pytest.mark.usefixtures("faster", "te")
@pytest.mark.parametrize(
    "name",
    ["bert", *(pytest.param(name, marks=pytest.mark.integration) for name in ("vit", "gpt_neox", "opt"))],
)
def test_models_in_whose_calls_no_kernel_gains_run_both_ways(name: str, ran: list[bool]) -> None:
    """Rotations, masks, losses and attention are found, and each is left as it was."""
    original, inputs = CASES[name].build(num_hidden_layers=1).bfloat16().eval(), CASES[name].sample()
    inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
    model = te_transform.convert(copy.deepcopy(original), inputs, backend="te", verify=False).eval()
    ran.clear()
    wanted = original(**inputs).logits
    for _ in range(len(TRIAL) + 1):
        assert torch.equal(model(**inputs).logits, wanted)
    assert ran[-1] is OWN


@pytest.mark.usefixtures("faster")
def test_a_recipe_that_a_user_puts_on_is_that_of_captured_graphs(ran: list[bool], te: ModuleType) -> None:
    x = rows(2, 3, dtype=torch.bfloat16)
    model = converted(seeded(Tiny).bfloat16(), x, backend="te")
    end_trial(model, x)
    ran.clear()
    model(x)
    with te.autocast(te.recipe_of("fp8-current")):
        model(x)
    assert ran == [OWN, CAPTURED]


@pytest.mark.usefixtures("faster", "te")
def test_gradients_that_accumulate_are_those_of_captured_graphs(ran: list[bool]) -> None:
    x = rows(2, 3, dtype=torch.bfloat16)
    model = converted(seeded(Tiny).bfloat16(), x, backend="te")
    for _ in range(len(TRIAL) + 1):
        model(x)
    assert ran[-1] is OWN
    ran.clear()
    _accumulating(model, x)
    assert ran == [CAPTURED]


@pytest.mark.usefixtures("faster")
def test_graphs_that_another_thread_captures_meanwhile_are_none_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = rows(2, 3)
    model = converted(seeded(Tiny), x)
    graphs = runner_of(model).graphs

    def has_gained(*_: Any) -> bool:
        graphs.append(graphs[0])
        return False

    model(x)
    monkeypatch.setattr(CapturedGraph, "has_gained", has_gained)
    assert torch.equal(model(x), model(x))


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_make_trials_of_their_own(copied: Callable, ran: list[bool]) -> None:
    x = rows(2, 3)
    model = converted(seeded(Tiny), x)
    end_trial(model, x)
    twin = copied(model)
    ran.clear()
    model(x)
    twin(x)
    assert ran == [OWN, CAPTURED]


@pytest.mark.usefixtures("faster")
def test_hooks_and_changes_are_seen_in_the_users_own_code(ran: list[bool]) -> None:
    original, x = seeded(Tiny), rows(2, 3)
    model = converted(original, x)
    end_trial(model, x)
    for each in (original, model):
        each.blocks[0].register_forward_hook(lambda module, args, out: 2 * out)
        each.blocks[0].mlp.act = nn.ReLU()
    ran.clear()
    assert torch.equal(model(x), original(x))
    assert ran == [OWN]


class _Text(str):
    """Text that is in no set, and no key of a dict."""

    __hash__ = None


class Told(Tiny):
    """A model that is told something beside x."""

    def forward(self, x: Tensor, told: Any = None) -> Tensor:
        for block in self.blocks:
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x))


def _symbolic() -> Tensor:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    return mode.from_tensor(rows(2, 3))


def _nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([*rows(2, 3)], layout=layout)


@pytest.mark.usefixtures("faster")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("call", "times"),
    [
        (lambda model: model(rows(2, 3), _Text("text")), len(TRIAL) + 1),
        (lambda model: model(_symbolic()), 2),  # whose sizes are others each time: it is captured each time
        (lambda model: model(_nested(torch.strided)).to_padded_tensor(0.0), len(TRIAL) + 1),
        (lambda model: model(_nested(torch.jagged)).to_padded_tensor(0.0), len(TRIAL) + 1),
    ],
    ids=["text", "symbolic", "nested", "jagged"],
)
def test_arguments_that_have_no_sizes_or_no_hash_are_taken(
    call: Callable[[nn.Module], Tensor], times: int
) -> None:
    original = seeded(Told)
    model = converted(original, rows(2, 3))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            wanted = call(original)
            for _ in range(times):
                found = call(model)
                assert found.dim() == wanted.dim()
                assert isinstance(found, FakeTensor) or torch.equal(found, wanted)
