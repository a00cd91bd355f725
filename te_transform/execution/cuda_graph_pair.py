"""PyTorch's CUDA graphs: recording them, and what no graph can have in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class CudaGraphPair:
    """The CUDA graphs of a forward and of its backward.

    Args:
        forward: returns tensors; run once, while it is recorded.
        backward: from what `forward` returned to gradients; None where there is none.
        device: where they run.
    """

    def __init__(
        self,
        forward: Callable[[], list[Tensor]],
        backward: Callable[[list[Tensor]], list[Tensor | None]] | None,
        device: torch.device,
    ):
        self.first, self.second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.gradients: list[Tensor | None] = []
        with torch.cuda.device(device):
            pool = torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(self.first, pool, capture_error_mode="thread_local"):
                    self.outputs = forward()
                if backward is not None:
                    with torch.cuda.graph(self.second, pool, capture_error_mode="thread_local"):
                        self.gradients = backward(self.outputs)
            except Exception:
                _end_capture(device, pool)
                raise
        self.outputs = [output.detach() for output in self.outputs]

    def replay_forward(self) -> None:
        """Compute `outputs` anew."""
        self.first.replay()

    def replay_backward(self) -> None:
        """Compute `gradients` anew, of the last forward."""
        self.second.replay()

    def free(self) -> None:
        """Let go of what was recorded, which cannot be replayed any more."""
        self.first.reset()
        self.second.reset()


def _end_capture(device: torch.device, pool: Any) -> None:
    """End for PyTorch what CUDA broke off.

    PyTorch itself does not (2.11): the allocator would go on to look where each request comes from, and the
    random generator could draw nothing outside of a graph any more.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it was ended, the recording failed for another reason
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def casting_anew() -> Iterator[None]:
    """Let torch.autocast cast weights in what is recorded: a replay would read copies that were made
    before, and others would read those that it makes."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextlib.contextmanager
def noting_waits() -> Iterator[list[str]]:
    """What makes the CPU wait for the GPU meanwhile, which no CUDA graph can have in it."""
    found: list[str] = []
    if not torch.cuda.is_available():
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += (str(w.message).splitlines()[0] for w in caught if "synchronizing CUDA" in str(w.message))


def stream_now() -> int:
    """The CUDA stream that is on; 0 where there is none."""
    # torch.cuda.current_stream() takes ten times as long, of each call that is replayed
    on = torch.cuda.is_initialized()
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on else 0
