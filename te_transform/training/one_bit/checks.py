"""Checks of the 1-bit optimizers, which raise before any parameter changes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from te_transform.training.counts import is_count

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OneBitError(RuntimeError):
    """The error for parameters or a process group that a 1-bit optimizer does not support."""


def check_options(group: dict[str, Any]) -> None:
    """Raise OneBitError if an option of a parameter group is out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not _number(group.get(name)) >= 0:
            raise OneBitError(f"expected {name} >= 0, got {group.get(name)!r}; pass a number from 0 on")
    given = group.get("betas")
    betas = given if isinstance(given, (tuple, list)) else ()
    if len(betas) != 2 or not all(0 <= _number(beta) < 1 for beta in betas):
        raise OneBitError(f"expected betas in [0, 1), got {given!r}; pass two such numbers")


def _number(value: Any) -> float:
    """Return a number, or NaN for any other value."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def check_steps(name: str, steps: Any) -> None:
    """Raise OneBitError unless `steps` is a positive integer."""
    if not is_count(steps):
        raise OneBitError(f"expected {name} to be a number of steps >= 1, got {steps!r}; pass an integer")


def check_saved(group: dict[str, Any]) -> None:
    """Raise OneBitError if a parameter group of a state has an option or a number out of range."""
    check_options(group)
    if not is_count(steps := group.get("steps"), least=0):
        raise OneBitError(f"expected steps of 0 or more, got {steps!r}; load what state_dict() returned")


def check_distinct(parameters: list[Tensor]) -> None:
    """Raise OneBitError if a parameter appears twice: each has one position in the flat buffers."""
    if twice := len(parameters) - len(set(parameters)):
        raise OneBitError(
            f"expected each parameter once, got {twice} twice in a group; pass model.parameters(), which "
            "yields shared weights once"
        )


def check_parameter(parameter: Tensor) -> None:
    """Raise OneBitError if the parameter is sharded or has a dtype without fp32 state."""
    if isinstance(parameter, DTensor):
        raise OneBitError(
            "expected whole parameters on every rank, got a DTensor (FSDP2 or tensor parallelism), of which "
            "each rank holds and updates another part; use DistributedDataParallel, or torch.optim.AdamW"
        )
    if getattr(parameter, "_fsdp_flattened", False) or getattr(parameter, "_is_flat_param", False):
        raise OneBitError(
            "expected whole parameters on every rank, got one of FullyShardedDataParallel, of which each "
            "rank holds and updates another part; use DistributedDataParallel, or torch.optim.AdamW"
        )
    if parameter.dtype not in PARAMETER_DTYPES:
        raise OneBitError(
            f"expected parameters in float32, bfloat16 or float16, got {parameter.dtype}; cast the model, or "
            "use torch.optim.AdamW"
        )


def process_group(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the given group, or the default one; raise OneBitError if there is none."""
    if isinstance(given, dist.ProcessGroup):
        return given
    if given is not None:  # dist.new_group() returns a number to the ranks outside of the group
        raise OneBitError(
            f"expected a process group that contains this rank, got {given!r}; make the optimizer only on "
            "the ranks of the group"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise OneBitError(
            "expected a process group, got none; call torch.distributed.init_process_group() first (torchrun "
            "sets what it reads), or use torch.optim.AdamW in a single process"
        )
    return dist.group.WORLD


def check_devices(parameters: list[nn.Parameter]) -> None:
    """Raise OneBitError unless all parameters are on one device."""
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise OneBitError(
            f"expected all parameters on one device, got {', '.join(devices)}; move the model before the "
            "first step, one process for each device"
        )


def check_ddp(model: Any, parameters: set[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Raise OneBitError unless `model` is DDP over the same group, with the same parameters."""
    if not isinstance(model, DistributedDataParallel):
        raise OneBitError(
            f"expected a DistributedDataParallel model, got {type(model).__name__}; pass the DDP model "
            "itself, not compiled, or leave register() out: step() then averages gradients itself during the "
            "warm-up"
        )
    if dist.get_process_group_ranks(model.process_group) != dist.get_process_group_ranks(group):
        raise OneBitError(
            "expected the process group of the optimizer in DistributedDataParallel, got another; pass the "
            "same process_group to both"
        )
    ignored = model.parameters_to_ignore
    reduced = {p for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored}
    if reduced != parameters:
        missing, foreign = len(reduced - parameters), len(parameters - reduced)
        raise OneBitError(
            f"expected an optimizer with exactly the parameters that DistributedDataParallel reduces, got "
            f"{missing} it does not hold and {foreign} that are not in the model; make one optimizer of "
            "model.parameters()"
        )


def check_not_joined(model: Any) -> None:
    """Raise OneBitError if DDP runs in join(): ranks without batches would not call step()."""
    if model is not None and model._join_config.enable:
        raise OneBitError(
            "expected ranks with equally many batches, got DistributedDataParallel.join(), in which a rank "
            "without batches takes no step, and the others wait for it; give each rank as many batches "
            "(drop_last=True), or use torch.optim.AdamW"
        )


def check_reduced(parameters: list[nn.Parameter], reduced: set[nn.Parameter]) -> None:
    """Raise OneBitError if DDP does not average a trained parameter, because register() came before."""
    if late := set(parameters) - reduced:
        raise OneBitError(
            f"expected the parameters that trained at register(), got {len(late)} more, whose gradients "
            "DistributedDataParallel does not average; unfreeze before the model is wrapped in it"
        )


def agree(parameters: list[nn.Parameter], averaged: list[Tensor], group: dist.ProcessGroup) -> bool:
    """Check at the first step that all ranks train the same parameters from the same weights.

    The check compares sums of bits, which do not depend on the order of summation.

    Returns:
        True if the gradients are `averaged`: they are equal on all ranks too.

    Raises:
        OneBitError: the ranks hold different parameters (ZeroRedundancyOptimizer), or different weights.
    """
    shapes = sum((i + 1) * p.numel() for i, p in enumerate(parameters))
    bits = [sum(_bits(tensor) for tensor in tensors) for tensors in (parameters, averaged)]
    own = torch.tensor([shapes, 0, 0], dtype=torch.int64, device=parameters[0].device)
    own[1:] += torch.stack([torch.as_tensor(b, dtype=torch.int64, device=own.device) for b in bits])
    sums = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sums, own, group=group)
    shapes_agree, weights_agree, gradients_agree = (torch.stack(sums) == own).all(0).tolist()
    if not shapes_agree or not weights_agree:
        raise OneBitError(
            f"expected the same {'weights' if shapes_agree else 'parameters'} on every rank, got others; "
            "wrap the model in DistributedDataParallel, which broadcasts them, and leave out "
            "ZeroRedundancyOptimizer, which divides their updates"
        )
    return gradients_agree and bool(own[2])  # zero gradients, as checkpoint loaders set them, prove nothing


def _bits(tensor: Tensor) -> Tensor:
    as_integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().contiguous().view(as_integers).sum(dtype=torch.int64)
