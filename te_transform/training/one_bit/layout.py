"""The layout of all parameters in one flat fp32 buffer: matrices, padding, vectors, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

ALIGNED_ELEMENTS = (
    128  # elements: their signs fill 16 bytes, so each rank's share of a message starts aligned
)


@dataclass(frozen=True)
class FlatLayout:
    """The trained parameters in the order of the buffer, and the chunk that each rank averages.

    Parameters of two or more dimensions come first. Their signs are sent. Norms and biases are sent in fp32.
    The parameters of one group are adjacent within both parts.
    """

    groups: Sequence[Sequence[nn.Parameter]]
    world_size: int

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All parameters, in the order of the buffer."""
        return tuple(sorted(chain.from_iterable(self.groups), key=lambda p: p.dim() <= 1))

    @cached_property
    def matrices(self) -> int:
        """The number of elements of all matrices, without padding."""
        return sum(p.numel() for p in self.parameters if p.dim() > 1)

    @cached_property
    def vectors(self) -> int:
        """The number of elements of all vectors, without padding."""
        return sum(p.numel() for p in self.parameters if p.dim() <= 1)

    @cached_property
    def chunk(self) -> int:
        """The number of elements of the padded matrices that each rank averages."""
        return -(-self.matrices // (self.world_size * ALIGNED_ELEMENTS)) * ALIGNED_ELEMENTS

    @cached_property
    def tail(self) -> int:
        """The elements of padded vectors that each rank averages: with a scale, a multiple of 16 bytes."""
        return -(-(1 + -(-self.vectors // self.world_size)) // 4) * 4 - 1

    @property
    def padded(self) -> int:
        """The number of elements of all matrices, with padding."""
        return self.chunk * self.world_size

    def real(self, rank: int) -> int:
        """Return the number of elements of a rank's chunk without padding."""
        return min(max(self.matrices - rank * self.chunk, 0), self.chunk)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def buffer(self) -> Tensor:
        """Return a new fp32 buffer for all parameters, of zeros."""
        return self.scratch().zero_()

    def scratch(self) -> Tensor:
        """Return a new fp32 buffer for all parameters, without values."""
        length = self.padded + self.tail * self.world_size
        return torch.empty(length, dtype=torch.float32, device=self.device)

    def view(self, buffer: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return the elements of one parameter, in its shape."""
        start = self._starts[parameter]
        return buffer[start : start + parameter.numel()].view(parameter.shape)

    @cached_property
    def _starts(self) -> dict[nn.Parameter, int]:
        starts, at = {}, 0
        for parameter in self.parameters:
            if parameter.dim() <= 1 and at < self.padded:
                at = self.padded
            starts[parameter] = at
            at += parameter.numel()
        return starts

    def parts(self, buffer: Tensor, group: int) -> list[Tensor]:
        """Return the elements of one group: a part with its matrices and a part with its vectors."""
        parts = []
        for is_matrix in (True, False):
            own = [p for p in self.groups[group] if (p.dim() > 1) is is_matrix]
            if own:
                start, end = self._starts[own[0]], self._starts[own[-1]] + own[-1].numel()
                parts.append(buffer[start:end])
        return parts
