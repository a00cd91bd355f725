"""A converted model and its original, as a pair: names, weights and sites are known."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from te_transform.backends.limits import ignore_size_limits
from te_transform.execution.attach import runners, with_setting, without_extensions
from te_transform.graph.inputs import Inputs
from te_transform.verify.bisect import Called, bisect_failures, with_observer
from te_transform.verify.cases import Case, all_rows, failed, rows_of_case
from te_transform.verify.compare import Contenders, Row
from te_transform.verify.names import call_uncompiled
from te_transform.verify.outputs import with_effects
from te_transform.verify.precision import Recipes
from te_transform.verify.replay import Context, Subject, original_code
from te_transform.verify.states import compare_states
from te_transform.verify.variations import Variation
from te_transform.verify.verification import Verification

# The mode with size limits, which may leave sites unfused outside of verify(), and that of compiled graphs.
_BY_SIZE, _COMPILED = "as called", "compiled"
_NOT_COMPILED = (
    "compiled graphs were not compared in training, because the forward draws random numbers, and compiled "
    "code draws others"
)


@dataclass(frozen=True)
class Conversion:
    """A model, the converted model, and the recipes of the converted one."""

    model: nn.Module
    converted: nn.Module
    recipes: Recipes

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.converted

    @property
    def modes(self) -> tuple[tuple[str, bool], ...]:
        options = [each.options for each in runners(self.converted)]
        # CUDA graphs run from the third call on, and FP8 graphs once their products have scales
        if any(each.compile and not each.in_cuda_graphs and each.recipe is None for each in options):
            return (_COMPILED, True), (_COMPILED, False)
        all_fused = ignore_size_limits or any(each.compile or each.graphs for each in options)
        return () if all_fused else ((_BY_SIZE, True),)

    def unequal_weights(self) -> Verification | None:
        """Return the result for state dicts that differ, or None."""
        states = tuple(compare_states(*self.models))
        if all(row.ok for row in states):
            return None
        return Verification(type(self.model).__name__, states, recipes=self.recipes.kinds)

    def verification(self, samples: list[Inputs], sets: list[Variation]) -> Verification:
        """Compare the models on all sets of inputs."""
        for model in self.models:
            call_uncompiled(model)
        self.recipes.learn(samples[0])
        called = Called(self.converted)
        with with_observer(self.converted, called.note):
            rows, failing, skipped = all_rows(sets, self)
        return Verification(
            type(self.model).__name__,
            (*compare_states(*self.models), *rows),
            tuple(self._guilty([case for case in failing if case.mode != _COMPILED], called)),
            tuple(skipped),
            self.recipes.kinds,
            notes=self._notes(rows),
        )

    def contenders(self, case: Case) -> Contenders:
        """Return the models to run in this case."""
        converted = _subject(self.converted, partial(without_extensions, self.converted))
        return Contenders(
            _subject(self.model, partial(original_code, self.model)),
            replace(converted, is_compiled=case.mode == _COMPILED),
            _subject(self.model, partial(original_code, self.model, double=True)),
            partial(self.recipes.emulation, self.model),
            rehearsals=1 if self.recipes.delayed else 0,
            around=self._fresh(case.mode),
        )

    @contextmanager
    def _fresh(self, mode: str) -> Iterator[None]:
        """Run the converted model with fresh scales, and at any size unless it runs as its users run it."""
        unobserved = with_setting(runners(self.converted), "observer", None)
        sizes = unobserved if mode in (_BY_SIZE, _COMPILED) else ignore_size_limits
        with self.recipes.fresh_scales(), sizes:
            yield

    def _notes(self, rows: list[Row]) -> tuple[str, ...]:
        is_compared = any(row.inputs.endswith(f"training, {_COMPILED}") for row in rows)
        return (_NOT_COMPILED,) if (_COMPILED, True) in self.modes and not is_compared else ()

    def _guilty(self, failing: list[Case], called: Called) -> list[str]:
        """Return the paths of the `called` sites that make these cases fail."""
        guilty: list[str] = []
        for case in failing:

            def fails(paths: Collection[str], case: Case = case) -> bool:
                with called.only(paths):
                    return failed(rows_of_case(self, case))

            others = [path for path in called.sites if path not in guilty]
            # a case that fails without any site has wrong parameters
            if (not guilty or fails(others)) and not fails(()):
                guilty += bisect_failures(others, fails)
        return guilty


def _subject(model: nn.Module, within: Context) -> Subject:
    """Return the subject of a model, whose outputs include what its forward updates."""
    return replace(Subject.of(model, within), call=partial(with_effects, model))
