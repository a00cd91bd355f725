"""FSDP2's memory for gathered parameters: the rows of q, k and v, or of gate and up, become adjacent in it.

fully_shard() copies each gathered parameter into memory of its own, which it frees after the forward and
after the backward. A graph that joins parameters would copy them once more, and a backward that reads them
would hold the copy. Here, these parameters get parts of one buffer, which FSDP2 fills and frees as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.backends.joined import are_alike, note_adjacent
from te_transform.backends.ranks import fsdp_groups, is_sharded
from te_transform.backends.storages import is_held_by_tensors

Rows = tuple[Tensor, ...]


def make_gathered_adjacent(model: nn.Module, groups: Iterable[Rows]) -> list[Rows]:
    """Make parameters adjacent that FSDP2 gathers for modules of the model.

    They stay as they are while something else holds their memory, such as a graph that waits for its
    backward, and if FSDP2 pads one of them, or keeps a smaller shard of it between forward and backward.

    Args:
        model: a model that FSDP2 may shard.
        groups: parameters, each group in the order of its rows.

    Returns:
        The groups of other parameters.
    """
    gathered = {
        id(member._unsharded_param): (group, member)
        for module in filter(is_sharded, model.modules())
        for group in fsdp_groups(module)
        for member in group.fsdp_params
        if hasattr(member, "_unsharded_param")  # it has been gathered once
    }
    others = []
    for parameters in groups:
        found = [gathered[id(each)] for each in parameters if id(each) in gathered]
        if len(found) < len(parameters):
            others.append(parameters)
        elif len({id(group) for group, _ in found}) == 1 and _fills_at_once(found[0][0]):
            members = [member for _, member in found]
            if are_alike(parameters) and all(map(_is_movable, members)):
                _share_memory(members, parameters)
    return others


def _fills_at_once(group: Any) -> bool:
    """Return True if FSDP2 allocates memory for a group, fills it, and frees all of it, each at once."""
    ranks = getattr(group.mesh_info, "shard_mesh_size", 1)  # a single rank copies parameter by parameter
    return ranks > 1 and not group._use_post_forward_mesh


def _is_movable(member: Any) -> bool:
    """Return True if FSDP2 gathers a parameter without padding, and alone holds the memory for it.

    It holds the parameter, and the tensor that it gathers into.
    """
    outputs, parameter = member.all_gather_outputs, member._unsharded_param
    if not hasattr(type(member), "alloc_all_gather_outputs") or len(outputs) != 1:
        return False
    return outputs[0].numel() == parameter.numel() and is_held_by_tensors(parameter, 2)


def _share_memory(members: Sequence[Any], parameters: Rows) -> None:
    """Replace the memory of parameters by parts of one buffer, with their values if they are gathered now."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage

    first, begin = parameters[0], 0
    is_gathered = first.untyped_storage().size() > 0
    with torch.inference_mode(False), torch.no_grad():
        buffer = first.new_empty(sum(map(len, parameters)), *first.shape[1:])
        for member, parameter in zip(members, parameters, strict=True):
            rows = buffer[begin : begin + len(parameter)]
            if is_gathered:
                rows.copy_(parameter)
            member.all_gather_outputs, parameter.data = [rows.view(-1)], rows
            # its own method would resize the memory to that of one parameter
            member.alloc_all_gather_outputs = partial(alloc_storage, buffer)
            begin += len(parameter)
        if not is_gathered:
            buffer.untyped_storage().resize_(0)
    note_adjacent(parameters, buffer)
