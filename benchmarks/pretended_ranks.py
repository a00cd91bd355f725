"""One rank of a group without the other ranks: what a rank of FSDP2 allocates, and its step without traffic.

Gathers and reductions copy within the memory of one GPU. A rank then allocates what it would in the whole
group, and a step has all kernels but those of NCCL. The shards of other ranks are copies of its own, so
losses are not those of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore


def join(ranks: int) -> None:
    """Start a process group of so many ranks, of which this process is the first and only one."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def copy_within(model: nn.Module) -> None:
    """Make FSDP2 copy shards where it would gather them, and one part of gradients where it would sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Gather())
            module.set_custom_reduce_scatter(_Reduce())


class _Copy:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Copy):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        shards = output_tensor.view(group.size(), -1)  # the input is one of them
        shards.copy_(input_tensor.flatten().clone())


class _Reduce(_Copy):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.view(-1).copy_(input_tensor.view(group.size(), -1)[group.rank()])
