"""The outputs of two models in a case: paired by name or order, without padding, with updated buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.inputs import Inputs
from te_transform.graph.nodes import dtype_name
from te_transform.graph.state_snapshot import same_bits
from te_transform.verify.names import plain_name
from te_transform.verify.replay import named_tensors


class Outputs:
    """The functions that turn a call's result into tensors by name, for the two models of a case.

    The first model's names count. If the second model's names are all different, its tensors are paired by
    order. Buffers that the first model's forward updates, such as running statistics, are outputs. Autocast
    chooses dtypes by operation, so dtypes of outputs may differ under it.
    """

    def __init__(self, visible: Visible, rename: Callable[[str], str | None], autocast: bool):
        self.visible = visible
        self.rename = rename
        self.autocast = autocast
        self.dtypes: dict[str, torch.dtype] = {}
        self.updated: list[str] = []

    def of_first(self, model: nn.Module, call: Callable[[], Any]) -> dict[str, Tensor]:
        """Call the first model, and return its outputs."""
        before = {name: buffer.detach().clone() for name, buffer in _buffers(model).items()}
        found = dict(named_tensors(call()))
        self.dtypes = self.dtypes or {name: tensor.dtype for name, tensor in found.items()}  # not fp64's
        after = _buffers(model)
        # batch norm's kernels update buffers without a new version
        self.updated = [
            name for name in after if name not in before or not same_bits(after[name], before[name])
        ]
        found |= {f"buffer {name}": after[name].detach().clone() for name in self.updated}
        return self._visible(found)

    def of_second(self, model: nn.Module, call: Callable[[], Any]) -> dict[str, Tensor]:
        """Call the second model, and return its outputs under the names of the first's."""
        found = dict(named_tensors(call()))
        if not found.keys() & self.dtypes.keys() and len(found) == len(self.dtypes):
            found = dict(zip(self.dtypes, found.values(), strict=True))
        if self.autocast:
            found = {name: tensor.to(self.dtypes.get(name)) for name, tensor in found.items()}
        after = _buffers(model)
        for name in self.updated:
            if (theirs := self.rename(name)) in after:
                found[f"buffer {name}"] = after[theirs].detach().clone()
        return self._visible(found)

    def _visible(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.visible(name, tensor) for name, tensor in found.items()}


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
