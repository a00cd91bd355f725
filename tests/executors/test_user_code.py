"""The executor of the user's own code: it runs the calls for which graphs turn out to be slower."""

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
from te_transform.execution.attach import runner_of
from te_transform.execution.executors.captured import Captured
from te_transform.execution.executors.fused import Fused
from te_transform.execution.executors.user_code import UserCode
from te_transform.execution.trials import (
    CALLS_UNTIL_NEXT,
    IN_A_ROW,
    MAX_TRIALS,
    OWN_IS_FASTER,
    ROUNDS,
    Trial,
    Trials,
)
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import CASES, seeded

OWN, CAPTURED = UserCode.name, Captured.name
TRIAL = ([CAPTURED] * IN_A_ROW + [OWN] * IN_A_ROW) * (ROUNDS // 2)


class Dropping(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.3, self.training)), 0.3, self.training)


class Clock:
    """A clock by which calls take one second, or two in the code that is not `faster`.

    It is read before and after each call.
    """

    def __init__(self, ran: list[str]):
        self.ran, self.faster, self.seconds, self.is_running = ran, OWN, 0.0, False

    def __call__(self, device: torch.device) -> float:
        if self.is_running:
            self.seconds += 1.0 if (self.ran[-1:] == [OWN]) == (self.faster == OWN) else 2.0
        self.is_running = not self.is_running
        return self.seconds


@pytest.fixture
def clock(ran: list[str]) -> Clock:
    """Return a clock by which the user's own code is faster."""
    return Clock(ran)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def converted(model: nn.Module, sample: Any, clock: Clock, **options: Any) -> nn.Module:
    """Return a converted copy of the model, whose calls are timed by the clock."""
    made = te_transform.convert(copy.deepcopy(model), sample, verify=False, **options)
    runner_of(made).user_code.trials.clock = clock
    return made


def end_trial(model: nn.Module, x: Tensor) -> None:
    """Call the model until the trial of such calls ends."""
    for _ in range(len(TRIAL)):
        model(x)


@pytest.mark.parametrize("way", [OWN, CAPTURED])
def test_the_faster_code_runs_after_a_trial(way: bool, ran: list[str], clock: Clock) -> None:
    clock.faster = way
    x = rows(2, 3)
    model = converted(seeded(Tiny), x, clock)
    ran.clear()
    for _ in range(len(TRIAL) + 3):
        model(x)
    assert ran == [*TRIAL, way, way, way]
    told = te_transform.report(model).plain_calls
    assert told.get(OWN_IS_FASTER, 0) == (3 if way == OWN else 0)


def test_a_trial_computes_the_original_bits_and_random_numbers(ran: list[str], clock: Clock) -> None:
    original, x = seeded(Dropping), rows(2, 3)
    model = converted(original, x, clock)
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


def test_each_shape_and_mode_has_a_trial(ran: list[str], clock: Clock) -> None:
    model = converted(seeded(Tiny), rows(2, 3), clock)
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
    for length in range(1, MAX_TRIALS + 3):
        model(rows(1, length))
    assert len(runner_of(model).user_code.trials.trials) <= MAX_TRIALS


def test_a_choice_ends_with_the_next_trial(ran: list[str], clock: Clock) -> None:
    x = rows(1, 2)
    model = converted(seeded(Tiny), x, clock)
    end_trial(model, x)
    ran.clear()
    for _ in range(CALLS_UNTIL_NEXT + 1):
        model(x)
    assert ran == [OWN] * CALLS_UNTIL_NEXT + [CAPTURED]


def _checkpointed(model: nn.Module, x: Tensor) -> None:
    checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()


def _repeated(model: nn.Module, x: Tensor) -> None:
    """Call the model in a reentrant checkpoint, which calls it again in the backward."""
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


@pytest.mark.parametrize("call", CALLS)
def test_repeated_and_observed_calls_run_graphs(
    call: Callable[[nn.Module, Tensor], None], ran: list[str], clock: Clock
) -> None:
    x = rows(2, 3)
    model = converted(seeded(Tiny), x, clock)
    end_trial(model, x)
    model(x)
    assert ran[-1] == OWN
    ran.clear()
    call(model, rows(2, 3))
    assert OWN not in ran


@pytest.mark.usefixtures("as_given")
def test_verify_checks_graphs(ran: list[str], clock: Clock) -> None:
    x = rows(2, 3)
    original = seeded(Tiny)
    model = converted(original, x, clock)
    end_trial(model, x)
    ran.clear()
    assert te_transform.verify(original, model, x)
    assert ran
    assert OWN not in ran


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.integration)])
def test_graphs_with_fewer_operations_always_run(name: str, ran: list[str], clock: Clock) -> None:
    """An activation or a norm of many operations is one: it needs less memory, too."""
    inputs = CASES[name].sample()
    one_layer = {"n_layer": 1} if name == "gpt2" else {}
    model = converted(CASES[name].build(**one_layer), inputs, clock, backend="torch")
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


def test_fused_attention_always_runs(ran: list[str], clock: Clock) -> None:
    x = rows(2, 3)
    model = converted(seeded(WrittenOut), x, clock)
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


@pytest.mark.parametrize("takes", [True, False])
def test_graphs_run_if_a_kernel_takes_the_call(
    takes: bool, ran: list[str], clock: Clock, te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_transform.backends import cudnn

    monkeypatch.setattr(cudnn, "without_attention", lambda *_: None if takes else "no kernel")
    x = rows(2, 8, dtype=torch.bfloat16)
    model = converted(seeded(WithAttention).bfloat16(), x, clock, backend="te")
    ran.clear()
    for _ in range(len(TRIAL) + 1):
        model(x)
    assert (OWN in ran) is not takes


@pytest.mark.usefixtures("te")
@pytest.mark.parametrize(
    "name",
    ["bert", *(pytest.param(name, marks=pytest.mark.integration) for name in ("vit", "gpt_neox", "opt"))],
)
def test_models_without_faster_kernels_may_run_their_own_code(
    name: str, ran: list[str], clock: Clock
) -> None:
    """Rotations, masks, losses and attention are found, and each is left as it was."""
    original, inputs = CASES[name].build(num_hidden_layers=1).bfloat16().eval(), CASES[name].sample()
    inputs = {key: x.bfloat16() if x.is_floating_point() else x for key, x in inputs.items()}
    model = converted(original, inputs, clock, backend="te").eval()
    ran.clear()
    wanted = original(**inputs).logits
    for _ in range(len(TRIAL) + 1):
        assert torch.equal(model(**inputs).logits, wanted)
    assert ran[-1] == OWN


def test_graphs_run_in_the_recipe_of_the_user(ran: list[str], clock: Clock, te: ModuleType) -> None:
    x = rows(2, 3, dtype=torch.bfloat16)
    model = converted(seeded(Tiny).bfloat16(), x, clock, backend="te")
    end_trial(model, x)
    ran.clear()
    model(x)
    with te.autocast(te.recipe_of("fp8-current")):
        model(x)
    assert ran == [OWN, CAPTURED]


@pytest.mark.usefixtures("te")
def test_graphs_run_inside_accumulate(ran: list[str], clock: Clock) -> None:
    x = rows(2, 3, dtype=torch.bfloat16)
    model = converted(seeded(Tiny).bfloat16(), x, clock, backend="te")
    for _ in range(len(TRIAL) + 1):
        model(x)
    assert ran[-1] == OWN
    ran.clear()
    _accumulating(model, x)
    assert ran == [Fused.name]


class Gained:
    """A graph whose calls gain nothing; another thread captures a graph when it is asked."""

    def __init__(self, graphs: list[Gained]):
        self.graphs = graphs

    def calls(self) -> None: ...

    def has_gained(self, before: None) -> bool:
        self.graphs.append(Gained(self.graphs))
        return False


def test_other_threads_may_capture_graphs_during_a_trial() -> None:
    graphs: list[Any] = []
    graphs.append(Gained(graphs))
    trials, trial = Trials(), Trial(torch.device("cpu"))
    for calls in range(1, 4):
        assert trials.run(trial, lambda: OWN, lambda: CAPTURED, graphs) == CAPTURED
        assert len(trial.calls) == calls


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_trials_of_their_own(copied: Callable, ran: list[str], clock: Clock) -> None:
    x = rows(2, 3)
    model = converted(seeded(Tiny), x, clock)
    end_trial(model, x)
    twin = copied(model)
    ran.clear()
    model(x)
    twin(x)
    assert ran == [OWN, CAPTURED]


def test_own_code_sees_hooks_and_changes(ran: list[str], clock: Clock) -> None:
    original, x = seeded(Tiny), rows(2, 3)
    model = converted(original, x, clock)
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
def test_arguments_may_have_no_sizes_or_no_hash(
    call: Callable[[nn.Module], Tensor], times: int, clock: Clock
) -> None:
    original = seeded(Told)
    model = converted(original, rows(2, 3), clock)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            wanted = call(original)
            for _ in range(times):
                found = call(model)
                assert found.dim() == wanted.dim()
                assert isinstance(found, FakeTensor) or torch.equal(found, wanted)
