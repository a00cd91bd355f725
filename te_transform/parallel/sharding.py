"""Sharding rules for the operations of the canonical graph.

Dimensions count from the end, as in the canonical graph. An operation without a rule reads gathered values.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.moves import ALL, spread_index
from te_transform.graph import ops
from te_transform.graph.nodes import argument, called, is_tensor_node, shape_of, value
from te_transform.parallel.collectives import Redistribution, Shards

Held = Mapping[fx.Node, Shards]  # the sharded values; all tensors of a tuple have the same shards
_NO_SIZE = 1_000_003  # a prime that no tensor has as a size


class Refusal(Exception):
    """The reason why an operation cannot be computed on shards.

    Args:
        reason: the sentence.
        indivisible: True if a mesh of another size could divide it.
        whole: values that would have to be sharded too.
    """

    def __init__(self, reason: str, *, indivisible: bool = False, whole: tuple[fx.Node, ...] = ()):
        super().__init__(reason)
        self.reason, self.indivisible, self.whole = reason, indivisible, whole


Moves = dict[fx.Node, tuple[Redistribution, Shards | None]]  # with the shards that are read or made


@dataclass
class ShardingStep:
    """One operation on shards.

    Args:
        shards: of the result. None if the result is whole, or a term of the sum over ranks (`is_term`).
        is_term: True if the ranks' results must be summed.
        moves: arguments that are brought into another placement before.
        args: arguments that have another value on shards, by position.
        reads_shape: True if argument 1 is the shape of the result, which is another one on this rank.
    """

    shards: Shards | None
    is_term: bool = False
    moves: Moves = field(default_factory=dict)
    args: dict[int, Any] = field(default_factory=dict)
    reads_shape: bool = False


ShardingRule = Callable[[fx.Node, Held, int], ShardingStep]


def step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep | None:
    """Return how a node is computed on shards, or None if it reads no sharded value.

    Raises:
        Refusal: the node cannot be computed on shards.
    """
    sharded = [argument for argument in node.all_input_nodes if argument in shards_of]
    if not sharded:
        return None
    rule = RULES.get(node.target)
    if rule is None:
        raise Refusal(f"{_the(node)} reads them, but has no sharding rule")
    return rule(node, shards_of, ranks)


def _the(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else f"the {called(node)}"


def _linear_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, weight, bias = (*node.args, None)[:3]
    of_x, of_weight = shards_of.get(x), shards_of.get(weight)
    if of_weight is None:
        if of_x.dim == -1:
            raise Refusal("a linear reads columns of its input, but its weight is not in the same shards")
        return ShardingStep(of_x)
    if of_weight.dim == -2:
        shards = of_weight.on(-1)
        moves: Moves = {} if of_x is None else {x: (Redistribution.GATHER_ENTER, of_x)}
        if isinstance(bias, fx.Node) and bias not in shards_of:
            moves[bias] = Redistribution.SHARE, shards
        return ShardingStep(shards, moves=moves)
    if of_x is not None and of_x != of_weight:
        raise Refusal("a linear reads other columns than its shard of the weight has")
    moves = {x: (Redistribution.SHARE, of_weight)} if of_x is None else {}
    if isinstance(bias, fx.Node):
        moves[bias] = Redistribution.LEAD, None
    return ShardingStep(None, is_term=True, moves=moves)


def _embedding(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    ids, weight, _, max_norm, _, by_frequency, sparse = (*node.args, None, None, 2.0, False, False)[:7]
    if shards_of[weight].dim != -2 or max_norm is not None or by_frequency or sparse or ids in shards_of:
        raise Refusal(
            "an embedding needs its whole table, for max_norm, scale_grad_by_freq, sparse or sharded ids"
        )
    return ShardingStep(None, is_term=True)


def _elementwise_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    """Shard the result like the arguments. A whole argument that broadcasts needs no shards."""
    given = [arg for arg in node.all_input_nodes if is_tensor_node(arg)]
    return _aligned(node, given, shards_of)


def _aligned(node: fx.Node, given: list[fx.Node], shards_of: Held) -> ShardingStep:
    different = {shards_of[arg] for arg in given if arg in shards_of}
    if len(different) > 1:
        raise Refusal(f"{_the(node)} reads values in different shards, but needs equal ones")
    (shards,) = different
    if shape_of(node)[shards.dim] != shards.size:
        raise Refusal(f"{_the(node)} repeats shards, but the sharded dimension must keep its size")
    full = [arg for arg in given if arg not in shards_of and _size_or_one(arg, shards.dim) == shards.size]
    alone = [arg for arg in given if arg in shards_of and _size_or_one(arg, shards.dim) != shards.size]
    if alone:
        raise Refusal(f"{_the(node)} reads shards of different sizes, but needs equal ones")
    moves: Moves = dict.fromkeys(full, (Redistribution.SHARE, shards)) if shards.size > 1 else {}
    return ShardingStep(shards, moves=moves)


def _size_or_one(node: fx.Node, dim: int) -> int:
    shape = shape_of(node)
    return shape[dim] if len(shape) >= -dim else 1


def _over_last(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    """Apply the rule of operations that read the whole last dimension, row by row."""
    x = node.args[0]
    if x not in shards_of:
        raise Refusal(f"{_the(node)} reads a sharded weight, but needs a whole one")
    if shards_of[x].dim == -1:
        raise Refusal(f"{_the(node)} reads whole rows, but the columns are sharded")
    return ShardingStep(shards_of[x])


def _rope_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    _over_last(node, shards_of, ranks)
    return _elementwise_step(node, shards_of, ranks)


def _softmax_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    shards = shards_of[node.args[0]]
    if node.args[1] % -len(shape_of(node)) == shards.dim:
        raise Refusal("a softmax reads a whole dimension, but this dimension is sharded")
    return ShardingStep(shards)


def _sdpa_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    query, key, value_, mask = node.args[:4]
    whole = tuple(x for x in (query, key, value_) if x not in shards_of)
    if whole:
        raise Refusal("not all of query, key and value are sharded, but linears must make all of them",
                      whole=whole)  # fmt: skip
    of_query, of_keys, of_values = shards_of_operands = [shards_of[x] for x in (query, key, value_)]
    if any(shards.dim not in (-3, -4) or len(shards.parts) > 1 for shards in shards_of_operands):
        raise Refusal("attention is not sharded by heads, but it needs whole heads")
    masks = [x for x in (mask, argument(node, "hidden")) if isinstance(x, fx.Node)]
    if of_keys != of_values or any(shards_of.get(x, of_query) != of_query for x in masks):
        raise Refusal("query, keys and mask are in different shards, but attention needs equal ones")
    per_head = [x for x in masks if _size_or_one(x, of_query.dim) == of_query.size > 1]
    moves: Moves = {x: (Redistribution.SHARE, of_query) for x in per_head if x not in shards_of}
    if (sinks := argument(node, "sinks")) is not None:
        moves[sinks] = Redistribution.SHARE, of_query.on(-1)
    if _has_other_keys(of_query, of_keys, ranks):
        moves |= dict.fromkeys((key, value_), (Redistribution.PICK, of_keys))
    return ShardingStep(of_query, moves=moves)


def _has_other_keys(of_query: Shards, of_keys: Shards, ranks: int) -> bool:
    """Return True if a rank has copies of more keys than its queries need: heads repeated for all queries."""
    if of_keys.copies == 1:
        return False
    is_repeated, is_one = of_keys.size == of_query.size, of_keys.size == of_keys.shares(ranks)
    if of_query.copies > 1 or not (is_repeated or is_one):
        raise Refusal("ranks have copies of several key heads, but each rank needs one")
    return is_repeated


def _batched_product_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    """Apply the rule of a matrix product that is sharded by batches."""
    given = [arg for arg in node.all_input_nodes if is_tensor_node(arg)]
    if any(shards_of[arg].dim > -3 for arg in given if arg in shards_of):
        raise Refusal(f"{_the(node)} reads sharded rows or columns, but only batches can be sharded")
    return _aligned(node, given, shards_of)


def _reshape_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x = node.args[0]
    shards = _reshaped_shards(tuple(shape_of(x)), tuple(shape_of(node)), shards_of[x], ranks)
    return ShardingStep(shards, reads_shape=True)


def _reshaped_shards(before: tuple[int, ...], after: tuple[int, ...], shards: Shards, ranks: int) -> Shards:
    """Return the shards of a tensor after a reshape from `before` to `after`.

    A part of the sharded dimension and the dimensions behind it are a block of memory, of which each rank has
    an equal share. After the reshape, the sharded dimension is the one that divides the same blocks.
    """
    is_empty = [size == 0 for size in after]
    before, after = _without_zeros(before, after)
    at = len(before) + shards.dim
    old, new = next((old, new) for old, new in _dim_groups(before, after) if at in old)
    is_one_head = shards.copies > 1 and shards.shares(ranks) == 1  # each rank has the whole dimension
    if is_one_head and new[0] > 0 and after[new[0] - 1] == 1:
        return Shards(new[0] - 1 - len(after), (1,), shards.copies)
    others = [i for i in new if after[i] != 1]
    is_same_dim = [before[i] for i in old if before[i] != 1] == [after[i] for i in others] == [shards.size]
    if is_same_dim and not is_one_head:  # only dimensions of size 1 come and go
        return shards.on(others[0] - len(after))
    if len(set(shards.parts)) > 1:
        raise Refusal("unequal parts of a product are reshaped together, but they must be equal")
    block = shards.parts[0] * math.prod(before[i] for i in old if i > at)
    for i in new:
        part, remainder = divmod(block, math.prod(after[j] for j in new if j > i))
        if remainder or not part or after[i] % part or (part == 1 and not is_one_head):
            continue
        uneven = next((size for size in (part, shards.parts[0]) if size % shards.shares(ranks)), None)
        if uneven is not None:
            raise Refusal(
                f"a dimension of {uneven} must be divided, but {ranks} ranks do not divide it",
                indivisible=True,
            )
        parts = (0,) if is_empty[i] else (part,) * (after[i] // part)
        return Shards(i - len(after), parts, shards.copies)
    raise Refusal("a reshape mixes shards, but must keep them apart")


def _without_zeros(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Replace zeros in both shapes by large sizes: a zero hides which dimensions belong together.

    The same reshape of a larger batch has such sizes. Both shapes hold equally many numbers afterwards.
    """
    zeros = max(shape.count(0) for shape in (before, after))
    sizes = [_NO_SIZE**2**number for number in range(zeros)]
    rests = [math.prod(size for size in shape if size) for shape in (before, after)]
    total, filled_shapes = math.lcm(*rests) * math.prod(sizes), []
    for shape, rest in zip((before, after), rests, strict=True):
        first = sizes[: shape.count(0) - 1]
        filled = iter([*first, total // (rest * math.prod(first))])
        filled_shapes.append(tuple(size or next(filled) for size in shape))
    return tuple(filled_shapes)


def _dim_groups(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[range, range]]:
    """Yield the groups of dimensions of two shapes that hold the same elements, in order.

    A group ends where the sizes so far have the same product. A dimension of size 1 belongs to the group
    before it, or to the first group.
    """
    products = [[*accumulate(shape, operator.mul, initial=1)] for shape in (before, after)]
    common = {*products[0]} & {*products[1]}
    starts = (0, 0)
    for product in sorted(common - {1} or common):
        stops = tuple(bisect_right(each, product) - 1 for each in products)
        yield range(starts[0], stops[0]), range(starts[1], stops[1])
        starts = stops


def _transpose(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, (a, b) = node.args[0], node.args[1:3] if len(node.args) > 1 else (-2, -1)
    return ShardingStep(shards_of[x].on({a: b, b: a}.get(shards_of[x].dim, shards_of[x].dim)))


def _permute(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, order = node.args[:2]
    return ShardingStep(
        shards_of[x].on([d % len(order) for d in order].index(len(order) + shards_of[x].dim) - len(order))
    )


def _unsqueeze_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, dim = node.args
    return ShardingStep(shards_of[x].on(shards_of[x].dim - (shards_of[x].dim <= dim)))


def _expand_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    shards = shards_of[node.args[0]]
    if shape_of(node)[shards.dim] != shards.size:
        raise Refusal("an expand repeats shards, but the sharded dimension must keep its size")
    return ShardingStep(shards, reads_shape=True)


def _columns_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, start, stop = node.args
    shards = shards_of[x]
    if shards.dim != -1:
        return ShardingStep(shards)
    at, places = 0, []
    for part in (*shards.parts, 0):
        places.append(at)
        at += part
    if start not in places or stop not in places or start >= stop:
        raise Refusal("columns are cut out of shards, but only whole parts of a linear's output can be")
    first, last = places.index(start), places.index(stop)
    if not shards.is_even(ranks):
        raise Refusal("parts of a product are cut out of unequal shards, but the shards must be equal",
                      indivisible=True)  # fmt: skip
    shares, parts = shards.shares(ranks), shards.parts[first:last]
    return ShardingStep(replace(shards, parts=parts), args={1: start // shares, 2: stop // shares})


def _getitem(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, index = node.args
    if isinstance(value(x), (tuple, list)):
        return ShardingStep(shards_of[x])
    index = spread_index(index, len(shape_of(x)))
    if any(isinstance(i, (fx.Node, list)) for i in index):
        raise Refusal("an index selects from the sharded dimensions, but only slices can")
    at = len(shape_of(x)) + shards_of[x].dim
    if [i for i in index if i is not None][at] != ALL:
        raise Refusal("an index cuts shards, but must keep them whole")
    seen, out = -1, []
    for i in index:
        seen += i is not None
        if i is None or isinstance(i, slice):
            out.append(seen if i is not None else None)
    return ShardingStep(shards_of[x].on(out.index(at) - len(out)))


def _pieces_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    """Shard the pieces of torch.split and torch.chunk, which must cut an unsharded dimension."""
    x, dim = node.args[0], node.args[2]
    if shards_of[x].dim == dim:
        raise Refusal(f"a {called(node)} cuts shards, but must keep them whole")
    return ShardingStep(shards_of[x])


def _unbind(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, dim = node.args
    if shards_of[x].dim == dim:
        raise Refusal("an unbind cuts shards, but must keep them whole")
    return ShardingStep(shards_of[x].on(shards_of[x].dim + (shards_of[x].dim < dim)))


def _cat_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    how = _aligned(node, list(node.args[0]), shards_of)
    if how.shards.dim == node.args[1]:
        raise Refusal("a cat joins shards along the sharded dimension, but must use another one")
    return how


def _repeat_interleave(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    x, repeats, dim = node.args
    shards = shards_of[x]
    if not isinstance(repeats, int):
        raise Refusal("shards are repeated a computed number of times, but the number must be constant")
    parts = tuple(part * repeats for part in shards.parts)
    return ShardingStep(replace(shards, parts=parts) if shards.dim == dim else shards)


def _cross_entropy_step(node: fx.Node, shards_of: Held, ranks: int) -> ShardingStep:
    logits, targets = node.args[:2]
    if (
        logits not in shards_of
        or shards_of[logits].dim != -1
        or len(shards_of[logits].parts) > 1
        or targets in shards_of
    ):
        raise Refusal("a cross entropy reads shards of rows, but needs shards of classes")
    return ShardingStep(None)


_ELEMENTWISE = (
    torch.add, torch.sub, torch.mul, torch.div, operator.truediv, torch.pow, torch.neg, torch.sqrt,
    torch.rsqrt, torch.square, torch.reciprocal, torch.tanh, torch.erf, torch.exp, torch.cos, torch.sin,
    torch.logical_not, torch.logical_or, torch.masked_fill, torch.where, torch.eq, torch.ne, torch.lt,
    torch.le, torch.gt, torch.ge, ops.cast, ops.dropout, ops.zero_hidden, torch.Tensor.contiguous,
    *ops.ACTIVATION_OPS,
)  # fmt: skip

RULES: dict[Any, ShardingRule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise_step),
    **dict.fromkeys(ops.NORMS, _over_last),
    **dict.fromkeys((torch.matmul, torch.bmm), _batched_product_step),
    **dict.fromkeys((torch.transpose, torch.t), _transpose),
    **dict.fromkeys((torch.split, torch.chunk), _pieces_step),
    ops.linear: _linear_step,
    ops.rope: _rope_step,
    ops.sdpa: _sdpa_step,
    ops.columns: _columns_step,
    ops.cross_entropy: _cross_entropy_step,
    F.embedding: _embedding,
    torch.softmax: _softmax_step,
    torch.reshape: _reshape_step,
    torch.permute: _permute,
    torch.unsqueeze: _unsqueeze_step,
    torch.Tensor.expand: _expand_step,
    torch.unbind: _unbind,
    torch.cat: _cat_step,
    torch.repeat_interleave: _repeat_interleave,
    operator.getitem: _getitem,
}
