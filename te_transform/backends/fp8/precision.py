"""The FP8 recipe of a converted model at run time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from te_transform.backends.fp8 import scale_table
from te_transform.backends.fp8.current_model import running, sample_of
from te_transform.backends.fp8.registry import ParameterState, read_state, state_of
from te_transform.backends.limits import small_calls_in_fp8
from te_transform.backends.ranks import groups_of, is_sharded, maximum
from te_transform.backends.tracing import in_backward, recorded, transformed
from te_transform.graph.grouped import grouped
from te_transform.graph.names import without_wrappers


@dataclass(eq=False)
class _Token:
    """A mark of the states that know their names, and the number of the model's forwards in training."""

    forwards: int = 0


@dataclass(eq=False)
class Precision:
    """The recipe that a converted model runs in, and the state that lasts from call to call.

    Quantized weights are cached within te_transform.accumulate(), and in evaluation mode without gradients
    until a weight is written to.

    Args:
        recipe: TE's recipe.
        products: for names of parameters, True if the product that begins with the parameter runs in the
            recipe. Layers that share an op need it. For other names, the op decides.
        small_calls: True to run small calls in the recipe, although they are faster in their own dtype.
    """

    recipe: Any
    products: Mapping[str, bool] = field(default_factory=dict)
    small_calls: bool = False
    entered: bool = False
    states: WeakSet[ParameterState] = field(default_factory=WeakSet)  # of parameters that have run
    groups: tuple[Any, ...] = ()  # process groups of the last training forward
    loaded: Mapping[str, scale_table.ScaleRow] = field(default_factory=dict)  # loaded scales by weight name
    shared: scale_table.RankTable | None = None  # scales shared by the last training forward
    token: _Token = field(default_factory=_Token)

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Run the forward of `model` in the recipe.

        TE ends a step of delayed scaling at the end of the outermost autocast, so a nested forward does not
        enter autocast again. A forward that a checkpoint repeats within a backward does not enter it either,
        because each op has noted how it ran. Under function transforms, no op runs in a recipe, because TE
        cannot update scales.
        """
        if self.entered or in_backward() or transformed():
            yield
            return
        from te_transform.backends import te

        weights_stay = not model.training and not is_sharded(model)
        small = small_calls_in_fp8 if self.small_calls else contextlib.nullcontext()
        if read_state(next(model.parameters())).model is not self.token:
            self._name_parameters(model)
        if torch.is_grad_enabled() and self.is_delayed:
            self._forget_loaded()
            self._agree(model)
        self.entered, gradients = True, torch.is_grad_enabled()
        # TE updates scales at the end of a step if gradients are on. A checkpoint may run the forward of a
        # training step without gradients.
        ends = gradients or (model.training and not torch.is_inference_mode_enabled())
        try:
            names = partial(self._name_parameters, model)
            self.token.forwards += ends
            number = self.token.forwards if ends else 0
            known = running(weights_stay, names, self._forget_changed, self.token, number)
            step = te.autocast(self.recipe)
            with (
                torch.set_grad_enabled(ends),
                step,
                torch.set_grad_enabled(gradients),
                small,
                known as forward,
            ):
                yield
                forward.needs_update = te.needs_update()
        finally:
            self.entered = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run the inner calls of a forward in the model's own dtype."""
        if not self.entered:
            yield
            return
        from te_transform.backends import te

        with te.autocast(self.recipe, enabled=False):
            yield

    def _name_parameters(self, model: nn.Module) -> None:
        self.shared = None
        for name, parameter in _named_parameters(model):
            state = state_of(parameter)
            self.states.add(state)
            if state.model is not self.token:
                state.model, state.in_fp8 = self.token, None
            state.name = name
            state.saved = self.loaded.get(name)
            if name in self.products:  # a tied parameter has several names, `products` has one of them
                state.in_fp8 = self.products[name]

    @property
    def is_delayed(self) -> bool:
        """True if the recipe computes scales from earlier steps."""
        from te_transform.backends import te

        return te.is_delayed(self.recipe)

    def _agree(self, model: nn.Module) -> None:
        """Agree on the scales of this step among the processes that share the weights of `model`."""
        self.groups = groups_of(model)
        if not self.groups:
            return
        kernels = self._kernels()
        if self.shared is None or not self.shared.is_of(kernels):
            self._name_parameters(model)
            numbers = {name: number for number, name in enumerate(matrices(model))}
            self.shared = scale_table.RankTable(kernels, numbers, next(model.parameters()).device)
        self.shared.agree(partial(maximum, groups=self.groups))

    def _kernels(self) -> list[Any]:
        return [kernel for state in self.states for kernel in state.kernels.values()]

    def scales(self, model: nn.Module) -> dict[str, scale_table.ScaleRow]:
        """Return the state of delayed scaling by weight name.

        The state belongs to all processes that share the model. They must call this together.
        """
        self._name_parameters(model)  # new parameters in joined groups have no name yet
        saved, kernels = self.template(model), self._kernels()
        ran = {name for kernel in kernels for names in scale_table.joined_names(kernel) for name in names}
        for name in (self.loaded.keys() & saved.keys()) - ran:
            saved[name] = {key: value.clone() for key, value in self.loaded[name].items()}
        scale_table.save(kernels, saved)
        if self.groups and saved:
            together = partial(maximum, groups=self.groups)
            scale_table.combine_ranks(saved, together, next(model.parameters()).device)
        return saved

    def template(self, model: nn.Module) -> dict[str, scale_table.ScaleRow]:
        """Return scales() of a model that has not run."""
        names = [name for name in matrices(model) if self.products.get(name, True)]
        return scale_table.template(names, self.recipe.amax_history_len)

    def load_scales(self, saved: Mapping[str, scale_table.ScaleRow]) -> None:
        """Begin the next call with the result of scales()."""
        self.loaded = saved
        for state in self.states:
            state.kernels.clear()
            state.model = None

    def _forget_loaded(self) -> None:
        """Forget the loaded scales of parameters that have run in training since; they are outdated."""
        if not self.loaded:
            return
        trained = (kernel for kernel in self._kernels() if kernel.last)
        ran = {name for kernel in trained for names in scale_table.joined_names(kernel) for name in names}
        self.loaded = {name: row for name, row in self.loaded.items() if name not in ran}
        for state in self.states:
            state.saved = self.loaded.get(state.name)

    def _forget_changed(self) -> None:
        """Free cached quantized weights whose parameters have changed, judged by samples."""
        kept = [kernel for kernel in self._kernels() if kernel.kept.sample is not None]
        if recorded() or not any(_changed(kept)):
            return
        for kernel in kept:
            if any(_changed([kernel])):
                kernel.forget_weights()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("states", "token")}
        return {**kept, "entered": False, "groups": (), "loaded": {}, "shared": None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept, states=WeakSet(), token=_Token())


def _changed(kernels: list[Any]) -> Iterator[bool]:
    """Yield for each device which samples differ from those at quantization. Synchronizes once per device."""
    by_device = grouped((kernel.kept.sample.device, kernel) for kernel in kernels)
    for kernels_there in by_device.values():
        now = [parameter for kernel in kernels_there for parameter in kernel.parameters()]
        before = torch.cat([kernel.kept.sample for kernel in kernels_there])
        yield not now or not torch.equal(before, sample_of(now))


def matrices(model: nn.Module) -> list[str]:
    """Return the names of parameters that may be the first of a product."""
    return [name for name, parameter in _named_parameters(model) if parameter.dim() >= 2]


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    named = model.named_parameters(remove_duplicate=False)
    return ((without_wrappers(name), parameter) for name, parameter in named)
