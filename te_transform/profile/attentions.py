"""Find attention that does not run fused: the math backend, attention written out, needless masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_transform.profile.analysis import Analysis
from te_transform.profile.tree import FACTORED, Op, factor_shapes
from te_transform.profile.trials import EVENT_DTYPES, Replacement, Suspect

_SDPA_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]
_SDPA, _MATH = "scaled_dot_product_attention", "_scaled_dot_product_attention_math"
_ATEN_PRODUCTS = (*FACTORED, _SDPA)
_MASKING, _DROPPING = (
    ("add", "add_", "masked_fill", "masked_fill_", "where"),
    ("native_dropout", "bernoulli_"),
)
_DROPOUT = 0.1  # the probability in trials with a dropout
_NEEDLESS = {  # what a mask hides, as a clause, and what to pass in its place
    "nothing": ("nothing in this batch", "pass attn_mask=None for such batches"),
    "causal": ("what is_causal=True hides", "pass is_causal=True in place of the mask"),
}
_ASK_SDPA = (
    'call F.scaled_dot_product_attention; a model of transformers does with attn_implementation="sdpa", and '
    "te_transform.convert() fuses written-out attention"
)
_ASK_FUSED = (
    "give scaled_dot_product_attention what its fused kernels support: dropout_p=0 on a CPU, a mask without "
    "gradient, query, key and value of one head size, no sdpa_kernel(MATH)"
)


def math_attention(analysis: Analysis) -> Iterator[Suspect]:
    """Yield calls of scaled_dot_product_attention that ran its math backend."""
    for op in analysis.forward():
        if op.name == _MATH:
            call = op.outer.event
            shapes, has_mask = call.shapes[:3], len(call.shapes) > 3 and bool(call.dtypes[3])
            evidence = f"the math backend of {_SDPA} ran on {list(shapes[0])}{' with a mask' * has_mask}"
            dtype = EVENT_DTYPES.get(call.dtypes[0])
            before = partial(_by_sdpa, backends=[SDPBackend.MATH], masked=has_mask)
            after, name = partial(_by_sdpa, masked=has_mask), f"{_MATH} {has_mask}"
            trial = dtype and Replacement(shapes, dtype, before, after, analysis.recording.is_training, name)
            yield Suspect(
                "math attention", op.label, evidence, _ASK_FUSED, analysis.by_outer[op.outer], trial
            )


def _by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backends: Sequence[SDPBackend] = _SDPA_BACKENDS,
    masked: bool = False,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Call scaled_dot_product_attention, by one of these backends and, if `masked`, with a mask of zeros."""
    mask = _zero_mask(query, key) if masked else None
    is_grouped = query.size(-3) != key.size(-3)
    with sdpa_kernel([*backends]):
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, enable_gqa=is_grouped
        )


def written_out_attention(analysis: Analysis) -> Iterator[Suspect]:
    """Yield attention that consists of two products with a softmax in between."""
    ops = [*analysis.forward()]
    products = [number for number, op in enumerate(ops) if op.name in _ATEN_PRODUCTS]
    softmaxes = [number for number, op in enumerate(ops) if op.name == "_softmax"]
    for softmax in softmaxes:
        first = max((number for number in products if number < softmax), default=None)
        last = min((number for number in products if number > softmax), default=None)
        if first is not None and last is not None and _are_of_one(ops[first], ops[last]):
            yield _written_out_suspect(analysis, ops[first : last + 1])


def _are_of_one(first: Op, last: Op) -> bool:
    """Return True if two products are scores and values of one attention, outside of fused attention."""
    if not {first.name, last.name} <= {"bmm", "baddbmm"} or first.call is not last.call:
        return False
    (_, rows, _), (_, _, columns) = scores = factor_shapes(first)
    of_values = factor_shapes(last)
    return first.outer.name != _SDPA and of_values[0] == (scores[0][0], rows, columns)


def _written_out_suspect(analysis: Analysis, ops: Sequence[Op]) -> Suspect:
    first, last = ops[0], ops[-1]
    (heads, rows, size), (_, _, columns) = factor_shapes(first)
    _, of_values = factor_shapes(last)
    names = {op.name for op in ops}
    has_mask, has_dropout = bool(names & {*_MASKING}), bool(names & {*_DROPPING})
    shapes = (1, heads, rows, size), (1, heads, columns, size), (1, heads, columns, of_values[2])
    dtype = EVENT_DTYPES.get(first.event.dtypes[-2 if first.name == "bmm" else 1], torch.float32)
    options = {"masked": has_mask, "dropout": _DROPOUT * has_dropout}
    trial = Replacement(
        shapes,
        dtype,
        partial(_as_written, **options),
        partial(_by_sdpa, **options),
        analysis.recording.is_training,
        f"attention {options}",
    )
    taken = sum(analysis.by_outer[op] for op in {op.outer for op in ops})
    details = " and ".join(filter(None, ("a mask" * has_mask, "dropout" * has_dropout)))
    evidence = f"attention of [{heads}, {rows}, {columns}] is written out{f' with {details}' * bool(details)}"
    return Suspect("written-out attention", first.label, evidence, _ASK_SDPA, taken, trial)


def _as_written(query: Tensor, key: Tensor, value: Tensor, masked: bool, dropout: float) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if masked:
        scores = scores + _zero_mask(query, key)
    return F.dropout(F.softmax(scores, -1), dropout) @ value


def _zero_mask(query: Tensor, key: Tensor) -> Tensor:
    return torch.zeros(query.size(-2), key.size(-2), dtype=query.dtype, device=query.device)


def needless_mask(analysis: Analysis) -> Iterator[Suspect]:
    """Yield masks that hide nothing, or exactly what is_causal=True hides."""
    for line, hidden in analysis.watch.masks.items():
        kind = " and ".join(hidden)
        called = [op for op in analysis.forward() if op.name == _SDPA and op.label == line.label]
        if kind not in _NEEDLESS or not called:
            continue
        tells, advice = _NEEDLESS[kind]
        largest = max(called, key=lambda op: analysis.by_outer[op])
        dtype = EVENT_DTYPES.get(largest.event.dtypes[0])
        shapes = largest.event.shapes[:3]
        before, after = partial(_by_sdpa, masked=True), partial(_by_sdpa, is_causal=kind == "causal")
        trial = dtype and Replacement(
            shapes, dtype, before, after, analysis.recording.is_training, f"mask of {kind}"
        )
        evidence = f"the mask of {_SDPA} at {line.place} hides {tells}"
        taken = sum(analysis.by_outer[op] for op in called)
        yield Suspect("needless mask", line.label, evidence, advice, taken, trial)
