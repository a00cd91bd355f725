"""The first calls of a model that is converted: what they capture, and whether that computes what the model
does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.execution.classes import own_classes
from te_transform.execution.console import in_a_line, progress
from te_transform.execution.distances import distance, rounding
from te_transform.execution.runner import Runner
from te_transform.execution.writes import unwritten
from te_transform.graph.inputs import Inputs, TraceError
from te_transform.graph.preserve import preserved
from te_transform.plan.match import Plan
from te_transform.plan.model import ModelError

log = logging.getLogger(__name__)

_UNSAVED = (
    "{}: if the forward changes it, so do the calls that convert() makes, and nothing puts it back; set it "
    "anew after convert()"
)


@dataclass
class Seen:
    """The captured graphs that ran in the first calls, with the path of the module that each call was of."""

    graphs: dict[tuple[str, CapturedGraph], None] = field(default_factory=dict)
    groups: dict[tuple[nn.Parameter, ...], None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of the model's parameters, by their ids
    outputs: list[Tensor] = field(default_factory=list)  # of the first call

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """What is fused in each graph, with the path of the module; once for each module that shares a
        graph."""
        return ((path, graph.plan) for path, graph in self.graphs)

    def name_parameters(self, model: nn.Module) -> None:
        """Tell layers that share a graph apart by the parameters that they have now."""
        self.names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


def first_calls(
    model: nn.Module, runner: Runner, samples: Sequence[Inputs], original: nn.Module | None
) -> Seen:
    """Capture the forward in training mode, by calling the model, which is left as it was, on its
    examples."""
    others = set() if original is None else set(map(id, original.parameters()))

    def check_own(arguments: Sequence[Any]) -> None:
        if any(id(argument) in others for argument in arguments):
            raise ModelError(
                f"the forward of {type(model).__name__} reads parameters through a function that the copy "
                "shares with the original, they would not be the copy's own: pass inplace=True"
            )

    with (
        preserved(model, original) as before,
        watched(runner, model, check_own) as seen,
        torch.set_grad_enabled(_is_trainable(model)),
    ):
        for why in map(_UNSAVED.format, before.unsaved()):
            if why not in runner.material.notes:
                log.warning(why)
                runner.material.notes.append(why)
        for sample in progress(samples, "capturing"):
            outputs = call(model.train(), sample)
            if not seen.outputs:  # copies, for what graphs wrote is undone in the end
                seen.outputs = [tensor.clone() for tensor in _tensors(outputs)]
            del outputs  # with what its backward would read
    return seen


def _is_trainable(model: nn.Module) -> bool:
    return not any(parameter.is_inference() for parameter in model.parameters())


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def traced_otherwise(
    model: nn.Module, found: Sequence[Tensor], sample: Inputs, original: nn.Module | None
) -> str | None:
    """Why the captured forward, which found these outputs, is not the model's, or None: code may ask whether
    it is traced, or of what class it is, and do something else then, as transformers does for masks."""

    def outputs() -> list[Tensor]:
        with preserved(model, original), torch.set_grad_enabled(_is_trainable(model)):
            return _tensors(call(model.train(), sample))

    if any(tensor.is_meta for tensor in found):  # which hold no numbers
        return None
    with own_classes(model):
        expected = outputs()
        off = _off(found, expected)
        # what draws random numbers of its own tells nothing
        if off <= rounding(filter(Tensor.is_floating_point, expected)) or _off(outputs(), expected):
            return None
    return (
        f"captured, the forward computes other numbers, off by {off:.2g}: it does something else where it is "
        "traced or in a subclass, one that does the same is needed; the model runs the user's own code"
    )


def fails_captured(
    model: nn.Module, samples: Sequence[Inputs], original: nn.Module | None, error: TraceError
) -> str:
    """Why the captured forward raised on samples that the model takes.

    Raises:
        TraceError: the model does not take them.
        ModelError: the model does, and its copy does not.
    """

    def takes(one: nn.Module, twin: nn.Module | None) -> bool:
        with own_classes(one), preserved(one, twin), torch.set_grad_enabled(_is_trainable(model)):
            try:
                for sample in samples:
                    call(one.train(), sample)
            except TraceError:
                return False
        return True

    raised = error.__cause__ or error
    if takes(model, original):
        return raises_captured(raised)
    if original is not None and takes(original, model):
        raise ModelError(
            f"the copy of {type(model).__name__} raises {in_a_line(raised)}, and the original does not: "
            "copy.deepcopy() leaves out what the forward reads, as it does with __slots__, pass inplace=True"
        ) from error
    raise error


def raises_captured(raised: BaseException) -> str:
    return (
        f"captured, the forward raises {in_a_line(raised)}: it does something else where it is traced or in "
        "a subclass, one that does the same is needed; the model runs the user's own code"
    )


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest distance between outputs; infinity where there are more of one than of the other."""
    if len(found) != len(expected):
        return math.inf
    return max(map(_difference, found, expected), default=0.0)


def _difference(one: Tensor, other: Tensor) -> float:
    """Their distance; of whole numbers how many are others: which of two is the larger is for rounding to
    decide, but of few."""
    if one.shape != other.shape or one.dtype != other.dtype or other.is_floating_point():
        return distance(one, other)
    if other.is_complex():
        return distance(torch.view_as_real(one), torch.view_as_real(other))
    return (one != other).double().mean().item() if other.numel() else 0.0


@contextmanager
def watched(
    runner: Runner, model: nn.Module, see: Callable[[Sequence[Any]], None] = lambda arguments: None
) -> Iterator[Seen]:
    """What is captured, and called, meanwhile. What graphs write stays until the end, for the code around
    them reads it.

    Nothing runs fused: parameters do not lie next to each other yet, and a backward would keep the copies of
    all that are joined.
    """
    seen = Seen()
    seen.name_parameters(model)

    def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        see(arguments)
        writes.note_graph(graph.captured, arguments)
        seen.graphs[graph.path_in(seen.names, arguments), graph] = None
        if not graph.fused.small_batch.takes_any_number:
            seen.groups |= dict.fromkeys(graph.groups(arguments))

    with unwritten() as writes:
        runner.observer = Observer(watch, runs_captured=True)
        try:
            yield seen
        finally:
            runner.observer = None


def call(model: nn.Module, sample: Inputs) -> Any:
    args, kwargs = sample.clone()
    try:
        return model(*args, **kwargs)
    except ModelError:
        raise
    except Exception as error:
        raise TraceError.of(model, sample, error) from error
