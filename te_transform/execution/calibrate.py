"""Calibrate the first scales of delayed scaling on the example inputs.

One forward and backward is enough, see backends/fp8/calibration.py. Training then runs in FP8 from its first
step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.fp8.calibration import calibrating
from te_transform.graph.errors import message_of
from te_transform.graph.inputs import Inputs
from te_transform.graph.preserve import preserved

log = logging.getLogger(__name__)


def calibrate(model: nn.Module, samples: Sequence[Inputs]) -> None:
    """Run `model` on each sample in training mode, and backward from its loss if it returns one.

    Only scales change. The model, its gradients and the random state are restored.
    """
    with preserved(model), calibrating:
        for module in model.modules():
            module.training = True
        for sample in samples:
            _run_step(model, sample)


def _run_step(model: nn.Module, sample: Inputs) -> None:
    args, kwargs = sample.clone()
    with torch.enable_grad():
        loss = loss_of(model(*args, **kwargs))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if loss is not None and trained:
            _backward(loss, trained)


def _backward(loss: Tensor, trained: list[nn.Parameter]) -> None:
    try:  # backward() would call hooks that wait for gradients, in which optimizers may step
        torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in message_of(error):
            raise
        log.warning("gradients are not calibrated: reentrant checkpoints cannot run in a calibration")


def loss_of(out: Any) -> Tensor | None:
    """Return the loss among a model's outputs, the first scalar with a gradient, or None."""
    if isinstance(out, dict):
        out = tuple(out.values())
    tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, Tensor)]
    losses = [x for x in tensors if x.dim() == 0 and x.requires_grad]
    return losses[0] if losses else None
