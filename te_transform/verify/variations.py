"""Inputs made from example inputs: fresh values, other sizes, left padding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.graph.inputs import Inputs

EXAMPLE = "example inputs"


def variations(model: nn.Module, samples: list[Inputs]) -> Iterator[tuple[str, Inputs]]:
    """Each sample, then the first with fresh values, another batch, another length, left-padded; with labels.

    A size is known by the value that it has in the example. Whether the model runs at others, it has to say.
    """
    for number, sample in enumerate(samples, 1):
        yield EXAMPLE + (f" {number}" if len(samples) > 1 else ""), sample
    first, generator = samples[0], torch.Generator().manual_seed(0)
    yield "fresh values", _varied(first, generator)
    batch, length = _sizes(first)
    if batch is not None:
        dims = slice(0, 1) if batch == length else slice(None)
        yield f"size {batch + 1} instead of {batch}", _varied(first, generator, batch, batch + 1, dims)
    if length is not None:
        dims = slice(1, None) if batch == length else slice(None)
        other = length - max(1, length // 3) if length > 1 else 2  # shorter: every model has a longest
        yield f"size {other} instead of {length}", _varied(first, generator, length, other, dims)
    ids = first.kwargs.get("input_ids", first.args[0] if first.args else None)
    if isinstance(ids, Tensor) and ids.dim() == 2 and {"input_ids", "attention_mask"} <= _parameters(model):
        fresh = _varied(first, generator)
        yield "left-padded", Inputs(fresh.args, {**fresh.kwargs, "attention_mask": _left_padded(ids)})


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _left_padded(ids: Tensor) -> Tensor:
    """[batch, length] of 0 and 1, 0 where there is padding: a third of the first row, less in each below."""
    batch, length = ids.shape
    missing = torch.arange(batch, 0, -1, device=ids.device) * length // (3 * batch)
    return (torch.arange(length, device=ids.device) >= missing[:, None]).long()


def _sizes(inputs: Inputs) -> tuple[int | None, int | None]:
    """The batch, the first size of the first tensor, and the length, its next one or that of ids."""
    tensors = [t for t in tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, Tensor) and t.dim() > 0]
    if not tensors:
        return None, None
    ids = [t for t in tensors if t.dim() > 1 and not t.is_floating_point() and not _is_mask(t)]
    tokens = [t for t in (*ids, tensors[0]) if t.dim() in (2, 3)]  # more are an image's
    return tensors[0].shape[0], tokens[0].shape[1] if tokens else None


def _varied(
    inputs: Inputs, generator: torch.Generator, size: int = -1, wanted: int = 0, dims: slice = slice(None)
) -> Inputs:
    """Fresh values, and `wanted` wherever a tensor has `size` among its dimensions `dims`."""
    made: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor

    def varied(tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key not in made:
            mask = _is_mask(tensor)
            features = (
                tensor.dim() - 1 if tensor.is_floating_point() and tensor.dim() > 2 and not mask else -1
            )
            for dim in range(tensor.dim())[dims]:
                if tensor.shape[dim] == size and dim != features:
                    index = torch.arange(wanted, device=tensor.device).clamp(max=size - 1)
                    tensor = tensor.index_select(dim, index)
            made[key] = tensor if mask else _fresh(tensor, generator)
        return made[key]

    return Inputs(*tree_map_only(Tensor, varied, (inputs.args, inputs.kwargs)))


def _is_mask(tensor: Tensor) -> bool:
    """At most two different values: they mean something where they are."""
    return tensor.dtype is torch.bool or tensor.unique().numel() <= 2


def _fresh(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other values of the same kind: normal ones of the same mean and scale, or integers that are there."""
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return noise * tensor.std() + tensor.mean()
    picked = torch.randint(tensor.numel(), tensor.shape, generator=generator).to(tensor.device)
    return tensor.flatten()[picked] if not tensor.is_complex() else tensor
