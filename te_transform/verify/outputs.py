"""Outputs of the two models of a case: without padding, with what their forwards write and drop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.inputs import Inputs
from te_transform.graph.nodes import dtype_name
from te_transform.graph.state_snapshot import same_bits
from te_transform.verify.dropouts import Dropouts
from te_transform.verify.names import plain_name
from te_transform.verify.replay import named_tensors

BUFFER, DROPOUT = "buffer ", "dropout with p="  # the starts of names of outputs


class Outputs:
    """The functions that turn a call's result into tensors by name, for the two models of a case.

    The first model's names count. If the second model's names are all different, its tensors are paired by
    order. Autocast chooses dtypes by operation, so dtypes of outputs may differ under it.

    Further outputs are the buffers that a forward updates, such as running statistics, the inputs that it
    writes to, and the probabilities of its dropouts, which are off. The second model may update buffers that
    the first does not have.
    """

    def __init__(self, visible: Visible, rename: Callable[[str], str | None], autocast: bool):
        self.visible = visible
        self.rename = rename
        self.autocast = autocast
        self.dtypes: dict[str, torch.dtype] = {}
        self.buffers: dict[str, str] = {}  # the first model's names by the second's
        self.updated: set[str] = set()

    def of_first(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Call the first model, and return its outputs."""
        with _Effects(model, args, kwargs) as effects:
            found = dict(named_tensors(model(*args, **kwargs)))
        self.dtypes = self.dtypes or {name: tensor.dtype for name, tensor in found.items()}  # not fp64's
        self.buffers = {self.rename(name) or "": name for name in _buffers(model)}
        self.updated = {*effects.updated}
        found |= {f"{BUFFER}{name}": buffer for name, buffer in effects.updated.items()}
        return self._visible(found | effects.others)

    def of_second(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Call the second model, and return its outputs under the names of the first's."""
        with _Effects(model, args, kwargs) as effects:
            found = dict(named_tensors(model(*args, **kwargs)))
        if not found.keys() & self.dtypes.keys() and len(found) == len(self.dtypes):
            found = dict(zip(self.dtypes, found.values(), strict=True))
        if self.autocast:
            found = {name: tensor.to(self.dtypes.get(name)) for name, tensor in found.items()}
        saved = set(map(plain_name, model.state_dict()))  # others may be caches
        for name, buffer in _buffers(model).items():
            own = self.buffers.get(name, "")
            if own in self.updated or (own and name in saved & effects.updated.keys()):
                found[f"{BUFFER}{own}"] = buffer.detach().clone()
        return self._visible(found | effects.others)

    def _visible(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.visible(name, tensor) for name, tensor in found.items()}


class _Effects:
    """The context of a call that finds the buffers and inputs which it writes to, and the active dropouts.

    Attributes:
        updated: Copies of the updated buffers by name.
        others: Copies of the inputs that were written to, and a tensor for each probability.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        self.model, self.given = model, dict(named_tensors((*args, kwargs)))
        self.dropouts = Dropouts()

    def __enter__(self) -> _Effects:
        self.before = {name: buffer.detach().clone() for name, buffer in _buffers(self.model).items()}
        self.inputs = {name: tensor.detach().clone() for name, tensor in self.given.items()}
        self.dropouts.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.dropouts.__exit__(*error)
        # batch norm's kernels update buffers without a new version
        self.updated = _copies_of_changed(self.before, _buffers(self.model))
        written = _copies_of_changed(self.inputs, self.given)
        self.others = {f"written input {name}": tensor for name, tensor in written.items()}
        self.others |= {
            f"{DROPOUT}{p:g}": torch.ones((), dtype=torch.bool, device="cpu")
            for p in self.dropouts.probabilities
        }


def _copies_of_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors that are new or have other values than before."""
    return {
        name: tensor.detach().clone()
        for name, tensor in after.items()
        if name not in before or not same_bits(tensor, before[name])
    }


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


def check_outputs(models: tuple[nn.Module, nn.Module], first: Any, second: Any) -> None:
    """Raise unless the results of the two models can be compared.

    Raises:
        ValueError: a result has no tensors, or the tensors cannot be paired; the message lists them.
    """
    found = [dict(named_tensors(result)) for result in (first, second)]
    for model, result, tensors in zip(models, (first, second), found, strict=True):
        if not tensors:
            raise ValueError(
                f"expected tensors from {type(model).__name__}, got a {type(result).__name__}; return a "
                "tensor, or a tuple, dict or dataclass of tensors"
            )
    if not found[0].keys() & found[1].keys() and len(found[0]) != len(found[1]):
        one, other = (
            f"{_listed(tensors)} from {type(model).__name__}"
            for model, tensors in zip(models, found, strict=True)
        )
        raise ValueError(
            f"expected outputs with the same names or number, got {one} and {other}; wrap one model in a "
            "module that returns what the other returns"
        )


def _listed(tensors: dict[str, Tensor]) -> str:
    kinds = (f"{name or 'a tensor'} ({dtype_name(t.dtype)}{list(t.shape)})" for name, t in tensors.items())
    return ", ".join(kinds)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): b for name, b in model.named_buffers() if not b.is_inference()}
