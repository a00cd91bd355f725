"""The experts of a mixture model: tokens sorted by expert, two grouped products, and back: one op."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    dtype_name,
    is_number,
    is_parameter,
    is_tensor_node,
    may_be_view,
)
from te_transform.graph.pattern import Call, OneOf, Var
from te_transform.passes.layernorm_mlp import activated, halves
from te_transform.plan.refusals import cut
from te_transform.plan.rule import Operation, Rule

_ENDS = Call(ops.group_ends, Var("experts"))


def _biased(product: Call, name: str) -> OneOf:
    """A product, or one to which each expert adds a bias of its own."""
    rows = Call(operator.getitem, Var(name, is_parameter), Call(ops.in_order, Var("experts")))
    return OneOf(Call(torch.add, product, rows, commute=True), product)


def _clamped(gate: Call, beside: Call) -> Call:
    """A gate in which no part of the product counts for more than a limit (GPT-OSS)."""
    limit = Var("limit", is_number)
    within = Call(torch.clamp, beside, Var("least", is_number), limit)
    return Call(
        torch.mul,
        Call((ops.silu, ops.quick_gelu), Call(torch.clamp, gate, None, limit), role="activation"),
        OneOf(offset={"one": Call(torch.add, within, 1, commute=True), "none": within}),
    )


_FC1 = Call(
    ops.grouped_mm, Call(ops.dispatch, Var("x"), Var("experts")), Var("fc1_weight"), _ENDS, role="fc1"
)
_HIDDEN = _biased(_FC1, "fc1_bias")
_EVEN, _ODD = (Call(operator.getitem, _HIDDEN, (Ellipsis, slice(start, None, 2))) for start in (None, 1))
_FIRST, _SECOND = halves(_HIDDEN)
_ACTIVATED = OneOf(
    activated(_HIDDEN),
    OneOf(gated={"first half": _clamped(_FIRST, _SECOND), "pairs": _clamped(_EVEN, _ODD)}),
)
_FC2 = Call(ops.grouped_mm, _ACTIVATED, Var("fc2_weight"), _ENDS, role="fc2")
_FUSED = Call(
    ops.combine, _biased(_FC2, "fc2_bias"), Var("experts"), Var("weights"), Var("dtype"), role="combine"
)
# experts of other kinds
_SUMMED = Call(ops.combine, Var("y"), Var("experts"), Var("weights"), Var("dtype"), role="summed")
_GROUPS = Call(ops.grouped_mm, Var("rows"), Var("weight"), Var("ends"), role="groups")
_COPIES = Call(operator.getitem, Var("weight", is_parameter), Var("choices", is_tensor_node))
_EACH = Call(torch.bmm, _COPIES, Var("rows"), role="each")
_PRODUCTS = (ops.grouped_mm, torch.bmm)
_ENDS_OF_WAYS = (ops.linear, *ops.NORMS, ops.sdpa)


def refuse(
    fc1: Operation | None = None,
    gated: str = "no",
    half: int = 0,
    end: int = 0,
    limit: float | None = None,
    least: float | None = None,
    summed: Operation | None = None,
    groups: Operation | None = None,
    each: fx.Node | None = None,
) -> Iterator[str | None]:
    """Every reason why these experts are none that the op computes; None where that is told elsewhere."""
    if fc1 is not None:
        yield from _of_this_kind(fc1, gated, half, end)
        if limit is not None and not 0 < limit == -least:
            yield (
                f"what is beside the gate is clamped to {least} and {limit}, the fused op has one limit on "
                "both sides: no kernel has two"
            )
    elif summed is not None:
        yield (
            "the experts are not two products with an activation between them that the fused op has: no "
            "kernel has others"
        )
    elif _is_told_elsewhere(groups.node if each is None else each):
        yield None
    elif each is not None:
        yield (
            "each choice of a token has a copy of its expert's weights, the fused op has tokens in groups: "
            "call model.set_experts_implementation('grouped_mm') before the conversion"
        )
    elif told := [*cut(_since_topk(groups.node))]:
        yield from told
    else:
        yield (
            "the groups of tokens are not those of topk's choices, which alone are known to be experts: "
            "choose by torch.topk"
        )


def _of_this_kind(fc1: Operation, gated: str, half: int, end: int) -> Iterator[str]:
    if fc1.x.dtype is not torch.bfloat16:
        yield (
            f"the experts compute in {dtype_name(fc1.x.dtype)}, PyTorch's kernels of products by groups are "
            "for bfloat16 alone: convert the model with its weights in that (te-transform: --dtype bfloat16)"
        )
    if gated == "pairs":
        half, end = fc1.width - fc1.width // 2, fc1.width
    if gated != "no" and not 2 * half == end == fc1.width:  # a single column beside the gate is broadcast
        yield (
            f"the gate has {half} of the first product's {fc1.width} outputs, experts have as many in the "
            "gate as beside it: no kernel has others"
        )


def _is_told_elsewhere(product: fx.Node) -> bool:
    """Whether it is the second product of experts, or these are known by the sum over their choices."""
    return bool(_reached(product, _reads, *_PRODUCTS) or _reached(product, _users, ops.combine))


def _since_topk(product: fx.Node) -> set[fx.Node]:
    """What is computed from a router's choices up to a product of their groups and the next one; nothing
    where the groups are not made of any."""
    found, waiting = {product, *_reached(product, _users, *_PRODUCTS)}, [product.args[2]]
    is_of_topk = False
    while waiting:
        node = waiting.pop()
        is_of_topk = is_of_topk or called(node) == "topk"
        if called(node) != "topk" and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return {node for node in found if is_of_topk and node.op != "placeholder" and not may_be_view(node)}


def _users(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _reads(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _reached(start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]], *wanted: Any) -> set[fx.Node]:
    """The nearest calls of `wanted` on the ways from a node, which end where another part of a layer is."""
    found, seen, waiting = set(), set(), [*following(start)]
    while waiting:
        node = waiting.pop()
        if node.target in wanted:
            found.add(node)
        elif node not in seen and node.target not in _ENDS_OF_WAYS and is_tensor_node(node):
            seen.add(node)
            waiting += following(node)
    return found


def build(
    backend, activation: Operation, gated: str, limit: float | None = None, offset: str = "none"
) -> nn.Module:
    """The fused op."""
    return backend.Experts(activation=activation.op, gated=gated, limit=limit, offset=int(offset == "one"))


class Example(nn.Module):
    """Four experts, of which each token has two."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.zeros(4, 16, 16, dtype=torch.bfloat16)) for _ in "12")

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        weights, chosen = scores.topk(2, dim=-1)
        numbers, order = torch.sort(chosen.reshape(-1))
        counts = torch.histc(numbers.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = F.relu(F.grouped_mm(x[order // 2], self.up.transpose(-2, -1), offs=ends))
        out = F.grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return out[back].view(len(x), 2, -1).sum(dim=1).to(x.dtype)


RULE = Rule(
    name="experts",
    pattern=OneOf(_FUSED, _SUMMED, _GROUPS, _EACH),
    refuse=refuse,
    build=build,
    reads=("x", "experts", "weights", "fc1.weight", "fc2.weight", "dtype", "fc1_bias", "fc2_bias"),
    example=lambda: (Example(), (torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 4))),
)
"""Saves the passes between the products over all tokens times their choices: the sum over the choices in one
kernel, gradients gathered where PyTorch adds up rows one by one, and a gated activation in one kernel."""
