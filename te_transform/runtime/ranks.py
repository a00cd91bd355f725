"""Which processes share a model's weights, and what they compute together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def groups_of(model: nn.Module) -> tuple[Any, ...]:
    """The process groups over which the weights of `model` are shared or sharded, within a call of it.

    They are those of the DistributedDataParallel that runs, or of the mesh that fully_shard() or
    distribute_tensor() was given; none where the model is in neither. A collective over all processes that
    have a part of it is one over each of these groups, one after the other.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    if (wrapper := DistributedDataParallel._get_active_ddp_module()) is not None:
        return (wrapper.process_group,)
    mesh = _mesh_of(model)
    if mesh is None:
        return ()
    if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
        return (dist.group.WORLD,)
    return tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))


def _mesh_of(model: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    if not isinstance(model, FSDPModule):
        return None
    # within the forward of a module that is sharded as a whole its parameters are whole ones
    group = getattr(model._get_fsdp_state(), "_fsdp_param_group", None)
    return None if group is None else group.mesh_info.mesh


def maximum(numbers: Tensor, groups: Sequence[Any]) -> None:
    """Take the largest of each number over all processes of the groups, in place."""
    for group in groups:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
