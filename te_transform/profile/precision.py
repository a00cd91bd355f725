"""Find products in fp32 where a lower precision was intended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from te_transform.graph.nodes import dtype_name
from te_transform.profile.analysis import Analysis
from te_transform.profile.classes import PRODUCT
from te_transform.profile.suspect import Suspect
from te_transform.profile.tree import Op
from te_transform.profile.trials import EVENT_DTYPES, Replacement

_TENSOR_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")  # all arguments that they need are tensors


def single_precision(found: Analysis) -> Iterator[Suspect]:
    """Yield products in fp32 of a model in autocast, or with mostly bf16 or fp16 parameters."""
    low = _intended(found.model)
    if low is None:
        return
    advice = f"cast their inputs to {dtype_name(low)}, or remove autocast(enabled=False) around them"
    for op in found.ops:
        if op.kind == PRODUCT and (op.parent is None or op.parent.kind != PRODUCT) and _is_single(op):
            shapes = tuple(
                shape
                for shape, dtype in zip(op.event.shapes, op.event.dtypes, strict=True)
                if dtype in EVENT_DTYPES
            )
            evidence = f"products run in float32, such as {' x '.join(map(str, map(list, shapes[-2:])))}"
            trial = None
            if op.name in _TENSOR_PRODUCTS:
                called = getattr(torch.ops.aten, op.name)
                trial = Replacement(
                    shapes, torch.float32, called, _Lowered(called, low), False, f"{op.name} in {low}"
                )
            yield Suspect("fp32 products", op.label, evidence, advice, found.within(op), trial)


def _intended(model: nn.Module) -> torch.dtype | None:
    """Return the low dtype in which products should run, or None."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    device = floating[0].device.type if floating else "cpu"
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    sizes: Counter[torch.dtype] = Counter()
    for parameter in floating:
        sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return most if most in (torch.bfloat16, torch.float16) else None


def _is_single(op: Op) -> bool:
    dtypes = {EVENT_DTYPES.get(dtype) for dtype in op.event.dtypes} - {None}
    return dtypes == {torch.float32}


class _Lowered:
    """A product of tensors that were cast once, in the first call."""

    def __init__(self, called: Callable[..., Tensor], low: torch.dtype):
        self.called, self.low = called, low
        self.cast: list[Tensor] = []

    def __call__(self, *tensors: Tensor) -> Tensor:
        self.cast = self.cast or [tensor.to(self.low) for tensor in tensors]
        return self.called(*self.cast)
