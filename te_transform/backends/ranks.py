"""Process groups that share a model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def groups_of(model: nn.Module) -> tuple[Any, ...]:
    """Return the process groups that share or shard the weights of `model`, during a call of the model.

    Groups come from the running DistributedDataParallel and from the meshes of fully_shard(),
    distribute_tensor() and parallelize(). A collective over all processes of the model is a sequence of
    collectives over these groups.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ()
    wrapper = DistributedDataParallel._get_active_ddp_module()
    groups = [] if wrapper is None else [wrapper.process_group]
    for mesh in _meshes_of(model):
        if mesh.ndim > 1 and mesh.size() == dist.get_world_size():
            return (dist.group.WORLD,)
        groups += (mesh.get_group(dimension) for dimension in range(mesh.ndim))
    return tuple({group.group_name: group for group in groups}.values())


def is_first_rank() -> bool:
    """Return True on rank 0, and without a process group."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, which must all call this; without a group, this value."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def is_sharded(module: nn.Module | None) -> bool:
    """Return True if fully_shard() was applied to the module.

    FSDP refills the memory of its parameters in each call without changing their versions. Its hooks also
    split the capture of a whole model into pieces.
    """
    return hasattr(type(module), "_get_fsdp_state")  # of FSDPModule, whose import takes time


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that fully_shard() gathers together for calls of this module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = getattr(state, "_fsdp_param_group", None)  # of earlier versions of PyTorch
    return [] if group is None else [group]


def is_in_ddp() -> bool:
    """Return True in a forward of DistributedDataParallel."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def bucket_size() -> int | None:
    """Return the bucket size of the running DistributedDataParallel in bytes, or None without one."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    return None if wrapper is None else wrapper.bucket_bytes_cap


def waits_for_all_gradients() -> bool:
    """Return True if the DistributedDataParallel that runs the model waits for all gradients."""
    wrapper = DistributedDataParallel._get_active_ddp_module()
    return wrapper is not None and (wrapper.static_graph or not wrapper.find_unused_parameters)


def _meshes_of(model: nn.Module) -> list[Any]:
    """Return the device meshes of the model, sorted by decreasing number of dimensions."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    meshes = {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}
    if isinstance(model, FSDPModule):
        # in the forward of a module that FSDP2 shards, the parameters are gathered
        meshes |= {group.mesh_info.mesh for group in fsdp_groups(model)}
    return sorted(meshes, key=lambda mesh: -mesh.ndim)


def maximum(numbers: Tensor, groups: Sequence[Any]) -> None:
    """Reduce each number to its maximum over all processes of the groups, in place."""
    for group in groups:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
