"""The cases to compare: each set of inputs in several modes, and the loop over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from te_transform.execution.console import progress
from te_transform.graph.inputs import Inputs
from te_transform.graph.keywords import ArgumentError
from te_transform.verify.compare import Contenders, OriginalError, Row, judge
from te_transform.verify.variations import EXAMPLE, Variation, only_hides


@dataclass(frozen=True)
class Case:
    """One set of inputs in one mode."""

    label: str
    inputs: Inputs
    training: bool
    gradients: bool
    mode: str = ""  # a mode of the pair, such as "as called" or "autocast"

    def __str__(self) -> str:
        words = [self.label, "training" if self.training else "evaluation"]
        words += ["no gradients"] * (not self.gradients) + [self.mode] * bool(self.mode)
        return ", ".join(words)


class Pair(Protocol):
    """Two models to compare.

    Attributes:
        modes: The further modes in which the pair is compared on the example inputs. Each is a name, and True
            for training or False for evaluation without gradients.
    """

    @property
    def models(self) -> tuple[nn.Module, nn.Module]: ...
    @property
    def modes(self) -> tuple[tuple[str, bool], ...]: ...
    def contenders(self, case: Case) -> Contenders: ...


def all_rows(sets: list[Variation], pair: Pair) -> tuple[list[Row], list[Case], list[str]]:
    """Return all rows, the failing cases, and a sentence for each set of inputs that the original rejects.

    Raises:
        ValueError: the original rejects the example inputs.
    """
    rows: list[Row] = []
    failing: list[Case] = []
    skipped: list[str] = []

    def compare_on(each: Variation) -> None:
        try:
            for case in _cases(each.label, each.inputs, pair.modes):
                rows.extend(rows_of_one := rows_of_case(pair, case, settled=bool(failing)))
                failing.extend([case] * failed(rows_of_one))
        except OriginalError as error:
            if each.label.startswith(EXAMPLE):
                raise ArgumentError(
                    "expected example inputs on which the original runs, got "
                    f"{each.inputs}; it raised {error}"
                ) from error
            skipped.extend([] if each.apart else [f"{each.label}, the original raised {error}"])
            for one in each.apart:
                compare_on(one)

    for each in progress(sets, "verifying"):
        compare_on(each)
    return rows, failing, skipped


def rows_of_case(pair: Pair, case: Case, settled: bool = False) -> list[Row]:
    """Return the comparisons of one case; `settled` is True if another case has failed."""
    for model in pair.models:
        model.train(case.training)
    with torch.set_grad_enabled(case.gradients):
        try:
            return judge(pair.contenders(case), case.inputs, str(case), settled=settled)
        except OriginalError:
            if not case.gradients:
                raise
            # a forward may set requires_grad on views of its input, as wav2vec2 does in training; PyTorch
            # refuses this if the input itself requires a gradient
            detached = tree_map_only(Tensor, Tensor.detach, (case.inputs.args, case.inputs.kwargs))
            return judge(pair.contenders(case), Inputs(*detached), str(case), settled=settled)


def failed(rows: list[Row]) -> bool:
    """Return True if a comparison failed."""
    return not all(row.ok for row in rows)


def _cases(label: str, inputs: Inputs, modes: tuple[tuple[str, bool], ...]) -> Iterator[Case]:
    trained = _requiring_gradients(inputs)
    yield Case(label, trained, True, True)
    if label.startswith(EXAMPLE):
        yield Case(label, trained, False, True)
        for mode, training in modes:
            yield Case(label, trained if training else inputs, training, training, mode)
    yield Case(label, inputs, False, False)


def _requiring_gradients(inputs: Inputs) -> Inputs:
    """Return the inputs with every floating-point tensor requiring a gradient, except masks.

    Masks have no gradient in normal calls, and a mask with a gradient would be captured differently.
    """

    def trained(tensor: Tensor) -> Tensor:
        is_trained = tensor.is_floating_point() and not only_hides(tensor)
        return tensor.detach().requires_grad_() if is_trained else tensor

    return Inputs(*tree_map_only(Tensor, trained, (inputs.args, inputs.kwargs)))
