"""Attacks by the surroundings of a forward: globals, closures, random numbers, modes, and its input."""

import contextlib
import os
import random
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import te_transform
from tests.attacks import OTHER, Act, Attends, Block, Pair, X
from tests.compilers import Compiler
from tests.models.tiny import WIDTH, Tiny
from tests.reading import ABSENT, Options, Reads, reads
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

SCALE = 1.0
TABLE = {"scale": 1.0}
CONTEXT = ContextVar("scale", default=1.0)
OPTIONS = Options()


def by_default(scale: float = 1.0) -> float:
    return scale


def by_keyword(*, scale: float = 1.0) -> float:
    return scale


def cell() -> tuple[Callable[[], float], Callable[[float], None]]:
    """Two functions that share a variable: one reads it, the other sets it."""
    scale = 1.0

    def read() -> float:
        return scale

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    return read, write


READ, WRITE = cell()


def twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def on_linears(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, doubled for linears."""
    doubled = twice(method)
    return lambda self, *args: doubled(self, *args) if isinstance(self, nn.Linear) else method(self, *args)


# What the forward reads, and what changes (undone by pytest's monkeypatch)

GLOBALS = {
    "a global": (lambda s, x: SCALE, lambda patch: patch.setitem(globals(), "SCALE", 2.0)),
    "a global's default": (lambda s, x: TABLE.get("a", 1.0), lambda patch: patch.setitem(TABLE, "a", 2.0)),
    "a global's attribute": (lambda s, x: OPTIONS.scale, lambda patch: patch.setattr(OPTIONS, "scale", 2.0)),
    "a default argument": (
        lambda s, x: by_default(),
        lambda patch: patch.setattr(by_default, "__defaults__", (2.0,)),
    ),
    "a global function": (
        lambda s, x: by_default(),
        lambda patch: patch.setitem(globals(), "by_default", lambda: 2.0),
    ),
    "a function of F": (lambda s, x: F.relu(x), lambda patch: patch.setattr(F, "relu", torch.neg)),
    "a function that is matched": (
        lambda s, x: 1.0,
        lambda patch: patch.setattr(F, "linear", lambda x, weight, bias=None: x @ (2 * weight.t())),
    ),
    "a function of F, around it": (
        lambda s, x: F.dropout(x, 0.0),
        lambda patch: patch.setattr(F, "dropout", twice(F.dropout)),
    ),
    "a function of F that is matched, around it": (
        lambda s, x: 1.0,
        lambda patch: patch.setattr(F, "layer_norm", twice(F.layer_norm)),
    ),
    "what calls modules": (
        lambda s, x: 1.0,
        lambda patch: patch.setattr(nn.Module, "__call__", on_linears(nn.Module.__call__)),
    ),
    "what calls modules, inside": (
        lambda s, x: 1.0,
        lambda patch: patch.setattr(nn.Module, "_call_impl", on_linears(nn.Module._call_impl)),
    ),
    "what calls modules of a class": (
        lambda s, x: 1.0,
        lambda patch: patch.setattr(nn.Linear, "__call__", twice(nn.Module.__call__), raising=False),
    ),
    "another class's attribute": (
        lambda s, x: getattr(Block, "late", 1.0),
        lambda patch: patch.setattr(Block, "late", 2.0, raising=False),
    ),
}


@pytest.mark.parametrize("name", GLOBALS)
def test_globals_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, change = GLOBALS[name]
    reads(read, ABSENT).attack(lambda model: change(monkeypatch))


# Functions of PyTorch's that the model holds itself: what comes into their places is nothing to it

DOUBLED = partial(torch.mul, 2.0)
HELD = {
    "a function of F": (F, "softmax", lambda s, x, own=F.softmax: own(x, -1)),
    "a function of torch": (torch, "mul", lambda s, x: DOUBLED(x)),
    "a function of F that is matched": (
        F, "layer_norm", lambda s, x, own=F.layer_norm: own(x, (WIDTH,), s.norm.weight),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compile"),
    [(name, False) for name in HELD]
    + [pytest.param(name, True, marks=() if "matched" in name else pytest.mark.integration) for name in HELD],
)
def test_a_function_that_the_model_holds_is_the_one_that_runs(
    name: str, compile: bool, compilations: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls may have been captured before, or are captured, and compiled, afterwards."""
    home, attribute, read = HELD[name]
    pair = Pair.of(type("Reads", (Reads,), {"read": read}), compile=compile)
    pair.agree()
    monkeypatch.setattr(home, attribute, twice(getattr(home, attribute)))
    pair.agree()
    pair.agree(lambda model, x: model(x[:, 1:]))


@pytest.mark.parametrize("name", ["closure", "context"])
def test_a_variable_that_is_shared_may_change(name: str) -> None:
    read, write = (READ, WRITE) if name == "closure" else (CONTEXT.get, CONTEXT.set)
    pair = reads(lambda s, x: read(), ABSENT)
    try:
        pair.attack(lambda model: write(2.0))
    finally:
        write(1.0)


def test_the_environment_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = reads(lambda s, x: 2.0 if os.environ.get("A_SWITCH") else 1.0, ABSENT)
    pair.attack(lambda model: monkeypatch.setenv("A_SWITCH", "1"))


# Random numbers: the original's, for the same seeds, at each call

RANDOM = {
    "random branch": lambda s, x: 2.0 if random.random() < 0.5 else 1.0,
    "numpy.random branch": lambda s, x: 2.0 if numpy.random.rand() < 0.6 else 1.0,
    "numbers of numpy.random": lambda s, x: torch.from_numpy(numpy.random.rand(WIDTH).astype(numpy.float32)),
    "torch.rand": lambda s, x: torch.rand(()),
    "a branch on torch.rand": lambda s, x: 2.0 if torch.rand(()) < 0.5 else 1.0,
    "a generator": lambda s, x: torch.rand((), generator=s.late),
    "dropout": lambda s, x: F.dropout(x, 0.5, s.training),
    "bernoulli in place": lambda s, x: torch.empty_like(x).bernoulli_(0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_as_the_original_draws_them(name: str) -> None:
    draw(RANDOM[name], lambda: torch.Generator().manual_seed(0))


def test_a_random_number_generator_of_the_users_own() -> None:
    draw(lambda s, x: s.late.random(), lambda: random.Random(0))


def draw(read: Callable[[Any, Tensor], Any], source: Callable[[], Any]) -> None:
    def thrice(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(x) for _ in range(3)]

    found = reads(read, source).agree(thrice)
    outputs = [found[f"output {place}"] for place in range(3)]
    assert not all(torch.equal(outputs[0], output) for output in outputs)


# What the user tells dynamo is about the user's own captures


@pytest.mark.parametrize("setting", ["prepare_freezing", "install_free_tensors", "error_on_recompile"])
def test_dynamos_settings_may_be_others(setting: str) -> None:
    """All is fused as ever, and what changes is noticed."""
    with torch._dynamo.config.patch({setting: True}):
        pair = Pair.of(Block, rules="layernorm_mlp")
        pair.attack(lambda model: setattr(model.norm, "eps", 1.0))


# Modes that the call runs in


def under(*contexts: Callable[[], Any]) -> Act:
    def act(model: nn.Module, x: Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            return model(x)

    return act


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def low() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


MODES = {
    "no_grad": (lambda s, x: 1.0 + torch.is_grad_enabled(), torch.no_grad),
    "inference_mode": (lambda s, x: 1.0 + torch.is_inference_mode_enabled(), torch.inference_mode),
    "autocast": (lambda s, x: 1.0 + torch.is_autocast_enabled("cpu"), low),
    "autocast's dtype": (lambda s, x: 1.0 + (s.mlp.fc1(x).dtype == torch.bfloat16), low),
    "default dtype": (
        lambda s, x: 1.0 + (torch.get_default_dtype() == torch.float64),
        lambda: default_dtype(torch.float64),
    ),
    "deterministic": (lambda s, x: 1.0 + torch.are_deterministic_algorithms_enabled(), deterministic),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mode_may_be_another(name: str) -> None:
    read, mode = MODES[name]
    reads(read, ABSENT).attack_call(under(mode), atol=2e-2 if "autocast" in name else 1e-5)


# How the input looks


class Tagged(Tensor):
    """A subclass of the user's own."""


class Doubling(Tensor):
    """One whose class changes what a function of PyTorch's does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is F.linear else out


def tagged(x: Tensor) -> Tensor:
    x.tag = 2.0
    return x


INPUTS = {
    "requires_grad": (lambda s, x: 1.0 + x.requires_grad, lambda x: x.requires_grad_()),
    "no leaf": (lambda s, x: 1.0 + x.is_leaf, lambda x: x.requires_grad_() * 1),
    "contiguity": (lambda s, x: 1.0 + x.is_contiguous(), lambda x: x.mT.contiguous().mT),
    "one row": (lambda s, x: float(len(x)), lambda x: x[:1]),
    "one token": (lambda s, x: float(x.shape[1]), lambda x: x[:, :1]),
    "more tokens": (lambda s, x: float(x.shape[1]), lambda x: torch.cat([x, x], 1)),
    "a branch on the size": (lambda s, x: 2.0 if x.shape[1] > 7 else 1.0, lambda x: torch.cat([x, x], 1)),
    "a branch on the values": (lambda s, x: 2.0 if x.sum() > 100 else 1.0, lambda x: x.abs()),
    "a Python number of it": (lambda s, x: x.max().item(), lambda x: 2 * x),
    "an attribute": (lambda s, x: getattr(x, "tag", 1.0), tagged),
    "a Parameter": (lambda s, x: 1.0 + isinstance(x, nn.Parameter), nn.Parameter),
    "an inference tensor": (lambda s, x: 1.0 + x.is_inference(), None),
    "a hook": (lambda s, x: 1.0, lambda x: doubling(x.requires_grad_())),
}


def doubling(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def test_a_tensor_whose_class_changes_what_functions_do() -> None:
    pair = Pair.of(Attends)
    pair.attack_call(lambda model, x: model(x.as_subclass(Doubling)))
    (said,) = te_transform.report(pair.converted).notes[1:]
    assert said.startswith(
        "expected arguments of class torch.Tensor, got a Doubling with its own __torch_function__"
    )
    pair.agree()


@pytest.mark.parametrize("name", INPUTS)
def test_the_input_may_look_otherwise(name: str) -> None:
    read, change = INPUTS[name]
    if change is None:
        with torch.inference_mode():
            inference = X.clone()
        change = lambda x: inference  # noqa: E731
    reads(read, ABSENT).attack_call(lambda model, x: model(change(x)))


class Takes(Block):
    """A block with arguments of all kinds."""

    def forward(self, x: Tensor, scale: Any = 1.0, *more: Any, mask: Any = None, **options: Any) -> Tensor:
        out = x + self.mlp(self.norm(x)) * scale
        for extra in (*more, *options.values()):
            out = out + (extra if isinstance(extra, (Tensor, float, int)) else len(extra))
        return out if mask is None else out * mask


ARGUMENTS = {
    "a number": ((2.0,), {}),
    "a tensor": ((torch.tensor(2.0),), {}),
    "more of them": ((1.0, 2.0, OTHER), {}),
    "a mask": ((), {"mask": OTHER > 0}),
    "unknown names": ((), {"bias": OTHER, "shift": 1.0}),
    "a dict": ((), {"names": {"a": 1, "b": 2}}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_may_be_others(name: str) -> None:
    args, options = ARGUMENTS[name]
    Pair.shared(Takes).attack_call(lambda model, x: model(x, *args, **options))


@pytest.mark.parametrize("arguments", [(), (X[..., :3],), (None,)], ids=["none", "a wrong width", "None"])
def test_arguments_that_the_original_refuses_are_refused_alike(arguments: tuple) -> None:
    pair = Pair.shared(Takes)
    assert "error" in pair.agree(lambda model, x: model(*arguments))
    assert "error" not in pair.agree()


# Branches on the dtype, as T5's, whose fp16 is kept from overflowing


class Clamps(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        if y.dtype == torch.float16 and y.isfinite().all():
            y = y.clamp(-0.1, 0.1)
        if y.dtype == torch.float64:
            y = y * 2
        return x + y


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_branch_on_the_dtype(dtype: torch.dtype) -> None:
    pair = Pair.of(Clamps)
    for model in pair.models:
        model.to(dtype)
    pair.agree(lambda model, x: model(x.to(dtype)), atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_branch_on_the_dtype_under_autocast(dtype: torch.dtype) -> None:
    pair = Pair.of(Clamps)
    pair.attack_call(under(lambda: torch.autocast("cpu", dtype)), atol=4 * torch.finfo(dtype).eps)


# Switches of PyTorch's attention


@contextlib.contextmanager
def without_math() -> Any:
    torch.backends.cuda.enable_math_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_math_sdp(True)


KERNELS = {
    "those of a GPU alone": lambda: sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
    "none": lambda: sdpa_kernel([]),
    "all but the one that takes any call": without_math,
}


@pytest.mark.parametrize("name", KERNELS)
def test_attention_that_is_written_out_needs_no_kernel(name: str) -> None:
    """And leaves the switches as they were; that of Tiny asks for a kernel, and is refused alike."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, y = self.attention, self.norm(x)
        scores = a.q_proj(y) @ a.k_proj(y).transpose(-2, -1) * WIDTH**-0.5
        return F.dropout(scores.softmax(-1), 0.1, self.training) @ a.v_proj(y)

    def act(model: nn.Module, x: Tensor) -> list[Any]:
        with KERNELS[name]():
            return [model(x.requires_grad_()), torch.backends.cuda.math_sdp_enabled()]

    pair = Pair.of(seeded(type("WrittenOut", (Attends,), {"forward": forward})), rules="attention")
    for training in (True, False):
        for model in pair.models:
            model.train(training)
        assert pair.agree(act)["output 1"] is False
    assert "error" in Pair.of(Tiny).agree(act)
