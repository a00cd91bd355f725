"""Rerun a function of tensors with the same inputs, random state and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.fp8.registry import known_as
from te_transform.backends.joined import check_unwritten, versions_of
from te_transform.backends.tracing import needs_gradient
from te_transform.execution.writes import Writes, unwritten

RunGraph = Callable[..., Sequence[Any]]


def call_on_views(
    run: RunGraph, arguments: Sequence[Any], trained: Sequence[int]
) -> tuple[list[Any], list[Tensor]]:
    """Call a function on views of its trained arguments, at which the gradients stop.

    Without views:

    - an argument that is computed from another argument would receive a part of the other gradient;
    - hooks of parameters would run inside of the recording;
    - autograd would use the stream that it remembers for each parameter.

    Returns:
        The outputs, and the views.
    """
    given = (arguments[index] for index in trained)
    views = {id(argument): known_as(argument.view_as(argument), argument) for argument in given}
    outputs = run(*(views.get(id(argument), argument) for argument in arguments))
    # an argument that is returned unchanged is the argument, not its view
    own = {id(view): arguments[index] for index, view in zip(trained, views.values(), strict=True)}
    return [own.get(id(output), output) for output in outputs], [*views.values()]


def gradients_of(
    outputs: Sequence[Tensor], arguments: Sequence[Tensor], grads: Sequence[Tensor], **how: bool
) -> tuple[Tensor | None, ...]:
    """Compute gradients of the arguments with autocast off, as in a backward."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, arguments, grads, allow_unused=True, **how)


def trained_among(arguments: Sequence[Any]) -> list[int]:
    """Return the indices of the arguments that need a gradient, one index for each tensor."""
    return [*{id(a): index for index, a in enumerate(arguments) if is_trained(a)}.values()]


def is_trained(argument: Any) -> bool:
    """Return True if autograd records operations on the argument."""
    return isinstance(argument, Tensor) and needs_gradient(argument)


def autocast_now(device: str) -> dict[str, Any]:
    """Return arguments for torch.autocast that restore the current state in a backward."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": False}


def copy_of(argument: Tensor) -> Tensor:
    """Copy a tensor with its strides into memory of its own."""
    own = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
    unexpanded(own).copy_(unexpanded(argument.detach()))
    return known_as(own.requires_grad_(is_trained(argument)), argument)


def unexpanded(tensor: Tensor) -> Tensor:
    """Return the tensor without its expanded dimensions, because copy_() refuses expanded tensors."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


@contextlib.contextmanager
def as_it_was(arguments: Sequence[Any], writes: Sequence[int]) -> Iterator[None]:
    """Restore the written arguments and the random state at the end."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), unwritten() as noted:
        noted.note([arguments[index] for index in writes])
        yield


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of the device's random generator."""
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


NotedTensor = tuple[Tensor, int, int]  # with its version and address


def noted_tensors(tensors: Sequence[Tensor]) -> list[NotedTensor]:
    """Note version and address of tensors, to detect writes and moves before the backward."""
    return [(tensor, version, tensor.data_ptr()) for tensor, version in versions_of(tensors)]


def check_unchanged(noted: Sequence[NotedTensor]) -> None:
    """Raise if a noted tensor was written to or moved.

    Raises:
        RuntimeError: a tensor has another version or another address.
    """
    check_unwritten([(tensor, version) for tensor, version, _ in noted])
    for tensor, _, address in noted:
        if tensor.data_ptr() != address:
            raise RuntimeError(
                f"expected a tensor of shape {list(tensor.shape)} at the address of the forward, got a new "
                "one before the backward of a CUDA graph; assign to .data after the backward, or convert "
                "with graphs=False"
            )


class CallStart:
    """The arguments of a call and the modes that it starts in, for a rerun in a backward.

    Args:
        arguments: of the call.
        trained: the indices of the arguments that need a gradient.
        writes: the indices of the arguments that the call writes to.
        reads: the indices of the tensors that it does not write to.
    """

    def __init__(
        self, arguments: Sequence[Any], trained: Sequence[int], writes: Sequence[int], reads: Sequence[int]
    ):
        self.arguments, self.trained, self.writes, self.before = arguments, trained, writes, Writes()
        self.before.note([arguments[index] for index in writes])
        self.device = arguments[trained[0]].device
        self.random, self.autocast = random_state(self.device), autocast_now(self.device.type)
        self.read = noted_tensors([arguments[index] for index in reads])

    def gradients(self, run: RunGraph, grads: Mapping[int, Tensor]) -> tuple[Tensor | None, ...]:
        """Rerun the call and return the gradients of its trained arguments.

        Args:
            run: the function that was called.
            grads: the gradients of outputs, by the indices of the outputs.
        """
        check_unchanged(self.read)
        is_recorded = torch.is_grad_enabled()
        with as_it_was(self.arguments, self.writes), torch.enable_grad():
            set_random_state(self.device, self.random)
            self.before.undo()
            with torch.autocast(**self.autocast):
                outputs, trained = call_on_views(run, self.arguments, self.trained)
            used = [outputs[index] for index in grads]
            return gradients_of(used, trained, [*grads.values()], create_graph=is_recorded)
