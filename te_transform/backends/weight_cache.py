"""Weights that an earlier call quantized, and whether they may still be used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from te_transform.backends.joined import parameters_of, state_of

_evaluating = False  # whether the converted model that runs is in evaluation mode, its weights its own


@contextlib.contextmanager
def evaluating(weights_stay: bool) -> Iterator[None]:
    """Let products use the weights that an earlier call quantized, if `weights_stay` what they were."""
    global _evaluating
    before, _evaluating = _evaluating, weights_stay
    try:
        yield
    finally:
        _evaluating = before


def is_evaluating() -> bool:
    """Whether the forward that runs is one of evaluation without gradients."""
    return _evaluating and not torch.is_grad_enabled()


def stamp_of(weights: Sequence[Tensor]) -> Any:
    """What has to be the same for a later call to use these weights as this one has quantized them.

    None where they may not be kept. Over the calls of one accumulation weights do not change; in evaluation their
    pointers and versions tell. (Not their ids: a later tensor may have the same.)
    """
    gradients = state_of(weights[0]).gradients
    if gradients is not None:
        return gradients, torch.is_grad_enabled()
    parameters = [parameter for weight in weights for parameter in parameters_of(weight)]
    if not is_evaluating() or any(p.is_inference() or "_fsdp_flattened" in p.__dict__ for p in parameters):
        return None
    return tuple((WeakIdRef(p), p.data_ptr(), p._version) for p in parameters)


def forget_weights(parameters: Iterable[Tensor]) -> None:
    """Free the quantized weights that are kept for products which begin with one of these parameters."""
    for parameter in parameters:
        for kernel in state_of(parameter).kernels.values():
            kernel.forget_weights()
