"""The compressed mean of a flat buffer over ranks, which exchange signs and scales, with error feedback.

Section 4 of 1-bit Adam, arXiv 2102.02888. Each rank averages one chunk of the buffer for all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from te_transform.training.one_bit import signs
from te_transform.training.one_bit.layout import FlatLayout


class CompressedMean:
    """The exchange, its two error buffers, and its messages.

    A message has a row for each rank: the packed signs of a chunk, their scale, and the fp32 values of
    vectors. An exchange is two collectives: an all_to_all of messages, and an all_gather of replies.

    Attributes:
        worker_error: fp32 [padded], this rank's share of matrices that was not sent yet.
        server_error: fp32 [chunk], what the replies for this rank's chunk left out.
    """

    def __init__(self, layout: FlatLayout, group: dist.ProcessGroup) -> None:
        self._layout, self._group, self._rank = layout, group, dist.get_rank(group)
        self.worker_error = torch.zeros(layout.padded, dtype=torch.float32, device=layout.device)
        self.server_error = torch.zeros(layout.chunk, dtype=torch.float32, device=layout.device)
        row = layout.chunk // 8 + 4 * (1 + layout.tail)
        shape = layout.world_size, row
        self._one, self._other = (
            torch.empty(shape, dtype=torch.uint8, device=layout.device) for _ in range(2)
        )

    def __call__(self, values: Tensor) -> None:
        """Replace `values`, a buffer of the layout, by their compressed mean, bitwise equal on all ranks."""
        matrices, vectors = values[: self._layout.padded], values[self._layout.padded :]
        self._send(matrices, vectors)
        dist.all_to_all_single(self._other, self._one, group=self._group)
        reply = self._average(self._other)
        _all_gather(self._one, reply, self._group)
        bits, tails = self._split(self._one)
        signs.unpack(bits, tails[:, 0], matrices.view(self._layout.world_size, -1))
        matrices[self._layout.matrices :].zero_()
        vectors.view(self._layout.world_size, -1).copy_(tails[:, 1:])

    def errors(self, is_gathered: bool) -> tuple[Tensor, Tensor]:
        """Return worker and server errors, fp32 [padded] each.

        If `is_gathered`, collectives compute the mean of the worker errors and gather the server errors.
        Otherwise both are this rank's own, and server errors are zero outside of its chunk.
        """
        worker, server = self.worker_error.clone(), torch.zeros_like(self.worker_error)
        server[self._chunk] = self.server_error
        if is_gathered:
            dist.all_reduce(worker, group=self._group)
            worker /= self._layout.world_size
            dist.all_reduce(server, group=self._group)
        return worker, server

    def set_errors(self, worker: Tensor, server: Tensor) -> None:
        """Set the errors from the errors of all chunks, fp32 [padded] each."""
        self.worker_error.copy_(worker)
        self.server_error.copy_(server[self._chunk])

    def scale_errors(self, by: Tensor) -> None:
        """Multiply the errors by a buffer of the layout."""
        self.worker_error.mul_(by[: self._layout.padded])
        self.server_error.mul_(by[self._chunk])

    @property
    def _chunk(self) -> slice:
        return slice(self._rank * self._layout.chunk, (self._rank + 1) * self._layout.chunk)

    def _send(self, matrices: Tensor, vectors: Tensor) -> None:
        bits, tails = self._split(self._one)
        self.worker_error.add_(matrices)
        tails[:, 0] = _compress_(self.worker_error, bits, self._layout.matrices)
        tails[:, 1:] = vectors.view(self._layout.world_size, -1)

    def _average(self, messages: Tensor) -> Tensor:
        """Return this rank's reply to the messages of all ranks: uint8 [1, row]."""
        bits, tails = self._split(messages)
        signs.add_sum_(self.server_error, bits, tails[:, 0] / self._layout.world_size)
        real = self._layout.real(self._rank)
        self.server_error[real:].zero_()
        mean = tails[:, 1:].mean(0)
        reply = messages[:1]  # all messages were read, so their memory is free
        bits, tails = self._split(reply)
        tails[:, 0] = _compress_(self.server_error, bits, real)
        tails[:, 1:] = mean
        return reply

    def _split(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return packed signs, uint8 [rows, chunk / 8], and scales with vectors, fp32 [rows, 1 + tail]."""
        signs_end = self._layout.chunk // 8
        return messages[:, :signs_end], messages[:, signs_end:].view(torch.float32)


def _compress_(values: Tensor, bits: Tensor, real: int) -> Tensor:
    """Pack `values`, replace them by their error, and return the scale. Padding begins at `real`."""
    scale = torch.linalg.vector_norm(values) / max(real, 1) ** 0.5
    signs.pack_(values.view(len(bits), -1), scale, bits)
    values[real:].zero_()
    return scale


def _all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    if hasattr(dist, "all_gather_single"):  # from PyTorch 2.13 on
        dist.all_gather_single(gathered, own, group=group)
    else:
        dist.all_gather_into_tensor(gathered, own, group=group)
