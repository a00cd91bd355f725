"""Multiply a 16-bit input by a 16-bit weight with a result in fp32, without casting both.

Routers of mixtures do this, and hyper-connections, which normalize their streams first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from te_transform.canonicalize.op import Forms, Spelling
from te_transform.graph import ops
from te_transform.graph.bound import F
from te_transform.graph.nodes import dtype_of, is_parameter
from te_transform.graph.pattern import Call, Match, OneOf, Pattern, Var, X
from te_transform.plan.rule import Operation, Rule


def _wide_linear(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    """Return the op for a linear in fp32 whose input and weight are cast from one 16-bit dtype.

    Nothing else may read the cast or normalized input, whose gradients PyTorch adds up in fp32.
    """
    x, weight, bias, eps = (match.bound.get(name) for name in ("x", "weight", "bias", "eps"))
    narrow = dtype_of(x) is dtype_of(weight) and dtype_of(x).itemsize == 2
    inner = (node for node in match.nodes if node is not match.root)
    alone = all(user in match.nodes for node in inner for user in node.users)
    if not narrow or dtype_of(match.root) is not torch.float32 or not alone:
        return None
    return ops.wide_linear, (x, weight, bias) if eps is None else (x, weight, bias, eps)


_CAST_INPUT = Call(ops.cast, X, role="cast")
_CAST_WEIGHT = Call(ops.cast, Var("weight", is_parameter))
_NORM_EPS = Var("eps", lambda value: type(value) is float)
_NORMALIZED_INPUT = Call(ops.rms_norm, _CAST_INPUT, None, _NORM_EPS)
_SQUARES = Call(torch.mean, OneOf(Call(torch.square, _CAST_INPUT), Call(torch.pow, _CAST_INPUT, 2)), -1, True)
_INVERSE_LENGTH = Call(torch.rsqrt, Call(torch.add, _SQUARES, _NORM_EPS, commute=True))


def _linear(x: Pattern, bias: Any = None) -> Call:
    return Call(ops.linear, x, _CAST_WEIGHT, bias)


_FORMS = Forms(
    (
        Spelling(_linear(OneOf(_CAST_INPUT, _NORMALIZED_INPUT), Var("bias")), _wide_linear),
        # the same norm, after the product: DeepSeek V4 has it before, HY 4 has it after
        Spelling(Call(torch.mul, _linear(_CAST_INPUT), _INVERSE_LENGTH, commute=True), _wide_linear),
    )
)


def refuse(product: Operation) -> Iterator[str]:
    """Yield no reason: the op covers every such linear."""
    yield from ()


def build(backend, product: Operation) -> nn.Module:
    """Return the backend's product."""
    return backend.WideLinear(eps=product.eps)


class Example(nn.Module):
    """A router in fp32: the scores of four experts for each token."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).softmax(-1)


RULE = Rule(
    name="wide_linear",
    pattern=Call(ops.wide_linear, role="product"),
    refuse=refuse,
    build=build,
    reads=("product.x", "product.weight", "product.bias"),
    needs_kernels=True,
    example=lambda: (Example(), torch.zeros(8, 16, dtype=torch.bfloat16)),
    forms=_FORMS,
)
"""Saves the casts of input and weight, and the product in fp32, which does not run on tensor cores.

Products of two 16-bit numbers are exact in fp32, and the sums are in fp32, so the result is as precise. A
normalization multiplies the products of each row by one number, so that the normalized input, in fp32, is
neither written nor kept for the backward.
"""
