"""Record pairs of CUDA graphs, and detect operations that no CUDA graph can contain."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class CudaGraphPair:
    """The CUDA graphs of a forward (`first`) and of its backward (`second`).

    A replay of `first` computes `outputs` again. A replay of `second` computes the `gradients` of the last
    forward.

    Args:
        forward: returns tensors; runs once, while it is recorded.
        backward: computes gradients from the outputs of `forward`; None without a backward.
        device: of the tensors.
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

    def free(self) -> None:
        """Free the recording. It can no longer be replayed."""
        self.first.reset()
        self.second.reset()


def _end_capture(device: torch.device, pool: Any) -> None:
    """Clean up after a failed capture.

    PyTorch 2.11 leaves the allocator in capture mode, and the random generator unusable outside of a graph.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # the capture had ended before the failure
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def casting_anew() -> Iterator[None]:
    """Turn off autocast's cache of cast weights while recording: a replay must cast the weights again."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


@contextlib.contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Collect warnings of operations that synchronize with the GPU, which no CUDA graph can contain."""
    waits: list[str] = []
    if not torch.cuda.is_available():
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits += (str(w.message).splitlines()[0] for w in caught if "synchronizing CUDA" in str(w.message))


def stream_now() -> int:
    """Return the current CUDA stream, or 0 without CUDA."""
    # torch.cuda.current_stream() takes ten times as long, and every replay asks
    on = torch.cuda.is_initialized()
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()) if on else 0
