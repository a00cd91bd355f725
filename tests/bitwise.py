"""The state that must not change when a conversion fails: everything of a model, down to the objects."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn


def state_of(model: nn.Module, storages: bool = True) -> dict[str, Any]:
    """All of `model` in a form that compares equal only to itself, unchanged, and the random states.

    With `storages` False tensors may have moved to other memory, of their own.
    """
    found: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
    found["numpy"] = str(numpy.random.get_state())
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path}: class"] = type(module)
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = _content(value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{path}.{name}: tensor"] = _tensor(tensor, storages)
    return found


def _content(value: Any) -> Any:
    """The object, and what a container holds, in its order."""
    if isinstance(value, dict):
        return id(value), [(key, id(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [*map(id, value)]
    return value if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _tensor(tensor: Tensor, storages: bool) -> tuple:
    if nn.parameter.is_lazy(tensor):
        return id(tensor), type(tensor)
    place = tensor.data_ptr() if storages else tensor.untyped_storage().nbytes() == tensor.nbytes
    grad = None if tensor.grad is None else (id(tensor.grad), _bytes(tensor.grad))
    return id(tensor), _bytes(tensor), tensor.requires_grad, tensor.is_leaf, tensor.stride(), grad, place


def _bytes(tensor: Tensor) -> Any:
    if tensor.is_meta:
        return tensor.shape, tensor.dtype, tensor.device
    return tensor.dtype, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before.keys() | after.keys() if before.get(key, "none") != after.get(key, "none")]


@contextmanager
def untouched(model: nn.Module, storages: bool = True) -> Iterator[None]:
    """Check that the body leaves `model` and the random states bitwise what they were."""
    before = state_of(model, storages)
    yield
    assert differences(before, state_of(model, storages)) == []
