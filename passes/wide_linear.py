"""Multiply a 16-bit input by a 16-bit weight with a result in fp32, without casting both (routers)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx, nn

from te_transform.canonicalize.op import Forms, Spelling
from te_transform.graph import ops
from te_transform.graph.bound import F
from te_transform.graph.nodes import dtype_of, is_parameter
from te_transform.graph.pattern import Call, Match, Var, X
from te_transform.plan.rule import Operation, Rule


def _wide_linear(graph: fx.Graph, match: Match) -> tuple[Callable, tuple] | None:
    """Return the op for a linear in fp32 whose input and weight are cast from one 16-bit dtype.

    The linear must be the only reader of the cast input, whose gradients PyTorch adds up in fp32.
    """
    x, weight, bias, cast = (match.bound[name] for name in ("x", "weight", "bias", "cast"))
    narrow = dtype_of(x) is dtype_of(weight) and dtype_of(x).itemsize == 2
    fits = narrow and dtype_of(match.root) is torch.float32 and len(cast.users) == 1
    return (ops.wide_linear, (x, weight, bias)) if fits else None


_CAST_INPUT = Call(ops.cast, X, role="cast")
_CAST_WEIGHT = Call(ops.cast, Var("weight", is_parameter))
_FORMS = Forms((Spelling(Call(ops.linear, _CAST_INPUT, _CAST_WEIGHT, Var("bias")), _wide_linear),))


def refuse(product: Operation) -> Iterator[str]:
    """Yield no reason: the op covers every such linear."""
    yield from ()


def build(backend, product: Operation) -> nn.Module:
    """Return the backend's product."""
    return backend.WideLinear()


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

Products of two 16-bit numbers are exact in fp32. The sums of tensor cores round more than fp32's: with
16,384 inputs, the error is 9e-6 of the result instead of 1e-6 (H200). An input in 16 bits rounds 2e-3.
"""
