"""The communication hook of DDP. DDP reads its annotations, so they must be types, not text."""

from typing import Any

import torch
import torch.distributed as dist


def reduce(optimizer: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over ranks if the next step of a OneBitOptimizer needs averaged gradients."""
    if optimizer.needs_averaged_gradients and not optimizer.scales_differ:  # else step() averages
        optimizer.hook_ran = True
        return _average_as_ddp(bucket.buffer(), optimizer.process_group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _average_as_ddp(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average a buffer with the rounding of DDP, which multiplies by 1 / ranks first."""
    work = dist.all_reduce(buffer.mul_(1 / group.size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
