"""A captured graph in layers, of which a call may leave out some."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.fp8.scale_table import keep_scales
from te_transform.execution.pieces import dropped
from te_transform.execution.rerun import is_trained
from te_transform.graph import edit
from te_transform.graph.context import set_to
from te_transform.graph.nodes import dtype_of, is_parameter, path_below
from te_transform.plan.assign import put_in_recipe
from te_transform.plan.match import Plan, plan
from te_transform.plan.options import Options
from te_transform.training.residual import Layer, residual, unreached_arguments

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draws:
    """The draws of one step. They depend only on these fields: no global random state is read or changed.

    Attributes:
        step: the number of past steps.
        theta: the keep probability of the last layer.
        seed: of all draws.
        layers: the paths of the layers that may be dropped, in order.
        depths: l / L of each layer by path.
    """

    step: int
    theta: float
    seed: int
    layers: tuple[str, ...]
    depths: Mapping[str, float]

    def is_on(self) -> bool:
        """Return True if this step may drop layers."""
        return self.theta < 1

    def keep_rate(self, path: str) -> float:
        """Return the probability p_l that a layer is kept."""
        return 1 - self.depths[path] * (1 - self.theta)

    def factor(self, path: str) -> float | None:
        """Return the factor of a layer's branches, or None if the layer is dropped."""
        if path not in self.depths or not self.is_on():
            return 1.0
        draw = random.Random(f"{self.seed} {self.step} {self.layers.index(path)}").random()
        return 1 / self.keep_rate(path) if draw < self.keep_rate(path) else None


@dataclass(frozen=True)
class Decision:
    """The settings of a forward, which a checkpoint repeats in the backward.

    Attributes:
        draws: of the forward's step.
        needs_zeros: True if DDP waits for gradients of all parameters.
    """

    draws: Draws
    needs_zeros: bool


def layered_plan(
    plan_: Plan, options: Options, tell: Callable[[str], None]
) -> tuple[Plan, tuple[Layer, ...]] | None:
    """Plan a captured graph with marked layers. Return None if no layer can be left out."""
    residuals = residual(plan_)
    for reason in dict.fromkeys(residuals.refused.values()):
        paths = [path or plan_.modules[0] for path, why in residuals.refused.items() if why == reason]
        tell(sentence := f"{_never_trained(paths)} never dropped: {reason}")
        log.warning(sentence)
    if not residuals.layers:
        return None
    planned = plan(edit.with_layers(plan_.captured, residuals.layers), options, plan_.modules)
    if options.recipe is not None:
        put_in_recipe(planned, options)
    return planned, residuals.layers


def _never_trained(paths: Sequence[str]) -> str:
    return f"{paths[0]} is" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more layers are"


class Layered:
    """A graph whose last arguments are the factors of its layers.

    Args:
        plan_: of the graph.
        layers: in the order of the factors.
        run: runs the graph.
        path_in: returns the path of the called module for the arguments.
    """

    def __init__(
        self,
        plan_: Plan,
        layers: Sequence[Layer],
        run: Callable[..., Any],
        path_in: Callable[[Sequence[Any]], str],
    ):
        self.plan, self.layers, self.run, self.path_in = plan_, layers, run, path_in
        self.dtypes = [torch.promote_types(dtype_of(layer.start), torch.float32) for layer in layers]
        self.scalars: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}  # factors of the last call
        graph = plan_.captured.graph
        placeholders = enumerate(graph.find_nodes(op="placeholder"))
        self.argument_indices = {node.name: index for index, node in placeholders}
        unread = [filter(is_parameter, unreached_arguments([layer])) for layer in layers]
        self.weights = [[self.argument_indices[node.name] for node in nodes] for nodes in unread]
        self.in_recipe = any(getattr(site.fused, "in_fp8", False) for site in plan_.sites)

    def __call__(self, decision: Decision, path: str, arguments: Sequence[Any]) -> Any:
        """Run the layers that the decision keeps. `path` is the path of the called module."""
        above = self._path(path, arguments)
        factors = [decision.draws.factor(path_below(above, layer.path)) for layer in self.layers]
        left_out = frozenset(number for number, factor in enumerate(factors) if factor is None)
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        tensors = self._as_tensors(factors, device)
        with set_to(dropped, left_out):
            outputs = self.run(*arguments, *tensors)
        if self.in_recipe:
            keep_scales(arguments[index] for number in left_out for index in self.weights[number])
        return self._with_zeros(outputs, arguments, left_out) if decision.needs_zeros else outputs

    def _as_tensors(self, factors: Sequence[float | None], device: torch.device) -> list[Tensor]:
        """Return the factors as 0-dim tensors, with 1 for layers that are left out.

        Equal factors in successive calls are the same tensors.
        """
        numbers = [1.0 if factor is None else factor for factor in factors]
        keys = [(number, dtype, device) for number, dtype in zip(numbers, self.dtypes, strict=True)]
        self.scalars = {key: self.scalars[key] if key in self.scalars else _scalar(*key) for key in keys}
        return [self.scalars[key] for key in keys]

    def _path(self, called: str, arguments: Sequence[Any]) -> str:
        """Return the path of the module of this graph.

        It is the called module. If the call has a graph break or runs the user's own code in between, it is a
        module inside of the called one.
        """
        if called in self.plan.modules:
            return called
        is_known = len(self.plan.modules) == 1
        return self.plan.modules[0] if is_known else self.path_in(arguments)

    def _with_zeros(self, outputs: Any, arguments: Sequence[Any], left_out: frozenset[int]) -> Any:
        """Give arguments that only dropped layers need zero gradients in the backward of outputs, for DDP."""
        if not (left_out and torch.is_grad_enabled()):
            return outputs
        unread = unreached_arguments([self.layers[number] for number in left_out])
        given = (arguments[self.argument_indices[node.name]] for node in unread)
        weights = [argument for argument in given if is_trained(argument)]
        trained = [index for index, output in enumerate(outputs) if is_trained(output)]
        if not (weights and trained):
            return outputs
        with_zeros = _Zeros.apply(len(trained), *(outputs[index] for index in trained), *weights)
        replaced = dict(zip(trained, with_zeros, strict=True))
        return type(outputs)(replaced.get(index, output) for index, output in enumerate(outputs))


def _scalar(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=dtype, device=device)


class _Zeros(torch.autograd.Function):
    """The identity of tensors. Its backward gives zero gradients to additional weights."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # outputs without a gradient get none
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[number:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
        return (None, *grads, *zeros)
