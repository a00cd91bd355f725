"""convert() is a transaction: whatever is raised, the model is bitwise what it was, and trains as before."""

import copy
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import emit as emitting
from te_transform.slots import Made
from tests.bitwise import untouched
from tests.models.tiny import WIDTH, Attention, Tiny
from tests.zoo import CASES, seeded

converting = importlib.import_module("te_transform.convert")  # the package's `convert` is the function

X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Fault(Exception):
    """What no code expects."""


class Attentions(nn.Module):
    """Sites that convert in no time: no MLP, whose forward would have to be rewritten."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x))
        return self.head(self.norms[2](x))


class Trained:
    """A model in the middle of its training, and its optimizer."""

    def __init__(self):
        self.model = seeded(Attentions)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.step()
        self.backward()  # gradients of the next step wait in .grad
        self.model.eval()
        self.model.attentions.train()

    def backward(self) -> None:
        self.model(X).square().mean().backward()

    def step(self) -> list[Tensor]:
        """Two more steps; the parameters then."""
        for _ in range(2):
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.backward()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def raising(error: type[BaseException], step: Callable, at: int = 1, after: bool = False) -> Callable:
    """`step`, raising at its `at`-th call, before or after it has done its work."""
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise error
        result = step(*args, **kwargs)
        if calls == at:
            raise error
        return result

    return fails


def fault_leaves_no_trace(
    trained: Trained, inplace: bool, error: type[BaseException], **options: Any
) -> None:
    with untouched(trained.model, storages=not inplace), pytest.raises(error):
        te_transform.convert(trained.model, X, inplace=inplace, **options)
    assert not any(isinstance(module, Made) for module in trained.model.modules())
    one_storage_each(trained.model)
    for left, right in zip(trained.step(), Trained().step(), strict=True):
        assert torch.equal(left, right)


def one_storage_each(model: nn.Module) -> None:
    places = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(places)) == len(places)


STEPS = [
    "as_inputs",
    "record",
    "normalise",
    "snapshot",
    "plan",
    "_precision",
    "_memory",
    "check_sites",
    "_report",
    "finalise",
]


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_every_step_may_fail(
    step: str, after: bool, inplace: bool, error: type, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(converting, step, raising(error, getattr(converting, step), after=after))
    fault_leaves_no_trace(Trained(), inplace, error, compile=True)


def test_the_steps_are_those_of_convert():
    names = {*converting.convert.__code__.co_names, *converting._planned.__code__.co_names}
    named = {name for name in names if inspect.isfunction(getattr(converting, name, None))}
    others = {"quantise", "enter_loss", "plain_calls"}  # on TE only: tests/gpu
    others |= {"emit", "undo", "leave", "unfinalise", "check_model", "_copy", "_planned", "progress"}
    assert named - others <= {*STEPS}, "a step of convert() that no test here lets fail"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("site", [1, 2, 5])
def test_every_site_may_fail(site: int, after: bool, monkeypatch: pytest.MonkeyPatch):
    emit = converting.emit
    for inplace, error in ((True, Fault), (True, KeyboardInterrupt), (False, Fault)):
        monkeypatch.setattr(converting, "emit", raising(error, emit, site, after))
        fault_leaves_no_trace(Trained(), inplace, error, verify=False)


def test_that_there_are_five_sites():
    report = te_transform.inspect(Trained().model, X)
    assert report.counts == {"merge_siblings": 2, "layernorm_linear": 3, "linear": 2}


class Interrupting:
    """Raises a KeyboardInterrupt at the n-th line that emit.py runs while it has a hand in the model."""

    def __init__(self, line: int):
        self.line, self.lines = line, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != emitting.__file__ or frame.f_code.co_name in (
            "undo",
            "_take_out",
            "_where",
        ):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.line:
                raise KeyboardInterrupt
        return self


def emitting_lines(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, inputs: Any, line: int = 0
) -> Interrupting:
    """Convert `model` in place, interrupted at the given line of the work in emit.py (0: never)."""
    tracer = Interrupting(line)

    def traced(*args: Any) -> None:
        sys.settrace(tracer)
        try:
            emit(*args)
        finally:
            sys.settrace(None)

    emit = emitting.emit
    monkeypatch.setattr(converting, "emit", traced)
    try:
        te_transform.convert(model, inputs, inplace=True, verify=False)
    finally:
        monkeypatch.setattr(converting, "emit", emit)
    return tracer


@pytest.mark.parametrize("name", ["tiny", "gpt2_eager"])
def test_emit_may_be_interrupted_at_any_line(name: str, monkeypatch: pytest.MonkeyPatch):
    """KeyboardInterrupt at each line that emit.py runs, at every one of a model's sites."""
    from te_transform import plan as planning
    from tests.zoo import EXTRA

    make, inputs = (lambda: seeded(Tiny), X) if name == "tiny" else (EXTRA[name].build, EXTRA[name].sample())
    model = make()
    keep = {}

    def planned_once(
        recording: Any, options: Any
    ) -> Any:  # the plan only reads the model: one serves all attempts
        if "plan" not in keep:
            keep["plan"] = planning.plan(recording, options)
        return keep["plan"]

    monkeypatch.setattr(converting, "plan", planned_once)
    monkeypatch.setattr(converting, "_report", lambda *_: None)
    lines = emitting_lines(monkeypatch, copy.deepcopy(model), inputs).lines
    keep.clear()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stride = max(lines // 30, 1)
    for line in range(1, lines, stride):
        fused = {key: parts_of(site.fused) for key, site in keep["plan"].sites.items()} if keep else {}
        with untouched(model, storages=False), pytest.raises(KeyboardInterrupt):
            emitting_lines(monkeypatch, model, inputs, line)
        assert not any(isinstance(module, Made) for module in model.modules())
        one_storage_each_but_ties(model)
        for key, (kind, parameters) in fused.items():
            keep["plan"].sites[key].fused.__class__ = kind
            keep["plan"].sites[key].fused._parameters.update(parameters)


def parts_of(fused: nn.Module) -> tuple[type, dict[str, Tensor | None]]:
    return type(fused), dict(fused._parameters)


def one_storage_each_but_ties(model: nn.Module) -> None:
    one_storage_each(model)  # parameters() gives a tied one once


def faulty(backend: Any) -> Any:
    raise Fault


def test_a_rule_may_fail():
    for part in ("refuse", "build", "weights"):
        broken = dataclasses.replace(te_transform.PIPELINE[-1], **{part: faulty})
        fault_leaves_no_trace(Trained(), True, Fault, passes=(*te_transform.PIPELINE[:-1], broken))


def test_undoing_keeps_todays_weights():
    """What a failure undoes is the conversion, not what was done to the weights meanwhile."""
    model = CASES["llama"].build()
    converted = te_transform.convert(model, CASES["llama"].sample(), inplace=True, verify=False)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.mul_(2)
    reverted = te_transform.revert(converted)
    for (name, parameter), expected in zip(
        reverted.named_parameters(), CASES["llama"].build().parameters(), strict=True
    ):
        assert torch.equal(parameter, 2 * expected), name
