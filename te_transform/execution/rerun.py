"""Calling a function of tensors once more, as it was called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from te_transform.backends.joined import known_as
from te_transform.execution.writes import unwritten

Run = Callable[..., Sequence[Any]]


def call_on_views(
    run: Run, arguments: Sequence[Any], trained: Sequence[int]
) -> tuple[list[Any], list[Tensor]]:
    """What the function returns, and views of these arguments, to which gradients lead and no further.

    Some arguments are computed from others, and each gets its own part. Hooks of parameters see what leaves a
    replay, once. And autograd, which goes back in the streams that a forward ran in, remembers another one
    for parameters.
    """
    views = {id(arguments[place]): _view(arguments[place]) for place in trained}
    found = run(*(views.get(id(argument), argument) for argument in arguments))
    # what is returned as it was given is the argument itself
    own = {id(view): arguments[place] for place, view in zip(trained, views.values(), strict=True)}
    return [own.get(id(output), output) for output in found], [*views.values()]


def _view(argument: Tensor) -> Tensor:
    return known_as(argument.view_as(argument), argument)


def gradients_of(
    outputs: Sequence[Tensor], arguments: Sequence[Tensor], grads: Sequence[Tensor], **how: bool
) -> tuple[Tensor | None, ...]:
    """Of the arguments; without autocast, which a backward is called outside of."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, arguments, grads, allow_unused=True, **how)


def trained_among(arguments: Sequence[Any]) -> list[int]:
    """The places of the arguments that need a gradient, one for each tensor."""
    return [*{id(a): place for place, a in enumerate(arguments) if is_trained(a)}.values()]


def is_trained(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad and torch.is_grad_enabled()


def autocast_now(device: str) -> dict[str, Any]:
    """What torch.autocast is to be called with for the precision that is on, in a backward outside of it."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {"device_type": device, "dtype": dtype, "enabled": enabled, "cache_enabled": False}


def copied(argument: Tensor) -> Tensor:
    """A tensor of the same numbers and layout, in memory of its own."""
    own = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
    unexpanded(own).copy_(unexpanded(argument.detach()))
    return known_as(own.requires_grad_(is_trained(argument)), argument)


def unexpanded(tensor: Tensor) -> Tensor:
    """The tensor before it was expanded, if it was: what can be written to, for copy_() refuses to write many
    numbers to one place in memory."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]


@contextlib.contextmanager
def as_it_was(arguments: Sequence[Any], writes: Sequence[int]) -> Iterator[None]:
    """Put back what is written to meanwhile, and the states of random generators."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), unwritten() as noted:
        noted.note([arguments[place] for place in writes])
        yield


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)
