"""Models that Hypothesis draws, changed and called in ways that it draws: the converted one answers as the
original, and so do its gradients.

`make test` draws three hundred, `make fuzz` ten thousand. What ever failed is kept, and tried each time.
"""

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends import limits
from te_transform.runtime import compiled
from te_transform.runtime.converted import converted_of
from tests.models.drawn import (
    ACTIVATIONS,
    HEADS,
    LONGEST,
    MASKS,
    NORMS,
    PLACEMENTS,
    SPELLINGS,
    WIDTH,
    WORDS,
    Drawn,
)
from tests.test_compiled import trace
from tests.test_replayed import emulate

MODELS = int(os.environ.get("TE_TRANSFORM_FUZZ", "24"))
PARTS = max(8, MODELS // 100)  # each is one test, of the models that its number gives
BOUND = 1e-5  # how far fp32 may be off, relative to the norm of what is compared
ULP = 2**-8  # of bf16
REPLAYED = 4  # calls of a kind: two that warm up, one that is recorded, one that is replayed

# What is done to a model after it was converted


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def elsewhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def parameter_replaced(model: nn.Module) -> None:
    up = model.blocks[0].mlp.up
    up.weight = nn.Parameter(up.weight.detach() * 1.5)


def module_replaced(model: nn.Module) -> None:
    down = model.blocks[-1].mlp.down
    torch.manual_seed(1)
    model.blocks[-1].mlp.down = nn.Linear(down.in_features, down.out_features, dtype=down.weight.dtype)


def norm_replaced(model: nn.Module) -> None:
    model.blocks[0].norm1 = nn.LayerNorm(WIDTH, eps=0.1, dtype=model.head.weight.dtype)


def eps_changed(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), float):
            module.eps = 0.1


def activation_replaced(model: nn.Module) -> None:
    model.blocks[0].mlp.act = torch.sin


def scaling_changed(model: nn.Module) -> None:
    model.blocks[-1].attention.scaling = 0.7


def hook_on_a_block(model: nn.Module) -> None:
    model.blocks[0].mlp.register_forward_hook(lambda module, given, out: out * 2)


def hook_on_a_linear(model: nn.Module) -> None:
    model.blocks[-1].mlp.up.register_forward_hook(lambda module, given, out: out + 1)


def hook_before_a_norm(model: nn.Module) -> None:
    model.blocks[0].norm2.register_forward_pre_hook(lambda module, given: (given[0] * 1.5,))


def gradient_hook(model: nn.Module) -> None:
    model.blocks[0].attention.o.weight.register_hook(lambda grad: grad * 2)


def forward_replaced(model: nn.Module) -> None:
    model.blocks[-1].mlp.forward = lambda x: x * 2


def norms_frozen(model: nn.Module) -> None:
    for block in model.blocks:
        block.norm1.requires_grad_(False)


def attention_frozen(model: nn.Module) -> None:
    model.blocks[0].attention.requires_grad_(False)


def one_of_three_frozen(model: nn.Module) -> None:
    attention = model.blocks[0].attention
    (attention.k if hasattr(attention, "k") else attention.o).weight.requires_grad_(False)


def in_float64(model: nn.Module) -> None:
    model.double()


def buffer_written(model: nn.Module) -> None:
    model.blocks[0].attention.kept[..., 0] = True
    model.blocks[0].attention.kept[..., 1:3, 0:2] = True


def dropout_on(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


def block_removed(model: nn.Module) -> None:
    del model.blocks[0]
    if not len(model.blocks):
        model.blocks.append(nn.Module())
        model.blocks[0].forward = lambda x, *given: x * 3


def block_called_twice(model: nn.Module) -> None:
    model.blocks.append(model.blocks[0])


def tied_later(model: nn.Module) -> None:
    model.blocks[0].mlp.down.weight = model.blocks[-1].mlp.down.weight
    model.head.weight = model.embed.weight


def parametrized(model: nn.Module) -> None:
    parametrizations.weight_norm(model.blocks[0].mlp.up)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        torch.manual_seed(2)
        self.base = base
        self.a = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted(model: nn.Module) -> None:
    model.blocks[0].attention.o = Adapter(model.blocks[0].attention.o)
    model.blocks[-1].mlp.up = Adapter(model.blocks[-1].mlp.up)


def loaded(model: nn.Module) -> None:
    state = model.state_dict()
    model.load_state_dict({n: v * 0.9 if v.is_floating_point() else v for n, v in state.items()})


def assigned(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


CHANGES: tuple[Callable[[nn.Module], nn.Module | None], ...] = (
    in_place, elsewhere, parameter_replaced, module_replaced, norm_replaced, eps_changed,
    activation_replaced, scaling_changed, hook_on_a_block, hook_on_a_linear, hook_before_a_norm,
    gradient_hook, forward_replaced, norms_frozen, attention_frozen, one_of_three_frozen, in_float64,
    buffer_written, dropout_on, block_removed, block_called_twice, tied_later, parametrized, adapted, loaded,
    assigned, copied,
)  # fmt: skip
BY_NAME = {change.__name__: change for change in CHANGES}

# How it is called


@dataclass(frozen=True)
class Call:
    """A call: of how many sequences of which length, in which mode."""

    how: str = "gradients"
    batch: int = 2
    length: int = 8
    training: bool = False
    padding: str | None = None  # the side of it

    def inputs(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self.length)
        ids = torch.randint(WORDS, (self.batch, self.length), generator=generator)
        if self.padding is None:
            return (ids,)
        kept = torch.ones(self.batch, self.length, dtype=torch.bool)
        third = self.length // 3
        kept[-1, :third] = self.padding == "right"
        kept[-1, self.length - third :] = self.padding == "left"
        return ids, kept

    def of(self, model: nn.Module, wide: bool = False) -> dict[str, Tensor | None]:
        """The logits, and where the mode records them the gradients of all parameters, by their names."""
        model.train(self.training)
        torch.manual_seed(3)
        given = self.inputs()
        if self.how in ("no_grad", "inference_mode"):
            with getattr(torch, self.how)():
                return {"logits": model(*given).clone()}
        if self.how == "autocast":
            with nullcontext() if wide else torch.autocast("cpu", torch.bfloat16):
                return {"logits": model(*given).detach()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        logits = self.logits(model, given, trained)
        if not logits.requires_grad:
            return {"logits": logits}
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))
        loss = (logits * noise.to(logits.dtype)).sum()
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        return {"logits": logits.detach(), **dict(zip(trained, grads, strict=True))}

    def logits(self, model: nn.Module, given: tuple[Tensor, ...], trained: dict[str, nn.Parameter]) -> Tensor:
        if self.how == "checkpoint":
            return checkpoint(model, *given, use_reentrant=False)
        if self.how == "functional_call":
            others = {name: parameter * 1.05 for name, parameter in trained.items()}
            return torch.func.functional_call(model, others, given)
        if self.how == "twice":
            first = model(*given)
            return first + model(given[0].flip(0), *given[1:]).flip(0)
        if self.how == "a thread":
            found: list[Any] = []

            def run() -> None:
                try:
                    found.append(model(*given))
                except Exception as error:
                    found.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            if isinstance(found[0], Exception):
                raise found[0]
            return found[0]
        return model(*given)


HOWS = (
    "gradients", "no_grad", "inference_mode", "autocast", "checkpoint", "functional_call", "twice",
    "a thread",
)  # fmt: skip


# CUDA graphs and inductor are emulated; calls of few tokens run what was captured
WAYS: dict[str, dict[str, bool]] = {
    "fused": {}, "few tokens": {}, "CUDA graphs": {"graphs": True}, "compiled": {"compile": True},
    "compiled, CUDA graphs": {"compile": True, "graphs": True},
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A model and what happens to it."""

    model: Drawn
    change: str
    calls: tuple[Call, ...]
    dtype: str = "float32"
    verify: bool = False
    way: str = "fused"


# Drawing


def goes_together(drawn: Drawn) -> Drawn:
    """The model, without what its other parts have no place for."""
    if drawn.groups != HEADS and drawn.projections == "packed by head":
        drawn = replace(drawn, projections="packed")
    if drawn.spelling != "sdpa" and drawn.repeat == "enable_gqa":
        drawn = replace(drawn, repeat="expand")
    if drawn.spelling != "sdpa" and drawn.mask == "causal flag":
        drawn = replace(drawn, mask="causal -inf")
    return drawn


def possible(drawing: Drawing) -> Drawing:
    """The drawing, without what PyTorch itself cannot do: functional_call() leaves a module that has two
    places with the other parameters."""
    if not drawing.model.shared:
        return drawing
    calls = (replace(c, how="gradients") if c.how == "functional_call" else c for c in drawing.calls)
    return replace(drawing, calls=tuple(calls))


def one_of(*choices: Any) -> st.SearchStrategy:
    return st.sampled_from(choices)


BIASES = "q", "k", "v", "o", "up", "gate", "down", "head"
MODEL = st.builds(
    Drawn,
    norm=one_of(*NORMS),
    placement=one_of(*PLACEMENTS),
    groups=one_of(HEADS, 2, 1),
    projections=one_of("separate", "packed", "packed by head"),
    biases=one_of(frozenset(), frozenset(BIASES)) | st.frozensets(one_of(*BIASES)),
    spelling=one_of(*SPELLINGS),
    repeat=one_of("repeat_interleave", "expand", "enable_gqa"),
    mask=one_of(*MASKS),
    rotary=one_of(None, "half", "interleaved", "partial"),
    scale=one_of(None, "another", "on queries", "none"),
    activation=one_of(*ACTIVATIONS),
    gate=one_of(None, "first", "second", "packed first", "packed second"),
    dropout=one_of(0.0, 0.0, 0.1),
    tied=st.booleans(),
    shared=st.booleans(),
    layers=one_of(1, 2),
    branches=st.booleans(),
    once=st.booleans(),
    in_place=st.booleans(),
).map(goes_together)
CALL = st.builds(
    Call,
    how=one_of(*HOWS),
    batch=one_of(2, 1, 3),
    length=st.integers(1, LONGEST),
    training=st.booleans(),
    padding=one_of(None, "right", "left"),
)
# The same call again notices a change by its guards alone; one of another size is captured anew anyway.
CALLS = CALL.map(lambda call: (call, call)) | st.tuples(CALL, CALL)
DRAWING = st.builds(
    Drawing,
    model=MODEL,
    change=one_of(*BY_NAME),
    calls=CALLS,
    dtype=one_of("float32", "float32", "float32", "float64", "bfloat16"),
    verify=st.booleans(),
    way=one_of("fused", *WAYS),
).map(possible)

# Comparing


def check(drawing: Drawing) -> None:
    """Convert the model, call both, change both, and call both again."""
    original = drawing.model.build().to(getattr(torch, drawing.dtype))
    before, after = drawing.calls
    sample = replace(before, how="gradients").inputs()
    options = WAYS[drawing.way]
    converted = te_transform.convert(original, sample, verify=drawing.verify, **options)
    change = BY_NAME[drawing.change]
    for _ in range(REPLAYED if "graphs" in options else 1):
        compare(original, converted, before)
    original, converted = (change(model) or model for model in (original, converted))
    for _ in range(REPLAYED if "graphs" in options else 1):
        compare(original, converted, after)
    failures = converted_of(converted).failures
    assert not any("Error" in sentence for sentence in failures), failures


def compare(original: nn.Module, converted: nn.Module, call: Call) -> None:
    exact = original.head.weight.dtype is not torch.bfloat16 and call.how != "autocast"
    expected, found = call.of(original), call.of(converted)
    assert found.keys() == expected.keys()
    if not exact:
        wide = call.of(copy.deepcopy(original).double(), wide=True)
        return as_exact(expected["logits"], found["logits"], wide["logits"])
    largest = max(float(value.nan_to_num().norm()) for name, value in expected.items() if value is not None)
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is None:
            continue
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].isnan(), value.isnan()), name
        off = (found[name].double() - value.double()).nan_to_num().norm()
        norm = value.nan_to_num().norm() if name == "logits" else largest
        assert off <= BOUND * norm, (name, float(off / norm))


def as_exact(own: Tensor, found: Tensor, wanted: Tensor) -> None:
    """bf16 may be off as far as the original is."""
    assert found.dtype == own.dtype
    assert torch.equal(found.isnan(), own.isnan())
    kept = ~(own.isnan() | wanted.isnan())
    allowed = 1.5 * (own.double() - wanted)[kept].norm() + 2 * ULP * wanted[kept].norm()
    assert (found.double() - wanted)[kept].norm() <= allowed


@contextmanager
def emulated(way: str) -> Iterator[None]:
    """CUDA graphs without a GPU, and compiling without a compiler, see test_replayed.py, test_compiled.py."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        patch.setattr(compiled, "compile_fx", trace)
        patch.setattr(limits.at_any_size, "entered", int(way != "few tokens"))
        yield


# What is tried each time: the parts of GPT-2 and of Llama, and whatever failed once

LLAMA = Drawn(
    norm="rms in fp32", groups=2, biases=frozenset(), repeat="expand", mask="padding and causal",
    rotary="half", activation="silu", gate="first",
)  # fmt: skip
KEPT = {
    "GPT-2": Drawing(Drawn(dropout=0.1, tied=True), "copied", (Call(training=True), Call("twice"))),
    "Llama": Drawing(
        LLAMA, "elsewhere", (Call(padding="left"), Call("no_grad", length=5)), way="CUDA graphs"
    ),
    "a row that sees nothing": Drawing(
        replace(LLAMA, spelling="in fp32", projections="packed", groups=1),
        "buffer_written", (Call(batch=1, length=7, padding="left"), Call("no_grad")), dtype="float64",
    ),
    "joined after a copy, in inference mode": Drawing(
        replace(LLAMA, mask="causal -inf", branches=True), "copied",
        (Call("inference_mode", length=10), Call("inference_mode", length=14)),
        verify=True, way="CUDA graphs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_drawing_that_is_kept(name: str) -> None:
    with emulated(KEPT[name].way):
        check(KEPT[name])


@pytest.mark.parametrize("part", range(PARTS))
def test_a_drawn_model_answers_as_the_original(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=-(-MODELS // PARTS), deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(DRAWING)
    def draw(drawing: Drawing) -> None:
        torch._dynamo.reset()  # what is kept for models that are gone
        with emulated(drawing.way):
            check(drawing)

    draw()
