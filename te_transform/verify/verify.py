"""Compare a converted model with its original, and say what differs because of what."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from te_transform.backends.limits import ignore_size_limits
from te_transform.execution.console import progress
from te_transform.execution.runner import original_forward, without_extensions
from te_transform.graph.inputs import Inputs, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.preserve import one_at_a_time, preserved, same_buffers
from te_transform.plan.model import wrapped_by
from te_transform.verify.bisect import Called, bisect_failures, conversions, watched
from te_transform.verify.compare import Contenders, OriginalError, Row, judge
from te_transform.verify.precision import Recipes
from te_transform.verify.replay import Subject, in_double
from te_transform.verify.states import compare_states
from te_transform.verify.variations import EXAMPLE, Variation, only_hides, variations
from te_transform.verify.verification import Verification


@suggests
@one_at_a_time
def verify(model: nn.Module, converted: nn.Module, example_inputs: Any = None) -> Verification:
    """Compare `converted` with `model`, forward and each gradient, against the original's arithmetic in fp64.

    In training mode, in evaluation mode and without gradients, dropout off; on the example inputs, fresh
    random values, another batch size and length, and a left-padded batch where the model takes an
    attention_mask. All that is fused runs so, at any size; on the example inputs in training also as outside
    of verify(), where few tokens run as they were captured. compare.py says what passes; a model in FP8 is
    measured by how exact FP8 can be. The state dicts have to agree bitwise: if they differ, nothing runs, and
    the result names the entries. After a failure, subsets of the
    sites are run to find those that cause it. What torch.compile and CUDA graphs make of the model is not
    looked at. Needs the memory of `model` in fp64 and of its gradients.

    Args:
        model: the original, or the converted model itself if it was converted in place; left as it is.
        converted: what te_transform.convert() returned.
        example_inputs: as convert() takes them.

    Raises:
        ValueError: these two cannot be compared, the original does not run on the example inputs, or there is
            no emulation of the converted model's recipe.
        te_transform.InputError: there are no inputs and none can be invented.
    """
    _check(model, converted)
    duel = _Duel(model, converted, Recipes(converted))
    samples = as_inputs(model, example_inputs)
    states = tuple(compare_states(model, converted))
    if not all(row.ok for row in states):
        return Verification(type(model).__name__, states, recipes=duel.recipes.kinds)
    sets = list(variations(model, samples))
    with preserved(model), preserved(converted):
        _uncompile(model)
        _uncompile(converted)
        duel.learn(samples)
        called = Called(converted)
        with watched(converted, called.note):
            rows, failing, skipped = _all_rows(sets, duel)
        guilty = duel.guilty(failing, called)
    return Verification(
        type(model).__name__, (*states, *rows), tuple(guilty), tuple(skipped), duel.recipes.kinds
    )


def _check(model: nn.Module, converted: nn.Module) -> None:
    if not isinstance(converted, nn.Module) or not conversions(converted):
        raise ValueError(
            f"the second model is a {type(converted).__name__} that te_transform.convert() did not return, a "
            "converted model is needed: verify(model, te_transform.convert(model))"
        )
    for which, each in (("first", model), ("second", converted)):
        if hasattr(each, "module") and (wrapper := wrapped_by(each)):
            raise ValueError(
                f"the {which} model is wrapped by {wrapper}, the plain one is needed: pass its .module"
            )
    if not isinstance(converted, type(model)):  # whose class is a subclass, of the same name
        raise ValueError(
            f"the first model is a {type(model).__name__}, the second was a {type(converted).__name__}, the "
            "same class is needed: pass the model that was converted"
        )
    for which, each in (("first", model), ("second", converted)):
        if any(parameter.is_meta for parameter in each.parameters()):
            raise ValueError(
                f"the {which} model has parameters on the meta device, numbers to compare are needed: move "
                "it by to_empty(device=...) and load its weights first, or take off the hooks that load them"
            )
    first, second = (any(isinstance(p, DTensor) for p in each.parameters()) for each in (model, converted))
    if first != second:
        raise ValueError(
            f"the {'first' if first else 'second'} model is divided among ranks and the other is whole, two "
            "whole ones are needed: verify() before parallelize() or fully_shard()"
        )


def _uncompile(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop("_compiled_call_impl", None)


@dataclass(frozen=True)
class _Case:
    """One set of inputs in one mode."""

    label: str
    inputs: Inputs
    training: bool
    gradients: bool
    by_size: bool = False  # whether what runs is chosen by the size of the call, as outside of verify()

    def __str__(self) -> str:
        words = [self.label, "training" if self.training else "evaluation"]
        words += ["no gradients"] * (not self.gradients) + ["as called"] * self.by_size
        return ", ".join(words)


def _cases(label: str, inputs: Inputs, by_size: bool) -> Iterator[_Case]:
    trained = _trained(inputs)
    yield _Case(label, trained, True, True)
    if label.startswith(EXAMPLE):
        yield _Case(label, trained, False, True)
        if by_size:
            yield _Case(label, trained, True, True, by_size=True)
    yield _Case(label, inputs, False, False)


def _trained(inputs: Inputs) -> Inputs:
    """The inputs with every floating tensor requiring a gradient, but for masks, which calls have without:
    what is captured for one that has a gradient is not what runs."""

    def trained(tensor: Tensor) -> Tensor:
        is_trained = tensor.is_floating_point() and not only_hides(tensor)
        return tensor.detach().requires_grad_() if is_trained else tensor

    return Inputs(*tree_map_only(Tensor, trained, (inputs.args, inputs.kwargs)))


_Rows = tuple[list[Row], list[_Case], list[str]]


@dataclass(frozen=True)
class _Duel:
    """The two models, and the recipes of the converted one."""

    model: nn.Module
    converted: nn.Module
    recipes: Recipes

    @property
    def by_size(self) -> bool:
        """Whether calls may run otherwise than with all sites fused, which is looked at besides."""
        options = [each.options for each in conversions(self.converted)]
        return not (ignore_size_limits or any(each.compile or each.graphs for each in options))

    def learn(self, samples: list[Inputs]) -> None:
        """See which products run in FP8."""
        for training in (True, False) if self.recipes.held else ():
            self.converted.train(training)
            args, kwargs = samples[0].clone()
            with ExitStack() as stack:
                stack.enter_context(same_buffers(self.converted))
                stack.enter_context(self.recipes.fresh_scales())
                stack.enter_context(self.recipes.learn())
                stack.enter_context(torch.set_grad_enabled(training))
                self.converted(*args, **kwargs)

    def rows(self, case: _Case) -> list[Row]:
        """The comparisons of one case."""
        self.model.train(case.training)
        self.converted.train(case.training)
        with torch.set_grad_enabled(case.gradients), self.recipes.fresh_scales():
            try:
                return judge(self._contenders(case), case.inputs, str(case))
            except OriginalError:
                if not case.gradients:
                    raise
                # a forward may set requires_grad of views of its input, as wav2vec2's does in training, which
                # PyTorch refuses where the input has a gradient itself
                detached = tree_map_only(Tensor, Tensor.detach, (case.inputs.args, case.inputs.kwargs))
                return judge(self._contenders(case), Inputs(*detached), str(case))

    def guilty(self, failing: list[_Case], called: Called) -> list[str]:
        """The paths of those of the `called` sites without which these cases do not fail."""
        found: list[str] = []
        for case in failing:

            def fails(paths: Collection[str], case: _Case = case) -> bool:
                with called.only(paths):
                    return _failed(self.rows(case))

            others = [path for path in called.sites if path not in found]
            # where it fails without any site, it is the parameters
            if (not found or fails(others)) and not fails(()):
                found += bisect_failures(others, fails)
        return found

    def _contenders(self, case: _Case) -> Contenders:
        own = partial(original_forward, self.model)
        return Contenders(
            Subject.of(self.model, own),
            Subject.of(self.converted, partial(without_extensions, self.converted)),
            Subject.of(self.model, self._in_double),
            partial(self.recipes.emulation, self.model) if self.recipes.held else nullcontext,
            rehearsals=1 if self.recipes.delayed else 0,
            sizes=watched(self.converted, None) if case.by_size else ignore_size_limits,
        )

    def _in_double(self) -> AbstractContextManager:
        stack = ExitStack()
        stack.enter_context(original_forward(self.model))
        stack.enter_context(in_double(self.model))
        return stack


def _all_rows(sets: list[Variation], duel: _Duel) -> _Rows:
    """Every row, the cases that have a failing one, and which sets the original did not take."""
    return _together([_rows_of(each, duel) for each in progress(sets, "verifying")])


def _rows_of(each: Variation, duel: _Duel) -> _Rows:
    rows: list[Row] = []
    failing: list[_Case] = []
    try:
        for case in _cases(each.label, each.inputs, duel.by_size):
            rows += (found := duel.rows(case))
            failing += [case] if _failed(found) else []
    except OriginalError as error:
        if each.label.startswith(EXAMPLE):
            raise ValueError(
                f"the original does not run on the example inputs ({each.inputs}), it raised {error}"
            ) from error
        skipped = [] if each.apart else [f"{each.label}, the original raised {error}"]
        apart = [_rows_of(one, duel) for one in each.apart]
        return _together([(rows, failing, skipped), *apart])
    return rows, failing, []


def _together(parts: list[_Rows]) -> _Rows:
    rows, failing, skipped = (list(chain.from_iterable(each)) for each in zip(*parts, strict=True))
    return rows, failing, skipped


def _failed(rows: list[Row]) -> bool:
    return not all(row.ok for row in rows)
