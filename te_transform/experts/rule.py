"""Fuse the experts of a mixture model into one op: sort by expert, two grouped products, and back."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from te_transform.experts.forms import FORMS
from te_transform.experts.fused import Experts
from te_transform.experts.kernels import KernelExperts
from te_transform.graph import ops
from te_transform.graph.nodes import (
    called,
    dtype_name,
    is_parameter,
    is_tensor_node,
    may_be_view,
    reached,
    reads_of,
    users_of,
)
from te_transform.graph.pattern import Call, OneOf, Var
from te_transform.passes.layernorm_mlp import activation_pattern, clamped_gate, refuse_limits
from te_transform.plan.refusals import cut
from te_transform.plan.rule import Operation, Rule

_ENDS = Call(ops.group_ends, Var("experts"))


def _maybe_biased(product: Call, name: str) -> OneOf:
    """Return the pattern of a product, with or without a bias per expert."""
    rows = Call(operator.getitem, Var(name, is_parameter), Call(ops.in_order, Var("experts")))
    return OneOf(Call(torch.add, product, rows, commute=True), product)


_GROUPED_FC1 = Call(
    ops.grouped_mm, Call(ops.dispatch, Var("x"), Var("experts")), Var("fc1_weight"), _ENDS, role="fc1"
)
_BIASED_FC1 = _maybe_biased(_GROUPED_FC1, "fc1_bias")
_EVEN, _ODD = (Call(operator.getitem, _BIASED_FC1, (Ellipsis, slice(start, None, 2))) for start in (None, 1))
_ACTIVATED = OneOf(activation_pattern(_BIASED_FC1), OneOf(gated={"pairs": clamped_gate(_EVEN, _ODD)}))
_FC2 = Call(ops.grouped_mm, _ACTIVATED, Var("fc2_weight"), _ENDS, role="fc2")
_COMBINED = Call(
    ops.combine, _maybe_biased(_FC2, "fc2_bias"), Var("experts"), Var("weights"), Var("dtype"), role="combine"
)
# experts in forms that the op does not compute
_SUMMED_CHOICES = Call(ops.combine, Var("y"), Var("experts"), Var("weights"), Var("dtype"), role="summed")
_GROUPS = Call(ops.grouped_mm, Var("rows"), Var("weight"), Var("ends"), role="groups")
_COPIED_WEIGHTS = Call(operator.getitem, Var("weight", is_parameter), Var("choices", is_tensor_node))
_EACH = Call(torch.bmm, _COPIED_WEIGHTS, Var("rows"), role="each")
_EXPERT_PRODUCTS = (ops.grouped_mm, torch.bmm)
_PATH_ENDS = (ops.linear, *ops.NORMS, ops.sdpa)


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
    """Yield every reason why the op does not compute these experts, or None if another match reports it."""
    if fc1 is not None:
        yield from _refuse_two_products(fc1, gated, half, end)
        yield from refuse_limits(limit, least)
    elif summed is not None:
        yield (
            "the experts are not two products with a supported activation between them: no kernel supports "
            "other forms"
        )
    elif _is_reported_by_another_match(groups.node if each is None else each):
        yield None
    elif each is not None:
        yield (
            "each choice of a token reads a copy of its expert's weights, but the fused op needs tokens "
            "grouped by expert: call model.set_experts_implementation('grouped_mm') before the conversion"
        )
    elif reasons := [*cut(_nodes_since_topk(groups.node))]:
        yield from reasons
    else:
        yield (
            "the groups of tokens do not come from the indices of topk, the only recognized routing: choose "
            "the experts by torch.topk"
        )


def _refuse_two_products(fc1: Operation, gated: str, half: int, end: int) -> Iterator[str]:
    if fc1.x.dtype is not torch.bfloat16:
        yield (
            f"the experts compute in {dtype_name(fc1.x.dtype)}, but PyTorch's grouped matrix products "
            "support only bfloat16: convert the model with bfloat16 weights (te-transform: --dtype bfloat16)"
        )
    if gated == "pairs":
        half, end = fc1.width - fc1.width // 2, fc1.width
    # equal widths are required: a single column next to the gate would be broadcast
    if gated != "no" and not 2 * half == end == fc1.width:
        yield (
            f"the gate has {half} of the first product's {fc1.width} outputs, but the fused op needs exactly "
            "half: no kernel supports other splits"
        )


def _is_reported_by_another_match(product: fx.Node) -> bool:
    """Return True for the second product of experts, or if the sum over their choices is matched too."""
    return bool(
        _nearest_calls(product, reads_of, *_EXPERT_PRODUCTS) or _nearest_calls(product, users_of, ops.combine)
    )


def _nodes_since_topk(product: fx.Node) -> set[fx.Node]:
    """Return the nodes from a router's topk to a grouped product and the next product.

    The set is empty if the groups are not computed from topk.
    """
    nodes = reached([product.args[2]], lambda node: () if called(node) == "topk" else node.all_input_nodes)
    if all(called(node) != "topk" for node in nodes):
        return set()
    calls = {product, *_nearest_calls(product, users_of, *_EXPERT_PRODUCTS), *nodes}
    return {n for n in calls if called(n) != "topk" and n.op != "placeholder" and not may_be_view(n)}


def _nearest_calls(
    start: fx.Node, following: Callable[[fx.Node], Iterable[fx.Node]], *wanted: Any
) -> set[fx.Node]:
    """Return the nearest calls of `wanted` on paths from a node; paths end at another part of the layer."""
    ends = (*wanted, *_PATH_ENDS)
    nodes = reached(
        following(start), lambda node: () if node.target in ends else following(node), is_tensor_node
    )
    return {node for node in nodes if node.target in wanted}


def build(
    backend, activation: Operation, gated: str, limit: float | None = None, offset: str = "none"
) -> nn.Module:
    """Return the fused op."""
    experts = KernelExperts if backend.HAS_KERNELS else Experts
    return experts(activation=activation.op, gated=gated, limit=limit, offset=int(offset == "one"))


class Example(nn.Module):
    """Four experts, two per token."""

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
    pattern=OneOf(_COMBINED, _SUMMED_CHOICES, _GROUPS, _EACH),
    refuse=refuse,
    build=build,
    reads=("x", "experts", "weights", "fc1.weight", "fc2.weight", "dtype", "fc1_bias", "fc2_bias"),
    example=lambda: (Example(), (torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 4))),
    forms=FORMS,
)
"""Saves the passes over [tokens * choices, width] tensors around the two products.

One kernel sums over the choices, and one kernel computes a gated activation. Gradients are gathered, where
PyTorch adds them up row by row.
"""
