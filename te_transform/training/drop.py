"""Progressive layer dropping (arXiv 2010.13369) over the captured graphs of a converted model.

Layer l of L is kept in step t with probability p_l(t) = 1 - (l / L) * (1 - theta(t)). Here,
theta(t) = (1 - theta) * exp(-gamma * t) + theta. A kept layer adds its branches divided by p_l. A dropped
layer adds nothing and runs no kernel.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from te_transform.execution.attach import runner_of
from te_transform.execution.runner import Runner
from te_transform.graph.keywords import suggests
from te_transform.graph.nodes import path_below
from te_transform.plan.model import ModelError, check_module
from te_transform.plan.options import IN_CUDA_GRAPHS, OptionError
from te_transform.training.counts import is_count
from te_transform.training.layer_calls import decide_on_layers
from te_transform.training.layered import Draws
from te_transform.training.residual import residual

log = logging.getLogger(__name__)


class LayerDropping:
    """The schedule of a model whose layers are dropped: one draw for each layer and step.

    A draw depends only on the seed, the step and the layer. All ranks therefore draw the same numbers, an
    activation checkpoint repeats the draw of its forward, and a resumed run continues exactly.

    Attributes:
        layers: the paths of the layers that may be dropped, in order.
        refused: the layers that are never dropped, by path, with the reasons.
        steps: the number of calls of step().
    """

    def __init__(
        self,
        model: nn.Module,
        layers_and_refusals: tuple[tuple[str, ...], dict[str, str]],
        settings: dict[str, Any],
    ) -> None:
        self.layers, self.refused = layers_and_refusals
        self.steps = 0
        self._settings = settings
        self._model: nn.Module | None = model
        self._depths = _depths(self.layers)

    @property
    def theta(self) -> float:
        """Return theta(t) of this step, the keep probability of the last layer. It is 1 in the first step."""
        limit, gamma = self._settings["theta"], self._settings["gamma"]
        return (1 - limit) * math.exp(-gamma * self.steps) + limit

    def step(self) -> None:
        """Begin the next step. Call this once after each optimizer.step(), like a learning-rate scheduler.

        All forwards and backwards of a step share the draws, also if gradients are accumulated.
        """
        self.steps += 1

    def keep_rates(self) -> dict[str, float]:
        """Return the probability p_l that each layer is kept in this step, by path."""
        draws = self._draws()
        return {path: draws.keep_rate(path) for path in self.layers}

    def dropped(self) -> tuple[str, ...]:
        """Return the paths of the layers that this step drops."""
        draws = self._draws()
        return tuple(path for path in self.layers if draws.factor(path) is None)

    def _draws(self) -> Draws:
        return Draws(self.steps, self.theta, self._settings["seed"], self.layers, self._depths)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the step and the settings."""
        return {"steps": self.steps, **self._settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of state_dict().

        Raises:
            OptionError: the state does not come from a LayerDropping, or a number is out of range.
        """
        given = dict(state) if isinstance(state, Mapping) else {}
        if set(given) != set(self.state_dict()):
            needed, keys = ", ".join(self.state_dict()), ", ".join(map(str, given))
            raise OptionError(
                f"expected the keys {needed}, got {keys or 'none'}; pass what "
                "LayerDropping.state_dict() returned"
            )
        if not is_count(steps := given.pop("steps"), least=0):
            raise OptionError(f"expected steps of 0 or more, got {steps!r}; pass the number of past steps")
        self._settings = _checked_settings(**given)
        self.steps = steps

    def remove(self) -> None:
        """Run all layers again, as before drop_layers()."""
        if self._model is not None and (runner := runner_of(self._model)) is not None:
            decide_on_layers(self._model, runner, None)
        self._model = None


@suggests
def drop_layers(
    converted: nn.Module,
    total_steps: int,
    theta: float = 0.5,
    gamma: float | None = None,
    *,
    seed: int = 0,
) -> LayerDropping:
    """Drop layers of a converted model at random in training. The number of dropped layers grows.

    Only calls in training mode with gradients drop layers. Evaluation, generation, verification and
    checkpoints do not change. The first step drops nothing.

        schedule = drop_layers(model, total_steps=10_000)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad(), schedule.step()

    Args:
        converted: a model from te_transform.convert(), or a module that contains one.
        total_steps: the number of optimizer steps of the whole training.
        theta: the limit of theta(t), in (0, 1]. The mean share of layers that run approaches
            1 - (1 - theta) * (L + 1) / (2 L). With 1, nothing is dropped.
        gamma: the decay of theta(t) per step; None is 100 / total_steps, as in the paper.
        seed: of the draws. Pass the same seed on all ranks.

    Returns:
        The schedule. Call its step() after each optimizer step, and save its state_dict() with the training
        state.

    Raises:
        OptionError: a number is out of range, or the model was converted in a mode that runs as a whole.
        ModelError: no model was converted, or it has no residual branches x + f(norm(x)) of its own layers.
    """
    settings = _checked_settings(total_steps, theta, gamma, seed)
    model, runner = _converted_with_runner(converted)
    _check_mode(runner)
    layers = _layers_and_refusals(model, runner)
    schedule = LayerDropping(model, layers, settings)
    decide_on_layers(model, runner, schedule._draws)
    log.info("%d layers may be dropped, %d may not", len(schedule.layers), len(schedule.refused))
    return schedule


def _checked_settings(total_steps: int, theta: float, gamma: float | None, seed: int) -> dict[str, Any]:
    """Check all numbers, and return the settings of a schedule."""
    if not is_count(total_steps):
        raise OptionError(
            f"expected total_steps of 1 or more, got {total_steps!r}; pass the number of optimizer steps"
        )
    if not isinstance(theta, (int, float)) or not 0 < theta <= 1:
        raise OptionError(
            f"expected theta in (0, 1], got {theta!r}; pass the share of steps in which the last layer is to "
            "run in the end, 0.5 in the paper"
        )
    if gamma is not None and (not isinstance(gamma, (int, float)) or not 0 < gamma < math.inf):
        raise OptionError(f"expected gamma above 0, got {gamma!r}; pass None for 100 / total_steps")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"expected an integer seed, got {seed!r}; pass the same integer on all ranks")
    gamma = 100 / total_steps if gamma is None else float(gamma)
    return {"total_steps": total_steps, "theta": theta, "gamma": gamma, "seed": seed}


def _converted_with_runner(model: Any) -> tuple[nn.Module, Runner]:
    """Return the converted model in `model`, and its runner."""
    check_module(model, "drop_layers")
    for module in model.modules():
        if (runner := runner_of(module)) is not None:
            return module, runner
    raise ModelError(
        f"expected a converted model, got an unconverted {type(model).__name__}; pass what "
        "te_transform.convert() returned"
    )


def _check_mode(runner: Runner) -> None:
    """Raise unless the calls of a model may leave layers out."""
    options = runner.options
    if runner.extension is not None:
        raise ModelError(
            "expected a model that drops no layers, got one that does; call remove() of its schedule first"
        )
    if runner.division is not None:
        raise ModelError(
            "expected a model on one rank, under DDP or FSDP, got one divided by parallelize(); use "
            "fully_shard() instead"
        )
    if options.run_original:
        raise ModelError(
            "expected captured graphs, got a model that runs its own code, as its report says; convert it "
            "without compile='auto', or mend what the report names"
        )
    if not runner.graphs:
        raise ModelError(
            "expected captured graphs, got a model without any, as a copy is before its first call; call it "
            "once in training"
        )
    if options.compile in IN_CUDA_GRAPHS:
        raise OptionError(
            f"expected a mode in which layers run one by one, got compile={options.compile!r}, whose CUDA "
            "graphs replay all layers; convert with compile=True and graphs=True"
        )


def _layers_and_refusals(model: nn.Module, runner: Runner) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the paths of the layers in the graphs that were captured so far, and the reasons against others.

    Raises:
        ModelError: no layer can be dropped.
    """
    layers: dict[str, None] = {}
    refused: dict[str, str] = {}
    for graph in runner.graphs:
        residuals = residual(graph.plan)
        for module in graph.plan.modules:
            layers |= {path_below(module, layer.path): None for layer in residuals.layers}
            refused |= {path_below(module, path): why for path, why in residuals.refused.items()}
    if not layers:
        why = next(iter(refused.items()), None)
        raise ModelError(
            "expected layers x + f(norm(x)), got none"
            + (f": {why[0]}, {why[1]}" if why else "; pass a pre-norm model")
        )
    order = {path: number for number, (path, _) in enumerate(model.named_modules())}
    paths = tuple(sorted(layers, key=lambda path: order.get(path, len(order))))
    return paths, {path: why for path, why in refused.items() if path not in layers}


def _depths(layers: Iterable[str]) -> dict[str, float]:
    """Return l / L of each layer by path. Encoder and decoder are counted separately, stages together."""
    stacks: dict[str, list[str]] = defaultdict(list)
    for path in layers:
        stacks[re.sub(r"\d+", "", path)].append(path)
    return {
        path: number / len(stack) for stack in stacks.values() for number, path in enumerate(stack, start=1)
    }
