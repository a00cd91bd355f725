"""Placements of values on the ranks of a tensor-parallel group, and the functional collectives between them.

A value is whole (equal on all ranks), sharded along one dimension, or a sum of one term per rank. The
gradient of a whole value is whole. The gradient of an `entered` value, such as the input of a column-parallel
linear, is a sum of terms.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, reduce, wraps
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_transform.backends.library import LIBRARY, registered_ops
from te_transform.backends.op import GraphOp
from te_transform.backends.plain import reduced
from te_transform.backends.tracing import check_index, compiling
from te_transform.execution.cuda_graph_pair import CudaGraphPair
from te_transform.graph.bound import F

# The operators of functional collectives. PyTorch 2.13 has renamed their Python wrappers.
_OPS = torch.ops._c10d_functional

_RECORDINGS: weakref.WeakKeyDictionary[CudaGraphPair, str] = weakref.WeakKeyDictionary()  # by groups' names


@cache
def _watch_ends() -> None:
    """Free recordings before shutdown() and abort() of a process group, which PyTorch has no hook for."""
    for end in ("shutdown", "abort"):
        setattr(dist.ProcessGroup, end, _freeing(getattr(dist.ProcessGroup, end)))


def _freeing(end: Callable[..., None]) -> Callable[..., None]:
    @wraps(end)
    def freeing(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> None:
        for recording, name in [*_RECORDINGS.items()]:
            if name == group.group_name:
                recording.free()
        end(group, *arguments, **options)

    return freeing


@dataclass(frozen=True)
class Shards:
    """The shards of a tensor along one dimension, one share per rank.

    Args:
        dim: the dimension, counted from the end: -1 is the last.
        parts: the sizes of the parts of the dimension, such as (h, h, h) for q, k and v of one product. Each
            part is divided among the ranks separately. The last ranks may have less of it.
        copies: the number of consecutive ranks with the same share, if there are more ranks than key heads.
            The gradient of such a share is the sum of the gradients of these ranks.
    """

    dim: int
    parts: tuple[int, ...]
    copies: int = 1

    @property
    def size(self) -> int:
        """The size of the whole dimension."""
        return sum(self.parts)

    def bounds(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return start and end of a rank's share of each part in the whole dimension."""
        starts, spans = accumulate(self.parts, initial=0), []
        number = rank // self.copies
        for start, part in zip(starts, self.parts, strict=False):
            share = -(-part // self.shares(ranks))
            spans.append((start + min(number * share, part), start + min((number + 1) * share, part)))
        return spans

    @property
    def is_plain(self) -> bool:
        """True if the concatenated shares of the ranks are the whole."""
        return len(self.parts) == 1 and self.copies == 1

    def shares(self, ranks: int) -> int:
        """Return the number of different shares for a number of ranks."""
        return ranks // self.copies

    def length(self, rank: int, ranks: int) -> int:
        """Return the length of a rank's share of the dimension."""
        return sum(stop - start for start, stop in self.bounds(rank, ranks))

    def is_even(self, ranks: int) -> bool:
        """Return True if the ranks divide each part evenly."""
        return all(part % self.shares(ranks) == 0 for part in self.parts)

    def on(self, dim: int) -> Shards:
        """Return the same shares of another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group: a mesh of one dimension, seen from this process."""

    mesh: DeviceMesh

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def own(self) -> int:
        """The number of this rank in the group."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> str:
        """The name of the process group."""
        return self.mesh.get_group().group_name

    def shape(self, whole: torch.Size, shards: Shards | None) -> tuple[int, ...]:
        """Return the shape of this rank's shard of a tensor."""
        if shards is None:
            return tuple(whole)
        local = list(whole)
        local[shards.dim] = shards.length(self.own, self.count)
        return tuple(local)

    def summed(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return the sum, or the maximum, of `x` over all ranks."""
        # inductor reduces in place, and its kernels have read the memory before the reduction (PyTorch 2.13)
        reduced = registered_ops.all_reduce if compiling.get() else _all_reduced
        return reduced(x.contiguous(), op, self.group)

    def agreed(self, why: str | None) -> str | None:
        """Return why an action is impossible on this rank or another. Synchronizes all ranks."""
        flag = torch.tensor([why is not None], dtype=torch.int32, device=self.mesh.device_type)
        is_refused = _all_reduced(flag, "max", self.group).item()
        return why or ("another rank cannot" if is_refused else None)

    def freed_before_end(self, recording: CudaGraphPair) -> None:
        """Free a recording with collectives of the ranks before their process group ends.

        destroy_process_group() waits until no CUDA graph contains a collective of the group
        (pytorch/pytorch#115388). A script that still holds the model would wait forever.
        """
        _watch_ends()
        _RECORDINGS[recording] = self.group

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate `x` of all ranks."""
        blocks = _OPS.all_gather_into_tensor(x.contiguous(), self.count, self.group)
        whole = _OPS.wait_tensor(blocks)
        return whole if dim == 0 else torch.cat(whole.chunk(self.count), dim)

    def summed_block(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's block of the sum of `x` over all ranks (reduce-scatter)."""
        blocks = x.contiguous() if dim == 0 else torch.cat(x.chunk(self.count, dim))
        return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(blocks, "sum", self.count, self.group))

    def gathered(self, x: Tensor, shards: Shards, summed: bool = False) -> Tensor:
        """Gather the whole tensor from the shards. Copies of a share are equal, or `summed`."""
        dim = x.dim() + shards.dim
        if shards.is_plain and shards.is_even(self.count):
            return self.joined(x, dim)
        longest = shards.length(0, self.count)
        padded = x.new_zeros((longest, *x.shape[:dim], *x.shape[dim + 1 :]))
        padded[: x.shape[dim]] = x.movedim(dim, 0)
        blocks, pieces = self.joined(padded, 0).split(longest), []
        for rank in range(0, self.count, shards.copies):
            copies = blocks[rank : rank + shards.copies]
            block = reduce(torch.add, copies) if summed else copies[0]
            lengths = [stop - start for start, stop in shards.bounds(rank, self.count)]
            pieces.append(block[: sum(lengths)].split(lengths))
        whole = torch.cat([piece for part in zip(*pieces, strict=True) for piece in part])
        return whole.movedim(0, dim).contiguous()

    def collected(self, x: Tensor, shards: Shards) -> Tensor:
        """Gather the whole tensor from the shards. Copies of a share are summed."""
        return self.gathered(x, shards, summed=True)

    def share(self, x: Tensor, shards: Shards) -> Tensor:
        """Return this rank's shard of a whole tensor."""
        dim = x.dim() + shards.dim
        bounds = shards.bounds(self.own, self.count)
        pieces = [x.narrow(dim, start, stop - start) for start, stop in bounds]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()

    def lead_share(self, x: Tensor, shards: Shards) -> Tensor:
        """Return this rank's shard of a whole tensor, with zeros where an earlier rank has a copy."""
        share = self.share(x, shards)
        return share if self.own % shards.copies == 0 else torch.zeros_like(share)

    def summed_share(self, x: Tensor, shards: Shards) -> Tensor:
        """Return this rank's shard of the sum of `x` over all ranks, with the zeros of lead_share()."""
        if shards.is_plain and shards.is_even(self.count):
            return self.summed_block(x, x.dim() + shards.dim)
        return self.lead_share(self.summed(x), shards)

    def picked(self, x: Tensor, shards: Shards) -> Tensor:
        """Return this rank's part of a share that several ranks have."""
        return x.chunk(shards.copies, shards.dim)[self.own % shards.copies].contiguous()

    def put_back(self, x: Tensor, shards: Shards) -> Tensor:
        """Return a share with this rank's part, and zeros in the parts of other ranks."""
        parts = [torch.zeros_like(x)] * shards.copies
        parts[self.own % shards.copies] = x
        return torch.cat(parts, shards.dim)


def _all_reduced(x: Tensor, op: str, group: str) -> Tensor:
    return _OPS.wait_tensor(_OPS.all_reduce(x, op, group))


LIBRARY.define("all_reduce(Tensor x, str op, str group) -> Tensor")
LIBRARY.impl("all_reduce", _all_reduced, "CompositeExplicitAutograd")
torch.library.register_fake("te_transform::all_reduce", lambda x, *_: torch.empty_like(x), lib=LIBRARY)


def _unmoved(ranks: Ranks, x: Tensor, _: Shards | None) -> Tensor:
    return x.view_as(x)


def _sum_terms(ranks: Ranks, x: Tensor, _: Shards | None) -> Tensor:
    return ranks.summed(x)


def _lead_value(ranks: Ranks, x: Tensor, _: Shards | None) -> Tensor:
    return x.view_as(x) if ranks.own == 0 else torch.zeros_like(x)


class Redistribution(Enum):
    """A change of placement: the function of the forward, and the function of the gradient."""

    ENTER = (_unmoved, _sum_terms)  # a whole value that each rank reads, with a term of its gradient per rank
    SUM = (_sum_terms, _unmoved)  # terms to the whole
    GATHER = (Ranks.gathered, Ranks.lead_share)  # shards to the whole
    LEAD_SHARE = (Ranks.lead_share, Ranks.gathered)  # the whole to shards; copies but the first are zeros
    SHARE = (Ranks.share, Ranks.collected)  # the whole to shards
    COLLECT = (Ranks.collected, Ranks.share)  # shards to the whole; copies are summed
    PICK = (Ranks.picked, Ranks.put_back)  # copies of a share to a part of it per rank
    PUT_BACK = (Ranks.put_back, Ranks.picked)
    GATHER_ENTER = (Ranks.gathered, Ranks.summed_share)  # shards to a whole value that each rank reads
    SUM_SHARE = (Ranks.summed_share, Ranks.gathered)
    LEAD = (_lead_value, _unmoved)  # a whole value to terms: the value on the first rank, zeros on all others

    def backwards(self) -> Redistribution:
        """Return the redistribution of the gradient."""
        return Redistribution((self.value[1], self.value[0]))


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Redistribution, ranks: Ranks, shards: Shards | None) -> Tensor:
        ctx.change, ctx.ranks, ctx.shards = change, ranks, shards
        do, _ = change.value
        return do(ranks, x, shards)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.change is Redistribution.LEAD:
            return grad, None, None, None
        return _Moved.apply(grad, ctx.change.backwards(), ctx.ranks, ctx.shards), None, None, None


def redistributed(x: Tensor, change: Redistribution, ranks: Ranks, shards: Shards | None = None) -> Tensor:
    """Return `x` in another placement, with derivatives of every order."""
    return _Moved.apply(x, change, ranks, shards)


class Move(GraphOp):
    """The op of a captured graph that brings a value from one placement to another."""

    def __init__(self, change: Redistribution, ranks: Ranks, shards: Shards | None = None):
        super().__init__()
        self.change, self.ranks, self.shards = change, ranks, shards

    def forward(self, x: Tensor) -> Tensor:
        """Return the value in its new placement."""
        return redistributed(x, self.change, self.ranks, self.shards)


class ShardedEmbedding(GraphOp):
    """The op for F.embedding with a share of the table's rows on each rank.

    Each rank returns a term of the result, with zeros for the ids of other ranks' rows.
    """

    def __init__(self, ranks: Ranks, shards: Shards, padding_idx: int | None):
        super().__init__()
        self.ranks, self.shards, self.padding_idx = ranks, shards, padding_idx

    def forward(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Look up ids [...] in weight [own rows, width], and return [..., width].

        Raises:
            IndexError: no rank has the row of an id.
        """
        own, outside = _own_rows(ids, self.shards, self.ranks, "id")
        start, stop = self.shards.bounds(self.ranks.own, self.ranks.count)[0]
        padding = self.padding_idx
        padding = None if padding is None or not start <= padding < stop else padding - start
        return F.embedding(own, weight, padding).masked_fill(outside[..., None], 0)


def _own_rows(ids: Tensor, shards: Shards, ranks: Ranks, what: str) -> tuple[Tensor, Tensor]:
    """Return the ids as indices of this rank's rows, and True for ids of other ranks, whose index is 0."""
    is_known = ((ids >= 0) & (ids < shards.size)).all()
    check_index(is_known, f"expected {what}s from 0 to {shards.size - 1}, got another one")
    start, stop = shards.bounds(ranks.own, ranks.count)[0]
    outside = (ids < start) | (ids >= stop)
    return (ids - start).masked_fill(outside, 0).long(), outside


class ShardedCrossEntropy(GraphOp):
    """The op for ops.cross_entropy of logits that are sharded by classes.

    m is the largest logit of a row, s = sum(exp(x - m)), and t = x[target] - m. The loss is log(s) - t. The
    ranks exchange m, s and t: three numbers per row.
    """

    def __init__(self, ranks: Ranks, shards: Shards):
        super().__init__()
        self.ranks, self.shards = ranks, shards

    def forward(
        self, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str, dtype: torch.dtype
    ) -> Tensor:
        """Return the loss of all classes on each rank, for logits [..., own classes] and targets [...].

        Raises:
            IndexError: a target is neither a class nor `ignore_index`.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counts = targets != ignore_index
        own, outside = _own_rows(targets.masked_fill(~counts, 0), self.shards, self.ranks, "target")
        with torch.no_grad():
            largest = self.ranks.summed(wide.amax(-1), "max")
        wide = wide - largest[..., None]
        of_target = wide.gather(-1, own[..., None]).squeeze(-1).masked_fill(outside, 0)
        total, of_target = redistributed(
            torch.stack((wide.exp().sum(-1), of_target)), Redistribution.SUM, self.ranks
        ).unbind()
        losses = (total.log() - of_target).masked_fill(~counts, 0)
        return reduced(losses, counts, reduction, dtype)


class OwnRandom(GraphOp):
    """The op of a captured graph after which each rank draws different random numbers, until `CommonRandom`.

    The seed of each rank is computed from the common state. A checkpoint that repeats the call therefore
    draws the same numbers.
    """

    draws_per_rank = True  # compiled graphs and recordings cannot

    def __init__(self, ranks: Ranks):
        super().__init__()
        self.ranks = ranks
        self.common: tuple[Any, ...] = ()  # the common state after this draw

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, and give the generator this rank's seed."""
        generator = _generator(x.device)
        if x.is_cuda:
            # Philox counts drawn numbers in groups of four. Shards of different sizes draw different numbers
            # of groups, so the common state continues as if one group had been drawn.
            seed, drawn = generator.initial_seed(), generator.get_offset()
            self.common = seed, drawn + 4
            generator.manual_seed(self._seed(seed + drawn))
        else:
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu").item())
            self.common = (generator.get_state(),)
            generator.manual_seed(self._seed(seed))
        return x

    def _seed(self, seed: int) -> int:
        return (seed + (self.ranks.own + 1) * _SPREAD) % 2**63


class CommonRandom(GraphOp):
    """The op of a captured graph after which the ranks draw the same random numbers again."""

    def __init__(self, own: OwnRandom):
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, and give the generator the common state."""
        generator = _generator(x.device)
        if x.is_cuda:
            seed, drawn = self.own.common
            generator.manual_seed(seed)  # resets the offset to zero
            generator.set_offset(drawn)
        else:
            generator.set_state(self.own.common[0])
        return x


_SPREAD = 0x9E3779B97F4A7C15  # of splitmix64: seeds that differ by multiples of it are unrelated


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
