"""Run a rotary position embedding in one kernel if its angles are available."""

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
    dtype_name,
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
    """Return the pattern of the cosines or sines of angles: kernels take the angles themselves.

    `scaled` makes both match with a factor, or both without one.
    """
    angles = Maybe(torch.unsqueeze, Var("angles", lambda node: not _is_spread(node)))
    of_angles = Maybe((torch.unsqueeze, ops.cast), Call(function, angles))
    times = Call(torch.mul, of_angles, Var("factor", is_number), commute=True)
    return Read(OneOf(scaled={"no": of_angles, "yes": Maybe((torch.unsqueeze, ops.cast), times)}))


def _is_spread(angles: Any) -> bool:
    """Return True if angles have a size-1 dimension for heads, or too many leading dimensions for kernels."""
    spread = isinstance(angles, fx.Node) and angles.target is torch.unsqueeze
    return spread and (len(shape_of(angles)) > 3 or angles.args[1] == -2)


def refuse(
    rope: Operation | None = None,
    other: Operation | None = None,
    attention: Operation | None = None,
    angles: fx.Node | None = None,
) -> Iterator[str | None]:
    """Yield every reason why the kernel would rotate differently."""
    if attention is not None:
        yield from [*_refuse_other_rotations(attention.node)] or [None]
        return
    if other is not None:
        yield from _refuse_missing_angles(*other.node.args[1:3])
        return
    rotated, by = shape_of(rope.node), shape_of(angles)
    if _length_first(rope, angles) is None:
        yield (
            f"queries of shape {list(rotated)} are rotated by angles of shape {list(by)}, but the kernel "
            "needs [batch, heads, length, width] and [length, width] or [batch, length, width]: change their "
            "layout"
        )
    if dtype_of(rope.node) is not rope.x.dtype:
        yield (
            f"a tensor in {dtype_name(rope.x.dtype)} is rotated by cosines in {dtype_name(rope.cos.dtype)}, "
            "but the kernel rounds to the dtype of the rotated tensor: cast the result to that dtype"
        )


def _refuse_other_rotations(attention: fx.Node) -> Iterator[str]:
    """Yield why queries or keys are rotated by other operations than x * cos + rotated * sin."""
    calls = [node for operand in attention.args[:2] for node in rotated_by(operand)]
    if any(dtype_of(node).is_complex for node in calls):
        yield (
            "queries or keys are rotated as complex numbers, but the kernel rotates two columns of a head, "
            "which are neighbors or half a head apart: compute torch.stack((x1 * cos - x2 * sin, x2 * cos + "
            "x1 * sin), -1).flatten(-2), where x1 is x[..., ::2] and x2 is x[..., 1::2]"
        )
    elif calls:
        yield (
            "queries or keys are rotated in another form, but the kernel rotates two columns of a head, "
            "which are neighbors or half a head apart: compute x * cos + torch.cat((-x2, x1), -1) * sin for "
            "halves x1 and x2, torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2) for "
            "neighbors"
        )


def _refuse_missing_angles(cos: fx.Node, sin: fx.Node) -> Iterator[str | None]:
    """Yield why the angles of cosines and sines were not found."""
    (of_cos, between), (of_sin, more) = map(_before_layout, (cos, sin))
    names = [called(node) for node in (*between, *more) if node.target not in (torch.unsqueeze, ops.cast)]
    if any(map(is_model_tensor, (of_cos, of_sin))):
        yield (
            "the cosines and sines are stored, but the kernel reads angles: store the angles in float32, and "
            "take cos and sin of them in the forward"
        )
    elif "placeholder" in (of_cos.op, of_sin.op):
        yield None  # a block gets them from its model; another capture covers the whole model
    elif (of_cos.target, of_sin.target) != (torch.cos, torch.sin):
        yield (
            f"the cosines come from {called(of_cos)} and the sines from {called(of_sin)}, but the kernel "
            "computes them from angles: take torch.cos and torch.sin of the angles"
        )
    elif of_cos.args[0] is not of_sin.args[0]:
        yield (
            "cosines and sines are taken of two tensors, but the kernel reads one: assign the angles to one "
            "variable, and take cos and sin of it"
        )
    elif names and {*names} <= {"mul", "div", "neg"}:
        yield (
            f"the cosines and sines go through {', '.join(dict.fromkeys(names))} before the rotation, but "
            "the kernel multiplies both by one number: write one product with that number for each, or "
            "multiply the rotated tensor"
        )
    elif names:
        yield (
            f"the cosines and sines go through {', '.join(dict.fromkeys(names))} before the rotation, but "
            "the kernel reads angles and one factor: apply these operations to the angles, before cos and "
            "sin"
        )
    else:
        yield (
            "the angles are written to in place, but the kernel reads them at the rotation: write to a new "
            "tensor instead"
        )


_LAID_OUT_BY = (
    torch.unsqueeze, torch.reshape, torch.Tensor.expand, torch.transpose, torch.permute, torch.t, torch.neg,
    torch.cat, torch.mul, torch.div, torch.repeat_interleave, torch.Tensor.contiguous, torch.Tensor.detach,
    operator.getitem, ops.columns, ops.cast, F.embedding, "repeat", "index_select", "squeeze",
)  # fmt: skip


def _before_layout(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the value that cosines or sines were before layout changes, and the calls that changed them."""
    between = []
    while node.target in _LAID_OUT_BY:
        tensors = filter(is_tensor_node, node.all_input_nodes)
        floating = [read for read in tensors if value(read).is_floating_point()]  # no index
        if not floating:
            break
        between.append(node)
        node = floating[0]
    return node, between


def _length_first(rope: Operation, angles: fx.Node) -> bool | None:
    """Return True for queries [batch, length, heads, width], False for [batch, heads, length, width].

    Return None if the queries have another layout, or if the shape of the angles does not fit.
    """
    rotated, by = shape_of(rope.node), shape_of(angles)
    if len(rotated) != 4 or len(by) not in (2, 3):
        return None
    for length, spread in ((2, (*by[:-2], 1, *by[-2:])), (1, (*by[:-1], 1, by[-1]))):
        fits = same_shape(by[-2:], (rotated[length], rotated[3]))
        if fits and all(same_shape(_broadcast(p.shape), _broadcast(spread)) for p in (rope.cos, rope.sin)):
            return length == 1
    return None


def _broadcast(shape: Sequence) -> tuple:
    """Return a shape without leading ones, for comparison under broadcasting."""
    return tuple(dropwhile(lambda size: isinstance(size, int) and size == 1, shape))


def build(backend, rope: Operation, angles: fx.Node, factor: float = 1.0) -> nn.Module:
    """Return the fused op; `factor` multiplies cosines and sines (YaRN)."""
    return backend.Rotary(
        factor, wide=rope.wide, length_first=_length_first(rope, angles), in_pairs=rope.in_pairs
    )


class Example(nn.Module):
    """The rotation of queries [batch, heads, length, width] by angles [1, length, width]."""

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
"""Saves two multiplications, a negation, a copy and a sum; each reads and writes all queries or keys."""
