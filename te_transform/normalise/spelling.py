"""One target per operation, its arguments by position and its dimensions counted from the end.

A torch function, a Tensor method, an operator and its in-place form arrive under names of their own; the
table gives each the call that stands for all of them. Names that it does not have stay as they were recorded.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform import rewrite, vocabulary
from te_transform.normalise.inplace import must_stay
from te_transform.pattern import dtype_of, is_tensor_node, shape_of
from te_transform.trace import Recording

FULL = slice(None)


def spell(recording: Recording) -> None:
    """Rewrite every call that the table has; a write in place becomes a new value where nobody can tell."""
    stay = must_stay(recording.graph)
    for node in recording.graph.nodes:
        call = _canonical(node) if node.op == "call_function" and node not in stay else None
        if call is not None:
            rewrite.respell(node, *call)
    _spell_moves(recording)


def _canonical(node: fx.Node) -> tuple | None:
    spelling = SPELLINGS.get(_bare_name(node.target))
    if spelling is None:
        return None
    try:
        bound = _signature(spelling).bind(*node.args, **node.kwargs)
    except TypeError:  # a form that the table does not have, with out= for instance
        return None
    return spelling(*bound.args, **bound.kwargs)


def _bare_name(target: Any) -> str:
    """`add` of torch.add, Tensor.add_, operator.iadd and Tensor.__iadd__; "" where it is not torch's."""
    module = getattr(target, "__module__", None) or getattr(target, "__objclass__", torch.Tensor).__module__
    if module.split(".")[0] not in ("torch", "_operator", "builtins"):
        return ""
    name = target.__name__.strip("_")
    return name[1:] if name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ipow") else name


@cache
def _signature(spelling: Callable) -> inspect.Signature:
    return inspect.signature(spelling)


def _back(x: Any, dim: Any, extra: int = 0) -> Any:
    """The dimension counted from the end: -1 is the last, however many lead."""
    if isinstance(dim, (tuple, list)):
        return _back(x, dim[0], extra) if len(dim) == 1 else tuple(_back(x, d, extra) for d in dim)
    first = x[0] if isinstance(x, (tuple, list)) else x
    return dim - len(shape_of(first)) - extra if isinstance(dim, int) and dim >= 0 else dim


def _sizes(sizes: tuple) -> tuple:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes


def _swap(x: fx.Node, a: int, b: int) -> tuple:
    if len(shape_of(x)) == 2 and a % 2 != b % 2:
        return torch.t, (x,)
    return torch.transpose, (x, *sorted((_back(x, a), _back(x, b))))


def permuted(x: fx.Node, *dims: Any) -> tuple:
    """The call that permutes the dimensions of `x`: a transpose where it swaps two."""
    order = [d % len(shape_of(x)) for d in _sizes(dims)]
    moved = [i for i, d in enumerate(order) if i != d]
    return _swap(x, *moved) if len(moved) == 2 else (torch.permute, (x, tuple(order)))


def _view(x: fx.Node, *sizes: Any, shape: Any = None, size: Any = None) -> tuple | None:
    target = _sizes(sizes) or shape or size
    if not target or any(isinstance(s, torch.dtype) for s in target):  # x.view(dtype) reads other bits
        return None
    return torch.reshape, (x, tuple(target))


def _attribute(x: fx.Node, name: str) -> tuple | None:
    rank = len(shape_of(x)) if is_tensor_node(x) else 0
    return _swap(x, -2, -1) if rank >= 2 and (name == "mT" or (name == "T" and rank == 2)) else None


def _item(x: fx.Node, index: Any) -> tuple:
    """x[..., a:b] is columns, x[:, None] unsqueeze; other indices stay, x[:] too: it touches the tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    rest = [i for i in parts if not (i is Ellipsis or (isinstance(i, slice) and i == FULL))]
    if is_tensor_node(x) and rest == [None]:
        at = parts.index(None)
        return torch.unsqueeze, (x, at - len(parts) if Ellipsis in parts[:at] else _back(x, at, extra=1))
    if is_tensor_node(x) and len(rest) == 1 and rest[0] is parts[-1] and isinstance(rest[0], slice):
        reaches_last = parts[0] is Ellipsis or len(parts) == len(shape_of(x))
        return _columns(x, rest[0]) if reaches_last else (operator.getitem, (x, index))
    return operator.getitem, (x, index)


def _columns(x: fx.Node, part: slice) -> tuple:
    bounds, width = (part.start, part.stop, part.step), shape_of(x)[-1]
    if (
        not isinstance(width, int)
        or not all(b is None or type(b) is int for b in bounds)
        or part.step not in (None, 1)
    ):
        return operator.getitem, (x, (Ellipsis, part))
    return vocabulary.columns, (x, *part.indices(width)[:2])


def _narrow(x: fx.Node, dim: int, start: Any, length: Any) -> tuple | None:
    plain = type(start) is int and start >= 0 and type(length) is int
    return (vocabulary.columns, (x, start, start + length)) if plain and _back(x, dim) == -1 else None


def _product(x: Any, y: Any) -> tuple:
    return (torch.mul, (x, y)) if isinstance(x, fx.Node) else (torch.mul, (y, x))


def _sum(x: Any, y: Any, alpha: Any = 1) -> tuple | None:
    if alpha != 1:
        return None
    return (torch.add, (x, y)) if isinstance(x, fx.Node) else (torch.add, (y, x))


def _not(x: fx.Node) -> tuple | None:
    return (torch.logical_not, (x,)) if dtype_of(x) is torch.bool else None


def _softmax(input: fx.Node, dim: Any, dtype: Any) -> tuple | None:
    return (torch.softmax, (input, _back(input, dim), dtype)) if dim is not None else None


def _gelu(input: fx.Node, approximate: str = "none") -> tuple:
    return vocabulary.gelu_tanh if approximate == "tanh" else vocabulary.gelu, (input,)


def _baddbmm(input: fx.Node, batch1: fx.Node, batch2: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> tuple:
    return torch.baddbmm, (input, batch1, batch2), {"beta": beta, "alpha": alpha}


def _sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> tuple:
    return vocabulary.sdpa, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _elementwise(function: Callable) -> Callable:
    return lambda input, inplace=False: (function, (input,))


def _comparison(function: Callable) -> Callable:
    return lambda input, other: (function, (input, other))


# name -> the call as it may be written, and the call that stands for it; None: this form stays as it is
SPELLINGS: dict[str, Callable[..., tuple | None]] = {
    "add": lambda input, other, alpha=1: _sum(input, other, alpha),
    "radd": lambda input, other: _sum(other, input),
    "sub": lambda input, other, alpha=1: (torch.sub, (input, other)) if alpha == 1 else None,
    "mul": lambda input, other: _product(input, other),
    "multiply": lambda input, other: _product(input, other),
    "rmul": lambda input, other: _product(other, input),
    "div": lambda input, other, rounding_mode=None: (
        (torch.div, (input, other)) if not rounding_mode else None
    ),
    "truediv": lambda input, other: (torch.div, (input, other)),
    "true_divide": lambda input, other: (torch.div, (input, other)),
    "rdiv": lambda input, other: (operator.truediv, (other, input)),
    "rtruediv": lambda input, other: (operator.truediv, (other, input)),
    "pow": lambda input, exponent: (torch.pow, (input, exponent)),
    "rpow": lambda input, base: (torch.pow, (base, input)),
    "matmul": lambda input, other: (torch.matmul, (input, other)),
    "mm": lambda input, mat2: (torch.matmul, (input, mat2)),
    "rmatmul": lambda input, other: (torch.matmul, (other, input)),
    "linear": lambda input, weight, bias=None: (F.linear, (input, weight, bias)),
    "bmm": lambda input, mat2: (torch.bmm, (input, mat2)),
    "addmm": lambda input, mat1, mat2: (torch.addmm, (input, mat1, mat2)),
    "baddbmm": _baddbmm,
    "mean": lambda input, dim, keepdim=False: (torch.mean, (input, _back(input, dim), keepdim)),
    "softmax": lambda input, dim, dtype=None, _stacklevel=3: _softmax(input, dim, dtype),
    "masked_fill": lambda input, mask, value: (torch.masked_fill, (input, mask, value)),
    "where": lambda condition, input, other: (torch.where, (condition, input, other)),
    "invert": _not,
    "bitwise_not": _not,
    "transpose": lambda input, dim0, dim1: _swap(input, dim0, dim1),
    "swapaxes": lambda input, axis0, axis1: _swap(input, axis0, axis1),
    "swapdims": lambda input, dim0, dim1: _swap(input, dim0, dim1),
    "t": lambda input: (torch.t, (input,)),
    "permute": lambda input, *dims: permuted(input, *dims),
    "getattr": _attribute,
    "view": _view,
    "reshape": _view,
    "expand": lambda input, *size: (torch.Tensor.expand, (input, _sizes(size))),
    "broadcast_to": lambda input, size: (torch.Tensor.expand, (input, tuple(size))),
    "unsqueeze": lambda input, dim: (torch.unsqueeze, (input, _back(input, dim, extra=1))),
    "cat": lambda tensors, dim=0: (torch.cat, (tuple(tensors), _back(tensors, dim))),
    "concat": lambda tensors, dim=0: (torch.cat, (tuple(tensors), _back(tensors, dim))),
    "split": lambda tensor, split_size_or_sections, dim=0: (
        torch.split,
        (tensor, split_size_or_sections, _back(tensor, dim)),
    ),
    "chunk": lambda input, chunks, dim=0: (torch.chunk, (input, chunks, _back(input, dim))),
    "unbind": lambda input, dim=0: (torch.unbind, (input, _back(input, dim))),
    "repeat_interleave": lambda input, repeats, dim: (
        torch.repeat_interleave,
        (input, repeats, _back(input, dim)),
    ),
    "narrow": _narrow,
    "getitem": _item,
    "contiguous": lambda input: (torch.Tensor.contiguous, (input,)),
    "dropout": lambda input, p=0.5, training=True, inplace=False, train=None: (
        vocabulary.dropout,
        (input, p, training if train is None else train),
    ),
    "gelu": _gelu,
    "sigmoid": _elementwise(vocabulary.sigmoid),
    "silu": _elementwise(vocabulary.silu),
    "relu": _elementwise(vocabulary.relu),
    "layer_norm": lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: (
        F.layer_norm,
        (input, normalized_shape, weight, bias, eps),
    ),
    "rms_norm": lambda input, normalized_shape, weight=None, eps=None: (
        F.rms_norm,
        (input, normalized_shape, weight, eps),
    ),
    "scaled_dot_product_attention": _sdpa,
    **{
        name: _elementwise(getattr(torch, name))
        for name in (
            "neg",
            "sqrt",
            "rsqrt",
            "square",
            "reciprocal",
            "tanh",
            "erf",
            "exp",
            "cos",
            "sin",
            "logical_not",
        )
    },
    **{name: _comparison(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}

_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
_RESHAPES = ("flatten", "unflatten", "view_as", "reshape_as")


def _spell_moves(recording: Recording) -> None:
    """What only the recorded result tells: a cast's dtype, the shape of flatten, the columns of a chunk."""
    devices = {t.device for t in recording.attributes.values()}
    grounded: set[fx.Node] = set()  # made from inputs or parameters, so it is on their device
    for node in recording.graph.nodes:
        if node.op in ("placeholder", "get_attr") or any(n in grounded for n in node.all_input_nodes):
            grounded.add(node)
        if node.op != "call_function" or not is_tensor_node(node):
            continue
        name, x = _bare_name(node.target), node.args[0] if node.args else None
        if (
            name in _CASTS
            and is_tensor_node(x)
            and (x in grounded or not _device(node))
            and _stays(node, devices)
        ):
            rewrite.respell(node, vocabulary.cast, (x, dtype_of(node)))
        elif name in _RESHAPES:
            rewrite.respell(node, torch.reshape, (x, tuple(shape_of(node))))
        elif name == "getitem" and isinstance(x, fx.Node) and x.target in (torch.split, torch.chunk):
            piece = _piece(node, *x.args)
            if piece is not None:
                rewrite.respell(node, vocabulary.columns, piece)


def _device(cast: fx.Node) -> Any:
    """The device that the cast names, if any."""
    named = [a for a in (*cast.args[1:], cast.kwargs.get("device")) if isinstance(a, (str, torch.device))]
    return torch.device(named[0]) if named and cast.target.__name__ == "to" else None


def _stays(cast: fx.Node, devices: set[torch.device]) -> bool:
    """Whether the cast leaves its tensor on the device that the whole model is on."""
    device = _device(cast)
    same = device is None or all(d.type == device.type and device.index in (None, d.index) for d in devices)
    return same and not cast.kwargs.get("copy") and "memory_format" not in cast.kwargs


def _piece(part: fx.Node, x: fx.Node, sections: Any, dim: int) -> tuple | None:
    width, index = shape_of(x)[-1], part.args[1]
    counts = sections if isinstance(sections, (tuple, list)) else (sections,)
    if dim != -1 or not all(type(count) is int for count in (width, *counts)):
        return None
    if counts is sections:
        start = (0, *accumulate(sections))[index % len(sections)]
    else:
        step = sections if part.args[0].target is torch.split else -(-width // sections)
        start = index % -(-width // step) * step
    return x, start, start + shape_of(part)[-1]
