"""A compiled function whose backward notices writes to what it saved.

Autograd compares the versions of saved tensors. inductor saves a tensor of its own for the memory of an
input or an output, which does not share the version of that input or output. A write to one of them, as to
logits beside a loss, would change gradients without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_transform.backends.tracing import saving_hooks

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


class VersionChecked:
    """A compiled function that raises in its backward if memory was written that the backward reads.

    Args:
        run: the compiled function. Each call with a backward saves the same tensors.
        own: the indices of arguments that only this library writes to, such as scales.

    Attributes:
        watched: the indices, among arguments and outputs, of tensors in saved memory whose versions autograd
            does not compare; None before the first call with a backward.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], own: Collection[int]):
        self.run, self.own = run, own
        self.watched: Sequence[int] | None = None

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Return the outputs of the function.

        Raises:
            RuntimeError: in the backward, if a watched tensor was written in place since the call.
        """
        outputs = self.run(*arguments)
        # checkpoints save nothing that stays, and offloading saves copies
        if self.watched == () or not torch.is_grad_enabled() or saving_hooks():
            return outputs
        if (node := _compiled_backward_of(outputs)) is not None:
            tensors = (*arguments, *outputs)
            if self.watched is None:
                indices = _watched_among(tensors, node.saved_tensors)
                self.watched = tuple(index for index in indices if index not in self.own)
            if self.watched:
                versions = [_VersionThen(tensors[index]) for index in self.watched]
                node.register_prehook(partial(_check_versions, versions))
        return outputs


class _VersionThen:
    """The version of a tensor, without its memory."""

    def __init__(self, tensor: Tensor):
        self.shape, self.then = tuple(tensor.shape), tensor._version
        self.counter = tensor.detach()  # shares the version, which the next statement does not change
        self.counter.data = _NOTHING


def _check_versions(versions: Iterable[_VersionThen], _: Any) -> None:
    for version in versions:
        if version.counter._version != version.then:
            raise RuntimeError(
                "expected inputs and outputs of a compiled model that are not written before its backward, "
                f"got a write in place to a tensor of shape {version.shape}, which the backward reads; write "
                "to a copy (`tensor.clone()`), or convert the model without `compile=`"
            )


def _compiled_backward_of(outputs: Iterable[Any]) -> Any:
    """Return the node of a compiled function's backward, or None if no output has a gradient."""
    node = next((each.grad_fn for each in outputs if isinstance(each, Tensor) and each.requires_grad), None)
    while node is not None and not isinstance(node, BackwardCFunction):  # of a view of an output
        node = next((after for after, _ in node.next_functions if after is not None), None)
    return node


def _watched_among(tensors: Sequence[Any], saved: Iterable[Tensor | None]) -> Iterator[int]:
    """Yield the indices of tensors in the memory of saved tensors that do not share their versions."""
    extents = [(each, *_extent(each)) for each in saved if each is not None and _has_memory(each)]
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor) and _has_memory(tensor):
            start, end = _extent(tensor)
            inside = [each for each, first, last in extents if first < end and start < last]
            if inside and not any(each is tensor or _share_a_version(tensor, each) for each in inside):
                yield index


def _has_memory(tensor: Tensor) -> bool:
    """Return True unless a tensor is empty, FSDP has freed its memory, or other tensors hold its values."""
    return not is_traceable_wrapper_subclass(tensor) and tensor.numel() > 0 and tensor.data_ptr() != 0


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the byte after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _share_a_version(one: Tensor, other: Tensor) -> bool:
    before = other._version
    with torch.autograd._unsafe_preserve_version_counter(one):
        torch.autograd.graph.increment_version(one)
        return other._version != before
