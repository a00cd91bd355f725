"""Models and what te_transform.convert() made of them, made once a process: run them, change only copies."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.execution.attach import runner_of
from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.report.report import Report
from tests.bitwise import untouched
from tests.zoo import CASES, EXTRA, Case, Inputs, tensors

ALL = CASES | EXTRA
# of the same parts as others: that their sites are found and verified is tested, all else with the others
ALIKE = (
    "mistral", "qwen2", "gemma", "gemma2", "nanogpt_flash", "torch_encoder_post", "distilbert", "roberta",
    "clip_vision", "bart", "gpt2_eager",
)  # fmt: skip
DISTINCT = [name for name in ALL if name not in ALIKE]
# Conversion compares each of their sites with fp64 (test_models_sites.py), what they are made of the drawn
# models have too (test_drawn.py): all else that is tested of each model is left to `make integrations`.
LATER = (
    *ALIKE, "quickstart_mask", "qwen3", "phi3", "bloom", "falcon", "clip_text", "gpt_neox", "opt", "whisper",
    "llama_eager", "gemma3_text",
)  # fmt: skip
PLANNED_LATER = (*LATER, "gpt2", "bert", "vit")  # nanoGPT, T5 and quickstart have what they have for TE
IN_BF16 = ("quickstart", "nanogpt_manual", "llama", "bert", "torch_encoder_pre", "llama_eager")
EVERYWHERE = 1e-5  # how far a converted model may be off in fp32, relative to the norm of what is compared


def each(names: Iterable[str], later: Collection[str] = LATER) -> pytest.MarkDecorator:
    """A test's `name` is each of `names`; those of one model run in one process, one after the other.

    `make integrations` has those that are in `later` too.
    """
    marks = {name: [pytest.mark.xdist_group(name)] for name in names}
    for name in marks.keys() & {*later}:
        marks[name].append(pytest.mark.integration)
    cases = [pytest.param(name, marks=each) for name, each in marks.items()]
    return pytest.mark.parametrize("name", cases, scope="module")


@dataclass(frozen=True)
class Pair:
    """A model and the converted one."""

    case: Case
    original: nn.Module
    converted: nn.Module

    def run(self, inputs: Inputs, training: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of both, with the same random numbers."""
        return run(self.original, inputs, training), run(self.converted, inputs, training)

    def copy(self) -> Pair:
        return Pair(self.case, copy.deepcopy(self.original), copy.deepcopy(self.converted))

    @property
    def report(self) -> Report:
        return te_transform.report(self.converted)


@cache
def as_built(name: str) -> Pair:
    """Convert a copy of the model with its own dropouts, verified, as a user does."""
    model = ALL[name].build()
    return Pair(ALL[name], model, te_transform.convert(model, ALL[name].sample()))


@cache
def in_bf16(name: str) -> Pair:
    """Convert the model in place, as built, in bf16."""
    original, model = ALL[name].build().bfloat16(), ALL[name].build().bfloat16()
    sample = cast(ALL[name].sample(), torch.bfloat16)
    converted = te_transform.convert(model, sample, inplace=True)
    assert converted is model
    return Pair(ALL[name], original, converted)


def inspected(case: Case, **options: Any) -> Report:
    """Return the plan for Transformer Engine in bf16. The model does not change."""
    model, inputs = case.build().bfloat16(), cast(case.sample(), torch.bfloat16)
    with untouched(model):
        return te_transform.inspect(model, inputs, backend="te", **options)


@cache
def planned(name: str) -> Report:
    """The same in FP8, once for all tests."""
    return inspected(ALL[name], recipe="fp8-delayed")


@cache
def drops(name: str) -> bool:
    """Return True if the model, as built, has a dropout that changes its output."""
    model, inputs = ALL[name].build(), ALL[name].sample()
    one, other = (run(model, inputs, training=True, seed=seed) for seed in (0, 1))
    return not all(map(torch.equal, one, other))


def run(model: nn.Module, inputs: Inputs, training: bool = False, seed: int = 0) -> list[Tensor]:
    """The outputs of a call in training, or without gradients in evaluation."""
    torch.manual_seed(seed)
    with torch.set_grad_enabled(training):
        return [tensor.detach() for tensor in tensors(model.train(training)(**inputs))]


@contextmanager
def calls(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the linears and attentions in the sites that run while the context is open."""
    found: Counter[str] = Counter()

    def count(graph: CapturedGraph, arguments: Any) -> None:
        for site in graph.plan.sites:
            found["linear"] += sum(len(weight) for weight in site.weights)
            found["attention"] += site.rules[-1][0] == "attention"

    converted = runner_of(model)
    converted.observer = Observer(count)
    try:
        yield found
    finally:
        converted.observer = None


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance of an output from what it should be, relative to that one's norm."""
    pairs = zip(actual, expected, strict=True)
    return max(((a.double() - e.double()).norm() / e.double().norm()).item() for a, e in pairs)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The inputs with their floating tensors in another dtype; what was one tensor stays one."""
    changed = {id(tensor): tensor.to(dtype) for tensor in inputs.values() if tensor.is_floating_point()}
    return {name: changed.get(id(tensor), tensor) for name, tensor in inputs.items()}


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor | None]:
    """Return the gradients of sum(output * fixed noise) of all trained parameters, by name."""
    torch.manual_seed(0)
    outputs = [output for output in tensors(model.train()(**inputs)) if output.requires_grad]
    generator = torch.Generator().manual_seed(0)
    loss = sum((output * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return True if two state dicts have equal names, order, values, dtypes and shapes."""
    pairs = zip(one.values(), other.values(), strict=False)
    return list(one) == list(other) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@contextmanager
def logged(name: str, level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the messages of a logger. pytest's caplog misses loggers that do not propagate."""
    said: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger(name)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
