"""A rotary position embedding whose angles are known runs in one kernel."""

from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile

import torch
from torch import Tensor, nn

from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_number, same_shape, shape_of
from te_transform.graph.pattern import Call, Maybe, OneOf, Pattern, Read, Var
from te_transform.plan.rule import Operation, Rule


def _taken(function: Callable) -> Pattern:
    """The cosines, or the sines, of the angles: kernels want these, models hand round those."""
    of_angles = Maybe((torch.unsqueeze, ops.cast), Call(function, Var("angles")))
    times = Call(torch.mul, of_angles, Var("factor", is_number), commute=True)
    return Read(OneOf(of_angles, Maybe((torch.unsqueeze, ops.cast), times)))


def refuse(rope: Operation, angles) -> Iterator[str]:
    """Every reason why the kernel would turn otherwise."""
    turned, by = shape_of(rope.node), shape_of(angles)
    fit = len(turned) == 4 and len(by) in (2, 3) and same_shape(by[-2:], turned[2:])
    over_heads = _broadcast((*by[:-2], 1, *by[-2:]))
    if not fit or not all(same_shape(_broadcast(part.shape), over_heads) for part in (rope.cos, rope.sin)):
        yield (
            f"queries of {list(turned)} are turned by angles of {list(by)}, [batch, heads, length, width] "
            "and [length, width] or [1, length, width] are needed: lay them out so"
        )
    elif {rope.cos.dtype, dtype_of(rope.node)} != {rope.x.dtype}:
        yield (
            "the cosines are of another dtype than what they turn, the kernel rounds to that of the latter: "
            "cast cosines and sines to it"
        )


def _broadcast(shape: Sequence) -> tuple:
    """A shape as it is broadcast: without ones in front."""
    return tuple(dropwhile(lambda size: isinstance(size, int) and size == 1, shape))


def build(backend, factor: float = 1.0) -> nn.Module:
    """The fused op; cosines and sines are multiplied by a factor in YaRN."""
    return backend.Rotary(factor)


class Example(nn.Module):
    """Queries [batch, heads, length, width], turned by angles [1, length, width]."""

    def __init__(self):
        super().__init__()
        self.frequencies = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]), self.frequencies).repeat(1, 2)[None]
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


RULE = Rule(
    name="rotary",
    pattern=Call(ops.rope, Var("x"), _taken(torch.cos), _taken(torch.sin), role="rope"),
    refuse=refuse,
    build=build,
    reads=("x", "angles"),
    needs_kernels=True,
    example=lambda: (Example(), torch.zeros(1, 2, 4, 8)),
)
"""Saves two products, a negation, a copy and a sum, each of which reads and writes all queries or keys."""
