"""Cut the sequences of a batch: every tensor that has the sequence dimension of the inputs."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from te_transform.training.length_schedule import CurriculumError

Dims = Mapping[str | int, int | tuple[int, ...]]

# the names of tensors that say how long the uncut sequences are
_SIZES = re.compile(r"cu_?seq|seq_?len|max_?seq|(^|_)lengths?(_[qk])?$|^(n|num)_tokens$")
# the names of tensors [batch, n] that are as long as the inputs, and the names of such tensors of integers
_AS_LONG = re.compile(r"^((attention|loss)_mask|(position|token_type)_ids)$")
_AS_LONG_IF_INTEGERS = re.compile(r"^((shift_)?labels|targets?|\d+)$")


@dataclass(frozen=True)
class Cutter:
    """A cutter of batches to a length, by truncating or by reshaping.

    `inputs` is the name of the tensor with the sequences. `dims` has the sequence dimensions of tensors by
    name, if sizes do not determine them. () leaves a tensor alone.

    Raises:
        CurriculumError: `inputs` or `dims` has another form.
    """

    max_length: int
    reshape: bool
    inputs: str | int | None
    dims: Dims

    def __post_init__(self) -> None:
        if self.inputs is not None and not isinstance(self.inputs, (str, int)):
            raise CurriculumError(
                f"expected inputs to be a key or an index of a batch, got {self.inputs!r}; pass the name of "
                "the tensor with the sequences, or None"
            )
        are_dims = isinstance(self.dims, Mapping) and all(map(_is_dims, self.dims.values()))
        if not are_dims:
            raise CurriculumError(
                "expected dims to map names to sequence dimensions, such as {'hidden': 1} or {'image': ()}, "
                f"got {self.dims!r}; pass an integer or a tuple of integers for each name"
            )

    def cut(self, batch: Any, length: int) -> tuple[Any, int]:
        """Return `batch` with sequences of `length` tokens, in containers of its types, and its positions.

        Raises:
            CurriculumError: the batch has no inputs of [batch, sequence, ...], inputs longer than
                `max_length`, labels of another length, or a tensor with an unclear sequence dimension.
        """
        for path, tensor in tensors(batch):
            self._check_layout(path, tensor)
        name, inputs = self.inputs_of(batch)
        rows, size = inputs.shape[:2]
        if size > self.max_length:
            raise CurriculumError(
                f"expected sequences of at most max_length={self.max_length}, got {name} {[*inputs.shape]}; "
                f"raise max_length, or truncate the data to {self.max_length} tokens"
            )
        is_cut = size > length
        planned = {path: self._dims(path, tensor, rows, size, is_cut) for path, tensor in tensors(batch)}
        if not is_cut:
            return batch, rows * size
        if self.reshape:
            for path, tensor in tensors(batch):
                self._check_reshapes(path, tensor, planned[path], rows)
        divide = _reshaped_rows if self.reshape else _truncated
        kept = size // length * length if self.reshape else length
        return rebuilt(batch, lambda path, tensor: divide(path, tensor, planned[path], length)), rows * kept

    def inputs_of(self, batch: Any) -> tuple[str, Tensor]:
        """Return the name and the tensor of the inputs, [batch, sequence, ...].

        Raises:
            CurriculumError: the batch has none.
        """
        by_path = dict(tensors(batch))
        wanted = "input_ids" if self.inputs is None else str(self.inputs)
        named = next((path for path in by_path if wanted in (path, _last(path))), None)
        if named is None and self.inputs is None:
            by_dims = {tensor.dim(): path for path, tensor in reversed(by_path.items())}
            named = by_dims.get(2, by_dims.get(3))
        if named is None or by_path[named].dim() < 2:
            shapes = {path: [*tensor.shape] for path, tensor in by_path.items()}
            raise CurriculumError(
                f"expected inputs of [batch, sequence] in the batch, got a {type(batch).__name__} with "
                f"{shapes or 'no tensors'}; pass inputs='the name of the inputs', or batches of tensors, "
                "dicts, tuples or dataclasses"
            )
        return named, by_path[named]

    def _check_layout(self, path: str, tensor: Tensor) -> None:
        """Raise if a tensor has no strides, and is not declared to be left alone."""
        if (tensor.is_nested or tensor.layout is not torch.strided) and self._declared(path) != ():
            name = "nested" if tensor.is_nested else "sparse"
            raise CurriculumError(
                f"expected padded or packed tensors, got {path} as a {name} tensor; pad it, cut the samples "
                f"before they are joined, or pass dims={{{_last(path)!r}: ()}} to leave it alone"
            )

    def _dims(self, path: str, tensor: Tensor, rows: int, size: int, is_cut: bool) -> tuple[int, ...]:
        """Return the sequence dimensions of a tensor. They may be ambiguous in a batch that is not cut."""
        name = _last(path)
        if (declared := self._declared(path)) is not None:
            return _check_dims(path, tensor, declared, size)
        if _SIZES.search(name) and tensor.dim() < 2:
            raise CurriculumError(
                f"expected sequences whose lengths their shapes have, got {path} {[*tensor.shape]} with the "
                f"uncut lengths; drop it, cut samples before they are packed, or pass dims={{{name!r}: ()}} "
                "to leave it alone"
            )
        dims = _sequence_dims(path, tensor.shape, rows, size)
        if dims is None and is_cut:
            raise CurriculumError(
                f"expected to tell the sequence dimension of {path} {[*tensor.shape]} beside inputs of "
                f"{[rows, size]}, got {tensor.shape.count(size)} dimensions of {size}; pass "
                f"dims={{{name!r}: 1}} with the dimension, or dims={{{name!r}: ()}} to leave it alone"
            )
        if dims == () and tensor.dim() == 2 and _is_as_long(name, tensor):
            raise CurriculumError(
                f"expected {path} as long as the inputs [{rows}, {size}], got {[*tensor.shape]}; give both "
                f"the same length, or pass dims={{{name!r}: ()}} to leave {path} alone"
            )
        return dims or ()

    def _declared(self, path: str) -> tuple[int, ...] | None:
        """Return the dimensions that the caller declared for a tensor, or None."""
        name = _last(path)
        names = (path, name, int(name)) if name.isdigit() else (path, name)
        declared = next((self.dims[each] for each in names if each in self.dims), None)
        return declared if declared is None else (declared,) if isinstance(declared, int) else tuple(declared)

    def _check_reshapes(self, path: str, tensor: Tensor, dims: tuple[int, ...], rows: int) -> None:
        """Raise if a tensor has one entry per row of the batch, and cannot be divided like the rows."""
        is_free = not dims and (self._declared(path) == () or tensor.shape[:1] != (rows,))
        if not is_free and (dims != (1,) or tensor.shape[0] != rows):
            raise CurriculumError(
                f"expected tensors of [batch, sequence, ...] to reshape, got {path} {[*tensor.shape]}; drop "
                f"{path} from the batch, or pass reshape=False"
            )


def _is_dims(value: Any) -> bool:
    """Return True for a dimension or several dimensions."""
    return isinstance(value, int) or (isinstance(value, (tuple, list)) and all(map(_is_dims, value)))


def _is_as_long(name: str, tensor: Tensor) -> bool:
    """Return True if a tensor of this name must be as long as the inputs. Labels in floats are classes."""
    is_integer = not tensor.is_floating_point()
    return bool(_AS_LONG.match(name) or (is_integer and _AS_LONG_IF_INTEGERS.match(name)))


def _sequence_dims(path: str, shape: torch.Size, rows: int, size: int) -> tuple[int, ...] | None:
    """Return the sequence dimensions of a tensor of this shape, or None if they are ambiguous."""
    last = len(shape) - 1
    if size not in shape or not shape:
        return ()
    if len(shape) == 1:  # [sequence], as cache_position
        return (0,) if rows != size else None
    if len(shape) == 2:
        return (1,) if shape[1] == size and shape[0] in (rows, 1) else None
    if path.endswith("position_ids"):  # [3, batch, sequence] of multi-modal rotary embeddings
        return (last,) if shape[last] == size and shape[last - 1] in (rows, 1) else None
    is_mask = "mask" in path or "bias" in path  # [batch, query, key], [batch, head, query, key]
    if is_mask and shape[last] == size and shape[last - 1] in (size, 1):
        return (last - 1, last) if shape[last - 1] == size else (last,)
    if shape[1] == size and shape[0] == rows and shape.count(size) == 1 + (rows == size):
        return (1,)  # [batch, sequence, ...]
    return None


def _check_dims(path: str, tensor: Tensor, dims: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the declared sequence dimensions of a tensor, after a check of their sizes."""
    if wrong := [dim for dim in dims if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != size]:
        raise CurriculumError(
            f"expected dimension {wrong[0]} of {path} to have the {size} tokens of the inputs, got "
            f"{[*tensor.shape]}; correct dims={{{path!r}: {dims}}}"
        )
    return tuple(dim % tensor.dim() for dim in dims)


def _truncated(path: str, tensor: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """Return the first `length` tokens."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, length)
    return _contiguous(tensor) if dims else tensor


def _reshaped_rows(path: str, tensor: Tensor, dims: tuple[int, ...], length: int) -> Tensor:
    """Return [batch, sequence, ...] as [batch * rows, length, ...], without the incomplete last row."""
    if not dims:
        return tensor
    rows = tensor.shape[1] // length
    parts = tensor.narrow(1, 0, rows * length).unflatten(1, (rows, length)).flatten(0, 1)
    return _contiguous(_restarted(parts) if _last(path) == "position_ids" else parts)


def _restarted(positions: Tensor) -> Tensor:
    """Return positions [rows, length] that start at 0 in each row, also in the middle of a sequence."""
    breaks = positions[:, 1:] != positions[:, :-1] + 1
    breaks = torch.nn.functional.pad(breaks, (1, 0))
    return torch.where(breaks.cumsum(1) == 0, positions - positions[:, :1], positions)


def _contiguous(part: Tensor) -> Tensor:
    """Return a contiguous tensor, pinned if the given one was.

    A slice has the strides of the whole tensor. Compiled graphs have guards on strides, and a copy of a slice
    to the GPU goes through memory that is not pinned.
    """
    if part.is_contiguous():
        return part
    if not part.is_pinned():
        return part.contiguous()
    pinned = torch.empty(part.shape, dtype=part.dtype, device=part.device, pin_memory=True)
    return pinned.copy_(part)


def tensors(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with their paths, such as "text.input_ids" or "0"."""
    if isinstance(batch, Tensor):
        yield path or "0", batch
        return
    for name, value in _batch_parts(batch):
        yield from tensors(value, f"{path}.{name}" if path else str(name))


def rebuilt(batch: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a copy of a batch, in containers of the same types, with each tensor changed."""
    if isinstance(batch, Tensor):
        return change(path or "0", batch)
    parts = {
        name: rebuilt(value, change, f"{path}.{name}" if path else str(name))
        for name, value in _batch_parts(batch)
    }
    if isinstance(batch, MutableMapping):
        twin = copy.copy(batch)  # a BatchEncoding has more than its items
        for name, value in parts.items():
            twin[name] = value
        return twin
    if isinstance(batch, Mapping):
        return type(batch)(parts)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*parts.values())
    if isinstance(batch, (tuple, list)):
        return type(batch)(parts.values())
    return replace(batch, **parts) if parts else batch


def _batch_parts(batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a container by their names, or nothing if the value is no container."""
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, (tuple, list)):
        yield from enumerate(batch)
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from ((each.name, getattr(batch, each.name)) for each in fields(batch) if each.init)


def _last(path: str) -> str:
    return path.rpartition(".")[2]
