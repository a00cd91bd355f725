"""Outputs of the two models of a case: without padding, with what their forwards write and drop."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.inputs import Inputs
from te_transform.graph.state_snapshot import same_bits
from te_transform.verify.dropouts import Dropouts
from te_transform.verify.judged import in_dtype
from te_transform.verify.names import plain_name
from te_transform.verify.replay import held_values, named_tensors

BUFFER, DROPOUT = "buffer ", "dropout with p="  # the starts of names of outputs


class Outputs:
    """The calls of the two models of a case, and their outputs as tensors by name.

    The first call must be one of the first model, whose names count. If the second model's names are all
    different, its tensors are paired by order. Autocast chooses dtypes by operation, so under autocast the
    dtypes of the first call count.

    Further outputs are the buffers that a forward updates, such as running statistics, the inputs that it
    writes to, and the probabilities of its dropouts, which are off. The second model may update buffers that
    the first does not have. Without padding, the held values with names in `held_names` are outputs, too.
    """

    def __init__(
        self,
        first: nn.Module,
        rename: Callable[[str], str | None],
        visible: Visible,
        held_names: Collection[str],
        autocast: bool,
    ):
        self.first, self.rename, self.visible, self.autocast = first, rename, visible, autocast
        self.held_names = held_names if visible.padding is None else ()
        self.dtypes: dict[str, torch.dtype] = {}
        self.results: list[str] = []  # the first model's names of tensors in its result
        self.updated: list[str] = []  # the buffers that the first model updates
        self.names: dict[str, str] = {}  # the first model's names of buffers by the second's

    def of(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Call one of the models, and return its outputs under the names of the first model's."""
        with Dropouts() as dropouts:
            result, updated, written = _call_noting_updates(model, args, kwargs)
        tensors, held_tensors = dict(named_tensors(result)), dict(held_values(result))
        held_tensors = {name: tensor for name, tensor in held_tensors.items() if name in self.held_names}
        buffers = _buffers(model)
        if not self.dtypes:
            self._note_first(tensors, held_tensors, buffers, updated)
        outputs = self._renamed(tensors) | held_tensors
        if self.autocast:
            outputs = {name: in_dtype(tensor, self.dtypes.get(name)) for name, tensor in outputs.items()}
        outputs |= self._updated_buffers(model, buffers, updated)
        outputs |= written
        active = torch.ones((), dtype=torch.bool, device="cpu")
        outputs |= {f"{DROPOUT}{p:g}": active for p in dropouts.probabilities}
        return {name: self.visible(name, tensor) for name, tensor in outputs.items()}

    def _note_first(
        self,
        tensors: dict[str, Tensor],
        held_tensors: dict[str, Tensor],
        buffers: dict[str, Tensor],
        updated: list[str],
    ) -> None:
        """Note names and dtypes of the first call, which is one of the first model."""
        self.dtypes = {name: tensor.dtype for name, tensor in (tensors | held_tensors).items()}
        self.results, self.updated = [*tensors], updated
        self.names = {self.rename(name) or "": name for name in buffers}

    def _renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a result, paired by order with the first model's if all names differ."""
        if tensors.keys() & {*self.results} or len(tensors) != len(self.results):
            return tensors
        return dict(zip(self.results, tensors.values(), strict=True))

    def _updated_buffers(
        self, model: nn.Module, buffers: dict[str, Tensor], updated: list[str]
    ) -> dict[str, Tensor]:
        """Return copies of the buffers that one of the models updates, if the first has them."""
        saved, copies = set(map(plain_name, model.state_dict())), {}  # others may be caches
        for name, buffer in buffers.items():
            own = name if model is self.first else self.names.get(name, "")
            if own in self.updated or (own and name in updated and name in saved):
                copies[f"{BUFFER}{own}"] = buffer.detach().clone()
        return copies


def with_effects(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call a model. Return its result under the name "", and what the call updates under names of its own."""
    result, updated, written = _call_noting_updates(model, args, kwargs)
    buffers = _buffers(model)
    return {"": result, **_copies({f"{BUFFER}{name}": buffers[name] for name in updated}), **written}


def _call_noting_updates(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, list[str], dict[str, Tensor]]:
    """Return the result of a call, the names of the buffers that it updates, and copies of written inputs."""
    given = dict(named_tensors((*args, kwargs)))
    given_before, buffers_before = _copies(given), _copies(_buffers(model))
    result = model(*args, **kwargs)
    updated = _names_of_changed(buffers_before, _buffers(model))
    written = {f"written input {name}": given[name] for name in _names_of_changed(given_before, given)}
    return result, updated, _copies(written)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _names_of_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are new or have other values; batch norm sets no new version."""
    return [name for name, t in after.items() if name not in before or not same_bits(t, before[name])]


class Visible:
    """The function that sets tensors [batch, length, ...] to zero where attention_mask is zero.

    Outputs at padding are left to the implementation: attention without any visible key has no result. In an
    encoder-decoder, the mask belongs to the encoder.
    """

    def __init__(self, mask: Any, is_encoder_decoder: bool):
        is_padding = isinstance(mask, Tensor) and mask.dim() == 2 and not bool((mask != 0).all())
        self.padding = mask == 0 if is_padding else None
        self.of_encoder = is_encoder_decoder

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor without its values at padding; its name tells encoder and decoder apart."""
        if self.padding is None or tensor.dim() not in (2, 3) or tensor.shape[:2] != self.padding.shape:
            return tensor
        if self.of_encoder and ("encoder" not in name or "decoder" in name):
            return tensor
        with torch._C.DisableTorchFunction():  # no rounding at random
            return tensor.masked_fill(self.padding.reshape(*tensor.shape[:2], *[1] * (tensor.dim() - 2)), 0)

    def labels(self, inputs: Inputs) -> Inputs:
        """Return the inputs with labels that ignore padding and the first token behind it.

        At padding, a causal model predicts that token.
        """
        labels = inputs.kwargs.get("labels")
        if self.padding is None or self.of_encoder or not isinstance(labels, Tensor):
            return inputs
        if labels.shape != self.padding.shape or labels.is_floating_point():
            return inputs
        hidden = self.padding | self.padding.roll(1, 1)
        return Inputs(inputs.args, {**inputs.kwargs, "labels": labels.masked_fill(hidden, -100)})


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): b for name, b in model.named_buffers() if not b.is_inference()}
