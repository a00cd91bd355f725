"""A rotary position embedding whose angles are known runs in one kernel."""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import dropwhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    dtype_of,
    is_model_tensor,
    is_number,
    is_tensor_node,
    same_shape,
    shape_of,
    value,
)
from te_transform.graph.pattern import Call, Maybe, OneOf, Pattern, Read, Var
from te_transform.graph.written_out import rotated_by
from te_transform.plan.rule import Operation, Rule


def _taken(function: Callable) -> Pattern:
    """Return the pattern of the cosines, or the sines, of angles: kernels take angles, models pass these."""
    angles = Maybe(torch.unsqueeze, Var("angles", lambda node: not _is_spread(node)))
    of_angles = Maybe((torch.unsqueeze, ops.cast), Call(function, angles))
    times = Call(torch.mul, of_angles, Var("factor", is_number), commute=True)
    return Read(OneOf(of_angles, Maybe((torch.unsqueeze, ops.cast), times)))


def _is_spread(angles: Any) -> bool:
    """Return whether angles have a dimension of one for heads, or more in front than a kernel takes."""
    spread = isinstance(angles, fx.Node) and angles.target is torch.unsqueeze
    return spread and (len(shape_of(angles)) > 3 or angles.args[1] == -2)


def refuse(
    rope: Operation | None = None,
    other: Operation | None = None,
    attention: Operation | None = None,
    angles: fx.Node | None = None,
) -> Iterator[str | None]:
    """Yield every reason why the kernel would turn otherwise."""
    if attention is not None:
        yield from [*_in_another_form(attention.node)] or [None]
        return
    if other is not None:
        yield from _of_another(*other.node.args[1:3])
        return
    turned, by = shape_of(rope.node), shape_of(angles)
    if _length_first(rope, angles) is None:
        yield (
            f"queries of {list(turned)} are turned by angles of {list(by)}, [batch, heads, length, width] "
            "and [length, width] or [1, length, width] are needed: lay them out so"
        )
    inside = torch.float32 if rope.wide else rope.x.dtype
    if {rope.cos.dtype, rope.sin.dtype} != {inside} or dtype_of(rope.node) is not rope.x.dtype:
        yield (
            "the cosines are of another dtype than what they turn, the kernel rounds to that of the latter: "
            "cast cosines and sines to it"
        )


def _in_another_form(attention: fx.Node) -> Iterator[str]:
    """Yield why queries or keys are rotated by other operations than x * cos + rotated * sin."""
    calls = [node for operand in attention.args[:2] for node in rotated_by(operand)]
    if not calls:
        return
    how = "as complex numbers" if any(dtype_of(node).is_complex for node in calls) else "in another form"
    yield (
        f"queries or keys are rotated {how}, the kernel rotates column i of a head with column i + width / 2"
        ": reorder the rows of the query and key weights to pair these columns, and compute x * cos + "
        "torch.cat((-x2, x1), -1) * sin"
    )


def _of_another(cos: fx.Node, sin: fx.Node) -> Iterator[str | None]:
    """Yield why no angles are found that cosines and sines are taken of."""
    (of_cos, between), (of_sin, more) = map(_source, (cos, sin))
    names = [called(node) for node in (*between, *more) if node.target not in (torch.unsqueeze, ops.cast)]
    if any(map(is_model_tensor, (of_cos, of_sin))):
        yield (
            "the cosines and sines are stored, the kernel computes them from angles: store the angles, in "
            "float32, and take cos and sin of them in the forward"
        )
    elif "placeholder" in (of_cos.op, of_sin.op):
        yield None  # a block is given them by the model around it, which is captured as a whole elsewhere
    elif (of_cos.target, of_sin.target) != (torch.cos, torch.sin):
        yield (
            f"the cosines come from {called(of_cos)}, the sines from {called(of_sin)}, the kernel computes "
            "them from angles: take torch.cos and torch.sin of the angles"
        )
    elif of_cos.args[0] is not of_sin.args[0]:
        yield (
            "cosines and sines are taken of two tensors, the kernel turns by one: assign the angles to one "
            "variable, and take cos and sin of it"
        )
    elif names:
        yield (
            f"the cosines and sines go through {', '.join(dict.fromkeys(names))} before the rotation, the "
            "kernel computes them from angles, with one factor for both: do that with the angles, before cos "
            "and sin"
        )
    else:
        yield (
            "the angles are written to in place, the kernel reads them where the rotation is: let the write "
            "make a new tensor"
        )


_LAID_OUT_BY = (
    torch.unsqueeze, torch.reshape, torch.Tensor.expand, torch.transpose, torch.permute, torch.t, torch.neg,
    torch.cat, torch.mul, torch.div, torch.repeat_interleave, torch.Tensor.contiguous, torch.Tensor.detach,
    operator.getitem, ops.columns, ops.cast, F.embedding, "repeat", "index_select", "squeeze",
)  # fmt: skip


def _source(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what cosines or sines were before they were laid out, and the calls that did so."""
    between = []
    while node.target in _LAID_OUT_BY:
        found = [read for read in node.all_input_nodes if is_tensor_node(read) and not _is_index(read)]
        if not found:
            break
        between.append(node)
        node = found[0]
    return node, between


def _is_index(node: fx.Node) -> bool:
    return not value(node).is_floating_point()


def _length_first(rope: Operation, angles: fx.Node) -> bool | None:
    """Return whether queries are [batch, length, heads, width] or [batch, heads, length, width]; None where
    they are neither, or the angles are not theirs."""
    turned, by = shape_of(rope.node), shape_of(angles)
    if len(turned) != 4 or len(by) not in (2, 3):
        return None
    for length, spread in ((2, (*by[:-2], 1, *by[-2:])), (1, (*by[:-1], 1, by[-1]))):
        fits = same_shape(by[-2:], (turned[length], turned[3]))
        if fits and all(same_shape(_broadcast(p.shape), _broadcast(spread)) for p in (rope.cos, rope.sin)):
            return length == 1
    return None


def _broadcast(shape: Sequence) -> tuple:
    """Return a shape as it is broadcast: without ones in front."""
    return tuple(dropwhile(lambda size: isinstance(size, int) and size == 1, shape))


def build(backend, rope: Operation, angles: fx.Node, factor: float = 1.0) -> nn.Module:
    """Return the fused op; cosines and sines are multiplied by a factor in YaRN."""
    return backend.Rotary(factor, wide=rope.wide, length_first=_length_first(rope, angles))


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
    pattern=OneOf(
        Call(ops.rope, Var("x"), _taken(torch.cos), _taken(torch.sin), role="rope"),
        Call(ops.rope, role="other"),
        Call(ops.sdpa, role="attention"),
    ),
    refuse=refuse,
    build=build,
    reads=("x", "angles"),
    needs_kernels=True,
    example=lambda: (Example(), torch.zeros(1, 2, 4, 8)),
)
"""Saves two products, a negation, a copy and a sum, each of which reads and writes all queries or keys."""
