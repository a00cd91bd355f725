"""The experts of a mixture model: tokens sorted by expert, two grouped products, and back: one op."""

from collections.abc import Iterator

import torch
from torch import nn

from te_transform.graph import ops
from te_transform.graph.nodes import dtype_name
from te_transform.graph.pattern import Call, Var
from te_transform.passes.layernorm_mlp import activated
from te_transform.plan.rule import Operation, Rule

_ENDS = Call(ops.group_ends, Var("experts"))
_FC1 = Call(
    ops.grouped_mm, Call(ops.dispatch, Var("x"), Var("experts")), Var("fc1_weight"), _ENDS, role="fc1"
)
_HIDDEN = activated(_FC1)
_FC2 = Call(ops.grouped_mm, _HIDDEN, Var("fc2_weight"), _ENDS, role="fc2")


def refuse(fc1: Operation, gated: str, half: int = 0, end: int = 0) -> Iterator[str]:
    """Every reason why these experts are none that the op computes."""
    if fc1.x.dtype is not torch.bfloat16:
        yield (
            f"the experts compute in {dtype_name(fc1.x.dtype)}, PyTorch's kernels of products by groups are "
            "for bfloat16 alone: convert the model with its weights in that"
        )
    if gated != "no" and not 2 * half == end == fc1.width:  # a single column beside the gate is broadcast
        yield (
            f"the gate has {half} of the first product's {fc1.width} outputs, experts have as many in the "
            "gate as beside it"
        )


def build(backend, activation: Operation, gated: str) -> nn.Module:
    """The fused op."""
    return backend.Experts(activation=activation.op, gated=gated)


RULE = Rule(
    name="experts",
    pattern=Call(ops.combine, _FC2, Var("experts"), Var("weights"), Var("dtype"), role="combine"),
    refuse=refuse,
    build=build,
    reads=("x", "experts", "weights", "fc1.weight", "fc2.weight", "dtype"),
)
"""Saves the passes between the products over all tokens times their choices: the sum over the choices in one
kernel, gradients gathered where PyTorch adds up rows one by one, and a gated activation in one kernel."""
