"""Derive inputs from example inputs: fresh values, other sizes, left padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.canonicalize.attention import HIDES
from te_transform.graph.inputs import Inputs
from te_transform.graph.names import forward_parameters

EXAMPLE, LEFT_PADDED = "example inputs", "left-padded"


@dataclass(frozen=True)
class Variation:
    """A set of inputs; `apart` holds alternatives for a model that rejects this set."""

    label: str
    inputs: Inputs
    apart: tuple[Variation, ...] = ()


@dataclass(frozen=True)
class _Size:
    """A change of one size, in some dimensions."""

    given: int
    wanted: int
    dims: slice

    def __str__(self) -> str:
        return f"size {self.wanted} instead of {self.given}"


def variations(model: nn.Module, samples: list[Inputs]) -> Iterator[Variation]:
    """Yield each sample, then the first with fresh values, with another batch and length, and left-padded.

    Dimensions are identified by the value of their size in the example. The model may reject other sizes.
    Both sizes change at once, which needs only one capture; they change separately if the model rejects that.
    """
    for number, sample in enumerate(samples, 1):
        yield Variation(EXAMPLE + (f" {number}" if len(samples) > 1 else ""), sample)
    first, generator = samples[0], torch.Generator().manual_seed(0)
    yield Variation("fresh values", _varied(first, generator))
    sizes = _other_sizes(first)
    apart = tuple(Variation(str(size), _varied(first, generator, [size])) for size in sizes)
    if len(apart) > 1:
        yield Variation(" and ".join(map(str, sizes)), _varied(first, generator, sizes), apart)
    else:
        yield from apart
    parameters = forward_parameters(model)
    fresh = _varied(first, generator)
    named = dict(zip(parameters, fresh.args, strict=False))
    ids = fresh.kwargs.get("input_ids", named.get("input_ids"))
    if isinstance(ids, Tensor) and ids.dim() == 2 and "attention_mask" in parameters:
        if "attention_mask" in named:  # by position
            fresh = Inputs((), {**named, **fresh.kwargs})
        padded = {**fresh.kwargs, "attention_mask": _left_padded(ids)}
        yield Variation(LEFT_PADDED, Inputs(fresh.args, padded))


def one_row(inputs: Inputs, models: Iterable[nn.Module]) -> Iterator[Variation]:
    """Yield a variation with a batch of one, where squeezed and broadcast dimensions show.

    The row is longer than the example if no table of the models ends before: beyond the end of a table, a GPU
    stops. If the model rejects longer rows, the row has the length of the example.
    """
    batch, length = _batch_and_length(inputs)
    if batch is None or batch == 1:
        return
    same, generator = batch == length, torch.Generator().manual_seed(0)
    one = _Size(batch, 1, slice(0, 1) if same else slice(None))
    alone = Variation(str(one), _varied(inputs, generator, [one]))
    longer = length + max(1, length // 3) if length is not None else 0
    if length is None or any(length <= size < longer for model in models for size in _table_sizes(model)):
        yield alone
        return
    more = _Size(length, longer, slice(1, None) if same else slice(None))
    yield Variation(f"{one} and {more}", _varied(inputs, generator, [one, more]), (alone,))


def _table_sizes(model: nn.Module) -> Iterator[int]:
    """Yield the sizes of buffers and embeddings, which positions may index."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module.num_embeddings
    for buffer in model.buffers():
        yield from buffer.shape


def _left_padded(ids: Tensor) -> Tensor:
    """Return a mask [batch, length], 0 for padding and 1 elsewhere.

    A third of the first row is padding, and less in each row below.
    """
    batch, length = ids.shape
    missing = torch.arange(batch, 0, -1, dtype=torch.int64, device=ids.device) * length // (3 * batch)
    return (torch.arange(length, dtype=torch.int64, device=ids.device) >= missing[:, None]).long()


def _batch_and_length(inputs: Inputs) -> tuple[int | None, int | None]:
    """Return batch size and length: the first two sizes of the first tensor, or the length of ids."""
    tensors = [t for t in tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, Tensor) and t.dim() > 0]
    if not tensors:
        return None, None
    ids = [t for t in tensors if t.dim() > 1 and not t.is_floating_point() and not _is_mask(t)]
    tokens = [t for t in (*ids, tensors[0]) if t.dim() in (2, 3)]  # more dimensions: an image
    return tensors[0].shape[0], tokens[0].shape[1] if tokens else None


def _other_sizes(inputs: Inputs) -> list[_Size]:
    batch, length = _batch_and_length(inputs)
    same, sizes = batch == length, []
    if batch is not None:
        sizes.append(_Size(batch, batch + 1, slice(0, 1) if same else slice(None)))
    if length is not None:
        other = length - max(1, length // 3) if length > 1 else 2  # shorter, because models limit the length
        sizes.append(_Size(length, other, slice(1, None) if same else slice(None)))
    return sizes


def _varied(inputs: Inputs, generator: torch.Generator, sizes: Sequence[_Size] = ()) -> Inputs:
    """Return inputs with fresh values and other sizes."""
    fresh: dict[int, Tensor] = {}  # one tensor passed twice stays one tensor

    def varied(tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key not in fresh:
            mask = _is_mask(tensor)
            features = (
                tensor.dim() - 1 if tensor.is_floating_point() and tensor.dim() > 2 and not mask else -1
            )
            changes = [
                (dim, size) for size in sizes for dim in range(tensor.dim())[size.dims]
                if tensor.shape[dim] == size.given and dim != features
            ]  # fmt: skip
            for dim, size in changes:
                index = torch.arange(size.wanted, dtype=torch.int64, device=tensor.device)
                tensor = tensor.index_select(dim, index.clamp(max=size.given - 1))
            fresh[key] = tensor if mask else _fresh(tensor, generator)
        return fresh[key]

    return Inputs(*tree_map_only(Tensor, varied, (inputs.args, inputs.kwargs)))


def _is_mask(tensor: Tensor) -> bool:
    """Return True for at most two distinct values: their positions have a meaning."""
    return tensor.dtype is torch.bool or tensor.unique().numel() <= 2


def only_hides(tensor: Tensor) -> bool:
    """Return True if a floating-point tensor is an additive mask: zeros, and values so low that they hide."""
    return tensor.numel() > 0 and bool(((tensor == 0) | (tensor <= HIDES)).all())


def _fresh(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return new values: normal ones of the same mean and scale, or integers drawn from the tensor."""
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu").to(tensor)
        return noise * tensor.std() + tensor.mean()
    picked = torch.randint(tensor.numel(), tensor.shape, generator=generator, dtype=torch.int64, device="cpu")
    return tensor.flatten()[picked.to(tensor.device)] if not tensor.is_complex() else tensor
