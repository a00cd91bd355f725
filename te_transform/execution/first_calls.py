"""Make the first calls of a converted model, and compare captured graphs with the user's own code."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.execution.captured_graph import CapturedGraph, Observer
from te_transform.execution.classes import with_user_classes
from te_transform.execution.console import progress
from te_transform.execution.distances import distance, rounding
from te_transform.execution.runner import Runner
from te_transform.execution.writes import unwritten
from te_transform.graph.bits import dense_parts
from te_transform.graph.errors import in_a_line
from te_transform.graph.inputs import Inputs, TraceError
from te_transform.graph.names import forward_parameters
from te_transform.graph.preserve import preserved
from te_transform.plan.match import Plan
from te_transform.plan.model import ModelError

log = logging.getLogger(__name__)

_UNSAVED = (
    "{}: if the forward changes it, the calls of convert() change it too, and convert() cannot restore it; "
    "set it again after convert()"
)

_DIFFERS = (
    "expected a forward that does the same when it is traced or in a subclass, got one that does something "
    "else; the model runs the user's own code"
)


@dataclass
class FirstGraphs:
    """The captured graphs of the first calls, by the path of the called module."""

    graphs: dict[tuple[str, CapturedGraph], None] = field(default_factory=dict)
    groups: dict[tuple[nn.Parameter, ...], None] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # parameter names by id
    outputs: list[Tensor] = field(default_factory=list)  # outputs of the first call

    def plans(self) -> Iterator[tuple[str, Plan]]:
        """Return the plan of each graph with a module path, once for each module that shares the graph."""
        return ((path, graph.plan) for path, graph in self.graphs)

    def name_parameters(self, model: nn.Module) -> None:
        """Note the current parameters, which distinguish layers that share a graph."""
        self.names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}


def first_calls(
    model: nn.Module, runner: Runner, samples: Sequence[Inputs], original: nn.Module | None
) -> FirstGraphs:
    """Capture the forward by training calls on the example inputs. The model is restored."""
    others = set() if original is None else set(map(id, original.parameters()))

    def check_own(arguments: Sequence[Any]) -> None:
        if any(id(argument) in others for argument in arguments):
            raise ModelError(
                f"expected a forward that reads only parameters of its module, got {type(model).__name__}, "
                "whose forward reads the original's parameters through a function that the copy shares; pass "
                "inplace=True"
            )

    with (
        preserved(model, original) as before,
        watched_calls(runner, model, check_own) as seen,
        torch.set_grad_enabled(_is_trainable(model)),
    ):
        for why in map(_UNSAVED.format, before.unsaved()):
            if why not in runner.material.notes:
                log.warning(why)
                runner.material.notes.append(why)
        for sample in progress(samples, "capturing"):
            outputs = call(model.train(), sample)
            if not seen.outputs:  # copies, because writes of graphs are undone at the end
                seen.outputs = [tensor.clone() for tensor in _output_tensors(outputs)]
            del outputs  # frees activations saved for a backward
    return seen


def _is_trainable(model: nn.Module) -> bool:
    return not any(parameter.is_inference() for parameter in model.parameters())


def _output_tensors(outputs: Any) -> list[Tensor]:
    leaves = (leaf.detach() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return [part for leaf in leaves for part in dense_parts(leaf)]


def traced_otherwise(
    model: nn.Module, runner: Runner, captured: Sequence[Tensor], sample: Inputs, original: nn.Module | None
) -> str | None:
    """Return why the captured forward differs from the model, or None.

    Code may compute something different if it is traced, or in a subclass. Transformers leaves out a mask
    that hides nothing, unless it is traced. A padded sample is therefore compared without padding, too.
    """
    if any(tensor.is_meta for tensor in captured):  # without numbers
        return None
    why = _differs(model, captured, sample, original)
    whole = None if why is not None else _without_padding(model, sample)
    if whole is not None:
        with suppress(TraceError), watched_calls(runner, model):  # a model may reject the mask
            why = _differs(model, _outputs_of(model, whole, original), whole, original)
    return why


def _without_padding(model: nn.Module, sample: Inputs) -> Inputs | None:
    """Return the sample with an attention_mask of ones, or None if the sample has no padding."""
    named = dict(zip(forward_parameters(model), sample.args, strict=False)) | sample.kwargs
    mask = named.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.all():
        return None
    ones = torch.ones_like(mask)
    return Inputs(*tree_map_only(Tensor, lambda x: ones if x is mask else x, (sample.args, sample.kwargs)))


def _outputs_of(model: nn.Module, sample: Inputs, original: nn.Module | None) -> list[Tensor]:
    with preserved(model, original), torch.set_grad_enabled(_is_trainable(model)):
        return _output_tensors(call(model.train(), sample))


def _differs(
    model: nn.Module, captured: Sequence[Tensor], sample: Inputs, original: nn.Module | None
) -> str | None:
    """Return why the outputs of a captured call differ from those of the user's own code, or None."""

    def outputs() -> list[Tensor]:
        return _outputs_of(model, sample, original)

    with with_user_classes(model):
        expected = outputs()
        off = _off(captured, expected)
        # a forward whose results differ from call to call draws random numbers outside of PyTorch
        if off <= rounding(filter(Tensor.is_floating_point, expected)) or _off(outputs(), expected):
            return None
    return f"captured, the forward computes other numbers, off by {off:.2g}: {_DIFFERS}"


def fails_captured(
    model: nn.Module, samples: Sequence[Inputs], original: nn.Module | None, error: TraceError
) -> str:
    """Return why the captured forward raised on samples that the model accepts.

    Raises:
        TraceError: the model rejects the samples.
        ModelError: the model accepts them, and its copy does not.
    """

    def takes(one: nn.Module, twin: nn.Module | None) -> bool:
        with with_user_classes(one), preserved(one, twin), torch.set_grad_enabled(_is_trainable(model)):
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
            f"expected a copy that runs like the original, got {in_a_line(raised)} from the copy of "
            f"{type(model).__name__}: copy.deepcopy() leaves out what the forward reads, such as __slots__; "
            "pass inplace=True"
        ) from error
    raise error


def raises_captured(raised: BaseException) -> str:
    """Return the note for a captured forward that raises although the model's own forward does not."""
    return f"captured, the forward raises {in_a_line(raised)}: {_DIFFERS}"


def _off(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest distance between outputs, or infinity if their numbers differ."""
    if len(outputs) != len(expected):
        return math.inf
    return max(map(_distance_or_share, outputs, expected), default=0.0)


def _distance_or_share(one: Tensor, other: Tensor) -> float:
    """Return the distance of two tensors; for integers, the share that differs.

    Rounding may change an argmax, but only for few elements.
    """
    if one.shape != other.shape or one.dtype != other.dtype or other.is_floating_point():
        return distance(one, other)
    if other.is_complex():
        return distance(torch.view_as_real(one), torch.view_as_real(other))
    return (one != other).double().mean().item() if other.numel() else 0.0


@contextmanager
def watched_calls(
    runner: Runner, model: nn.Module, see: Callable[[Sequence[Any]], None] = lambda arguments: None
) -> Iterator[FirstGraphs]:
    """Observe captures and calls of graphs. Writes of graphs are undone at the end.

    Graphs run as captured: parameters are not adjacent yet, and a backward would keep copies of all joined
    parameters.
    """
    seen = FirstGraphs()
    seen.name_parameters(model)

    def watch(graph: CapturedGraph, arguments: Sequence[Any]) -> None:
        see(arguments)
        writes.note_graph(graph.captured, arguments)
        seen.graphs[graph.path_in(seen.names, arguments), graph] = None
        if not graph.fused.small_batch.never_gains:
            seen.groups |= dict.fromkeys(graph.groups(arguments))

    with unwritten() as writes:
        runner.observer = Observer(watch, runs_captured=True)
        try:
            yield seen
        finally:
            runner.observer = None


def call(model: nn.Module, sample: Inputs) -> Any:
    """Call the model on a copy of the sample.

    Raises:
        TraceError: the call raises.
    """
    args, kwargs = sample.clone()
    try:
        return model(*args, **kwargs)
    except ModelError:
        raise
    except Exception as error:
        raise TraceError.of(model, sample, error) from error
