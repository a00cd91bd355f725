"""Find products and norms in fp32 where a lower precision was intended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.graph.grouped import grouped
from te_transform.graph.nodes import dtype_name
from te_transform.profile.analysis import Analysis
from te_transform.profile.classes import NORM, PRODUCT
from te_transform.profile.tree import FACTORED, Op, factor_shapes
from te_transform.profile.trials import EVENT_DTYPES, Replacement, Suspect


def single_precision(analysis: Analysis) -> Iterator[Suspect]:
    """Yield products in fp32 of a model in autocast, or with mostly bf16 or fp16 parameters."""
    low = _intended(analysis.model)
    if low is None:
        return
    advice = f"cast their inputs to {dtype_name(low)}, or remove autocast(enabled=False) around them"
    for op in analysis.ops:
        is_outermost = op.kind == PRODUCT and (op.parent is None or op.parent.kind != PRODUCT)
        if is_outermost and _is_single(op) and not _is_outer(op):
            shapes = tuple(
                shape
                for shape, dtype in zip(op.event.shapes, op.event.dtypes, strict=True)
                if dtype in EVENT_DTYPES
            )
            evidence = f"products run in float32, such as {' x '.join(map(str, map(list, shapes[-2:])))}"
            trial = None
            if op.name in FACTORED:
                called = getattr(torch.ops.aten, op.name)
                trial = Replacement(
                    shapes, torch.float32, called, _lowered(called, low), False, f"{op.name} in {low}"
                )
            taken = analysis.within(op)
            yield Suspect("fp32 products", op.label, evidence, advice, taken, trial, together=True)


def _intended(model: nn.Module) -> torch.dtype | None:
    """Return the low dtype in which products should run, or None."""
    floating = [p for p in model.parameters() if p.is_floating_point()]
    device = floating[0].device.type if floating else "cpu"
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return _stored_dtype(floating)


def _stored_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """Return the low dtype of most parameters, or None."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    return most if most in (torch.bfloat16, torch.float16) else None


def _is_single(op: Op) -> bool:
    dtypes = {EVENT_DTYPES.get(dtype) for dtype in op.event.dtypes} - {None}
    return dtypes == {torch.float32}


def _is_outer(op: Op) -> bool:
    """Return True for a product without a sum, such as the angles of a rotary embedding, which need fp32."""
    return op.name in (*FACTORED, "matmul") and factor_shapes(op)[0][-1:] == (1,)


def single_precision_norms(analysis: Analysis) -> Iterator[Suspect]:
    """Yield norms in fp32 of a model with mostly bf16 or fp16 parameters. Autocast runs norms in fp32."""
    low = _stored_dtype(p for p in analysis.model.parameters() if p.is_floating_point())
    if low is None:
        return
    norms = (op for op in analysis.forward() if op.kind == NORM and op.outer is op and _is_single(op))
    for label, ops in grouped((op.label, op) for op in norms).items():
        yield _norm_suspect(analysis, label, ops, low)


def _norm_suspect(analysis: Analysis, label: int, ops: list[Op], low: torch.dtype) -> Suspect:
    first, name = ops[0], dtype_name(low)
    kernel = _NORM_KERNELS.get(first.name)
    is_module = "norm" in analysis.labels[label].kind.lower()  # its casts count as well
    taken = analysis.cost({label}) if is_module else sum(analysis.by_outer[op] for op in ops)
    how = "written out" if kernel is None else f"as {first.name}"
    evidence = f"norms run in float32, such as {list(first.event.shapes[0])} {how}"
    advice = (
        f"call F.layer_norm or F.rms_norm on {name} tensors, whose kernels compute in float32 and write "
        f"{name}; te_transform.convert() fuses norms that are written out"
    )
    before, after = (
        (_written_out_norm, _called_rms_norm) if kernel is None else (partial(_widened_norm, kernel), kernel)
    )
    trial = Replacement(
        first.event.shapes[:1], low, before, after, analysis.recording.is_training, f"norm {first.name}"
    )
    return Suspect("fp32 norms", label, evidence, advice, taken, trial, together=True)


def _called_rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


_NORM_KERNELS = {"layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "rms_norm": _called_rms_norm}


def _written_out_norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _widened_norm(kernel: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return kernel(x.float()).to(x.dtype)


def _lowered(called: Callable[..., Tensor], low: torch.dtype) -> Callable[..., Tensor]:
    """Return a product in a low dtype of tensors that are cast once, in the first call."""
    cast: list[Tensor] = []

    def product(*tensors: Tensor) -> Tensor:
        cast.extend(tensor.to(low) for tensor in tensors[len(cast) :])
        return called(*cast)

    return product
