"""The front door verify(): compare a converted model with its original, and find the guilty sites."""

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
from te_transform.execution.runner import original_forward, runners, without_extensions
from te_transform.graph.inputs import Inputs, as_inputs
from te_transform.graph.keywords import suggests
from te_transform.graph.preserve import one_at_a_time, preserved, same_buffers
from te_transform.plan.model import wrapped_by
from te_transform.verify.bisect import Called, bisect_failures, with_observer
from te_transform.verify.compare import Contenders, OriginalError, Row, judge
from te_transform.verify.precision import Recipes
from te_transform.verify.replay import Subject, in_double
from te_transform.verify.states import compare_states
from te_transform.verify.variations import EXAMPLE, Variation, only_hides, variations
from te_transform.verify.verification import Verification


@suggests
@one_at_a_time
def verify(model: nn.Module, converted: nn.Module, example_inputs: Any = None) -> Verification:
    """Compare `converted` with `model`, forward and each gradient, against the original in fp64.

    The models run in training mode, in evaluation mode and without gradients, with dropout off. Inputs are
    the example inputs, fresh random values, another batch size and length, and a left-padded batch if the
    model has an attention_mask.

    All sites run fused at any size. On the example inputs in training mode, the model also runs as outside of
    verify(), where calls with few tokens run unfused. Effects of torch.compile and CUDA graphs are not
    compared.

    compare.py says what passes. A model in FP8 is compared with an ideal emulation of FP8. The state dicts
    must agree bitwise: if they differ, nothing runs, and the result names the entries. After a failure,
    subsets of the sites run to find the guilty ones.

    verify() needs the memory of `model` in fp64 and of its gradients.

    Args:
        model: The original, or the converted model itself if it was converted in place. It stays unchanged.
        converted: The model returned by te_transform.convert().
        example_inputs: Inputs as for convert().

    Raises:
        ValueError: the two models cannot be compared, the original does not run on the example inputs, or the
            recipe of the converted model cannot be emulated.
        te_transform.InputError: there are no inputs, and none can be generated.
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
        with with_observer(converted, called.note):
            rows, failing, skipped = _all_rows(sets, duel)
        guilty = duel.guilty(failing, called)
    return Verification(
        type(model).__name__, (*states, *rows), tuple(guilty), tuple(skipped), duel.recipes.kinds
    )


def _check(model: nn.Module, converted: nn.Module) -> None:
    if not isinstance(converted, nn.Module) or not runners(converted):
        raise ValueError(
            f"expected a converted model as the second model, got a {type(converted).__name__} that "
            "te_transform.convert() did not return; call verify(model, te_transform.convert(model))"
        )
    for which, each in (("first", model), ("second", converted)):
        if hasattr(each, "module") and (wrapper := wrapped_by(each)):
            raise ValueError(
                f"expected a plain model as the {which} model, got one wrapped by {wrapper}; pass its .module"
            )
    if not isinstance(converted, type(model)):  # a converted class is a subclass with the same name
        raise ValueError(
            f"expected two models of the same class, got a {type(model).__name__} and a converted "
            f"{type(converted).__name__}; pass the model that was converted"
        )
    for which, each in (("first", model), ("second", converted)):
        if any(parameter.is_meta for parameter in each.parameters()):
            raise ValueError(
                f"expected weights to compare, got parameters on the meta device in the {which} model; move "
                "it by to_empty(device=...) and load its weights first, or remove the hooks that load them"
            )
    first, second = (any(isinstance(p, DTensor) for p in each.parameters()) for each in (model, converted))
    if first != second:
        raise ValueError(
            f"expected two whole models, got a {'first' if first else 'second'} model divided among ranks; "
            "call verify() before parallelize() or fully_shard()"
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
    by_size: bool = False  # True to apply size limits, as outside of verify()

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
    """Return the inputs with every floating-point tensor requiring a gradient, except masks.

    Masks have no gradient in normal calls, and a mask with a gradient would be captured differently.
    """

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
        """True if size limits may leave sites unfused; this case is then compared as well."""
        options = [each.options for each in runners(self.converted)]
        return not (ignore_size_limits or any(each.compile or each.graphs for each in options))

    def learn(self, samples: list[Inputs]) -> None:
        """Find out which products run in FP8."""
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
        """Return the comparisons of one case."""
        self.model.train(case.training)
        self.converted.train(case.training)
        with torch.set_grad_enabled(case.gradients), self.recipes.fresh_scales():
            try:
                return judge(self._contenders(case), case.inputs, str(case))
            except OriginalError:
                if not case.gradients:
                    raise
                # a forward may set requires_grad on views of its input, as wav2vec2 does in training; PyTorch
                # refuses this if the input itself requires a gradient
                detached = tree_map_only(Tensor, Tensor.detach, (case.inputs.args, case.inputs.kwargs))
                return judge(self._contenders(case), Inputs(*detached), str(case))

    def guilty(self, failing: list[_Case], called: Called) -> list[str]:
        """Return the paths of the `called` sites that make these cases fail."""
        found: list[str] = []
        for case in failing:

            def fails(paths: Collection[str], case: _Case = case) -> bool:
                with called.only(paths):
                    return _failed(self.rows(case))

            others = [path for path in called.sites if path not in found]
            # a case that fails without any site has wrong parameters
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
            sizes=with_observer(self.converted, None) if case.by_size else ignore_size_limits,
        )

    def _in_double(self) -> AbstractContextManager:
        stack = ExitStack()
        stack.enter_context(original_forward(self.model))
        stack.enter_context(in_double(self.model))
        return stack


def _all_rows(sets: list[Variation], duel: _Duel) -> _Rows:
    """Return all rows, the failing cases, and the sets of inputs that the original rejects."""
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
                f"expected example inputs on which the original runs, got {each.inputs}; it raised {error}"
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
