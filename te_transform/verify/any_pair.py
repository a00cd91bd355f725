"""Any two models that claim to compute the same, as a pair: the second one is only run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.utils._pytree import tree_map_only

from te_transform.execution.console import status
from te_transform.graph.inputs import Inputs
from te_transform.graph.names import forward_parameters
from te_transform.graph.preserve import same_state
from te_transform.verify.accepted import MASK, accepted, check_outputs, check_scripted
from te_transform.verify.cases import Case, all_rows, rows_of_case
from te_transform.verify.compare import GRADIENT, Contenders
from te_transform.verify.dead import constant_outputs, without_gradient
from te_transform.verify.dropouts import Dropouts, first_other_dropout
from te_transform.verify.first_difference import first_difference
from te_transform.verify.judged import wide_dtype
from te_transform.verify.layout import Layout
from te_transform.verify.names import (
    call_uncompiled,
    plain_name,
    some,
    uncompiled,
    unlock_modes,
)
from te_transform.verify.outputs import BUFFER, DROPOUT, Outputs, Visible
from te_transform.verify.replay import Subject, named_tensors, original_code
from te_transform.verify.tape import Tape
from te_transform.verify.variations import EXAMPLE, Variation, one_row
from te_transform.verify.verification import Verification

_AUTOCAST = "autocast"
_AFTER_CALLS = "after other calls"
# After this many captures, dynamo would run a compiled model uncompiled.
_COMPILES_EACH_CASE = {"recompile_limit": 2**10, "accumulated_recompile_limit": 2**14}
_OWNED = (GRADIENT, f"output {BUFFER}")  # the starts of names of rows that end in a tensor's name


@dataclass(frozen=True)
class AnyPair:
    """Two models, and the weights of the second as a function of the first's.

    Attributes:
        earlier: The inputs of earlier calls, in the cases that have some.
        held_names: The names of the held values that both models return, see held_values().
    """

    model: nn.Module
    other: nn.Module
    layout: Layout
    earlier: tuple[Inputs, ...] = ()
    held_names: frozenset[str] = frozenset()

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.other

    @property
    def modes(self) -> tuple[tuple[str, bool], ...]:
        dtypes = {p.dtype for model in self.models for p in model.parameters() if p.is_floating_point()}
        called = (_AFTER_CALLS, True), (_AFTER_CALLS, False)
        autocast = (_AUTOCAST, True), (_AUTOCAST, False)
        return (*autocast, *called) if dtypes == {torch.float32} else called

    @property
    def title(self) -> str:
        """The class names of both models."""
        return " and ".join(dict.fromkeys(type(uncompiled(model)).__name__ for model in self.models))

    def unequal_weights(self) -> Verification | None:
        """Return the result for weights with other values, which names the first module that has some."""
        rows = tuple(self.layout.rows())
        wrong = [row.name for row in rows if not row.ok]
        return Verification(self.title, rows, (wrong[0].rpartition(".")[0],)) if wrong else None

    def verification(self, samples: list[Inputs], sets: list[Variation]) -> Verification:
        """Compare the models on all sets of inputs.

        Raises:
            ValueError: the original rejects the example inputs, or the outputs cannot be paired.
        """
        for model in self.models:
            unlock_modes(model)
        with dynamo.patch(**_COMPILES_EACH_CASE):
            first, second = check_outputs(self.models, samples[0])
            check_scripted(self.models, samples[0])
            sets, left_out = accepted([sets[0], *one_row(samples[0], self.models), *sets[1:]], self.other)
            sets = [each if each.label.startswith(EXAMPLE) else self._labeled(each) for each in sets]
            # another size comes first: a model may keep what it computed in its first call
            earlier = tuple(each.inputs for each in sets[::-1] if not each.label.startswith(EXAMPLE))
            pair = replace(self, earlier=earlier, held_names=frozenset(first & second))
            verification = pair._compared(sets, left_out)
        return replace(verification, notes=(*verification.notes, *_notes_of_held(first, second)))

    def _compared(self, sets: list[Variation], left_out: list[str]) -> Verification:
        rows, failing, skipped = all_rows(sets, self)
        constant = [] if failing else [*constant_outputs(self.model, sets)]
        guilty, notes = self._blamed(failing[0]) if failing else ("", [*self._counts_of_dropouts(sets[0])])
        return Verification(
            self.title,
            (*constant, *self.layout.rows(), *rows),
            (guilty,) if failing else (),
            (*left_out, *skipped),
            dead=without_gradient(rows),
            notes=(*notes, *self.layout.notes()),
        )

    def contenders(self, case: Case) -> Contenders:
        """Return the models to run in this case."""
        visible, is_autocast = self._visible(case.inputs), case.mode == _AUTOCAST
        outputs = Outputs(self.model, self.layout.rename, visible, self.held_names, is_autocast)
        second = Subject(
            self._call(self.other, case, outputs),
            self.layout.theirs.items,
            partial(same_state, self.other),
            self.layout.pull_back,
        )
        return Contenders(self._original(case, outputs), second, self._original(case, outputs, double=True))

    def _visible(self, inputs: Inputs) -> Visible:
        said = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        given = {**dict(zip(forward_parameters(self.model), inputs.args, strict=False)), **inputs.kwargs}
        return Visible(given.get(MASK), said or any(name.startswith("decoder_") for name in given))

    def _original(self, case: Case, outputs: Outputs, double: bool = False) -> Subject:
        def parameters() -> Iterator[tuple[str, Tensor]]:
            named = ((plain_name(name), p) for name, p in self.model.named_parameters())
            return ((name, p) for name, p in named if name in self.layout.compared)

        subject = Subject.of(self.model, partial(original_code, self.model, double))
        call = self._call(self.model, case, outputs, double)
        return replace(subject, call=call, parameters=parameters)

    def _call(
        self, model: nn.Module, case: Case, outputs: Outputs, double: bool = False
    ) -> Callable[..., dict[str, Tensor]]:
        def call(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            with nullcontext() if double else _mode_of(case, args, kwargs):
                self._call_before(model, case, double)
                return outputs.of(model, args, kwargs)

        return call

    def _call_before(self, model: nn.Module, case: Case, double: bool = False) -> None:
        """Call a model on other inputs first if the case asks for it: a model may keep what it computes."""
        for each in self.earlier if case.mode == _AFTER_CALLS else ():
            args, kwargs = each.clone()
            if double:
                args, kwargs = tree_map_only(Tensor, lambda t: t.to(wide_dtype(t.dtype)), (args, kwargs))
            with suppress(Exception):  # the model rejects some sizes
                called = [t for _, t in named_tensors(model(*args, **kwargs)) if t.requires_grad]
                trained = [p for p in model.parameters() if p.requires_grad]
                if called and trained:
                    given = [*map(torch.ones_like, called)]
                    torch.autograd.grad(called, trained, given, allow_unused=True)

    def _labeled(self, each: Variation) -> Variation:
        return replace(each, inputs=self._visible(each.inputs).labels(each.inputs))

    def _blamed(self, case: Case) -> tuple[str, list[str]]:
        """Return the path of the first module that differs in a case that fails, and notes about it."""
        pair = replace(self, other=uncompiled(self.other))
        call_uncompiled(pair.other)
        for model in self.models:
            model.train(case.training)
        visible = self._visible(case.inputs)
        searching = status("searching for the first module that differs")
        with searching, torch.set_grad_enabled(case.gradients):
            difference = first_difference(
                pair.contenders(case),
                partial(Tape, self.model, self.layout.rename, visible),
                partial(Tape, pair.other, str, visible),
                case.inputs,
            )
        if difference is not None:
            return difference[0], [f"in {case}, {difference[1]}"]
        wrong = [row for row in rows_of_case(self, case) if not row.ok]
        if any(row.name.startswith(f"output {DROPOUT}") for row in wrong):
            path = first_other_dropout(*self._dropouts(case.inputs), self.layout.rename)
            return path, [f"in {case}, {wrong[0]}"]
        owned = [row for row in wrong if row.name.startswith(_OWNED)]
        worst = max(owned or wrong, key=lambda row: row.times)
        owner = worst.name.rpartition(" ")[2].rpartition(".")[0] if owned else ""
        return owner, [f"in {case}, {worst}"]

    def _counts_of_dropouts(self, sample: Variation) -> Iterator[str]:
        """Yield a sentence if the models run other numbers of dropouts, as one may be missing."""
        for model in self.models:
            model.train()
        first, second = (dropouts.calls.total() for dropouts in self._dropouts(sample.inputs))
        if first != second:
            yield (
                f"in training, the first model runs {first} dropouts and the second runs {second}: check "
                "that none is missing"
            )

    def _dropouts(self, inputs: Inputs) -> Iterator[Dropouts]:
        """Run both models, and yield their dropouts."""
        for model in (self.model, uncompiled(self.other)):
            dropouts = Dropouts()
            args, kwargs = inputs.clone()
            with same_state(model), torch.enable_grad(), dropouts.watching(model), dropouts:
                model(*args, **kwargs)
            yield dropouts


def _notes_of_held(first: set[str], second: set[str]) -> Iterator[str]:
    """Yield a sentence for caches, other objects and numbers that only one model returns."""
    for which, more in (("second", first - second), ("first", second - first)):
        if more:
            names = [*dict.fromkeys(name.partition(".")[0] or "a number" for name in sorted(more))]
            yield f"not compared: values in the output {some(names)}, which the {which} model does not return"


def _mode_of(case: Case, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager:
    if case.mode != _AUTOCAST:
        return nullcontext()
    devices = [t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    return torch.autocast(devices[0] if devices else "cpu", torch.bfloat16)
