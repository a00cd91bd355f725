"""Inputs of attention on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor


def random(batch: int, heads: int, length: int, width: int) -> Tensor:
    x = torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16)
    return x.transpose(1, 2).requires_grad_()


def ends_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)


def poison() -> None:
    """Fill free memory with NaN."""
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in (10, 1000, 10**5, 10**6, 10**7) * 8]
    del blocks


def recorded(run: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Return a CUDA graph of a function, and the tensors that a replay writes to."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found
