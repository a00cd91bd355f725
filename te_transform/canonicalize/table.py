"""The table of spellings: each operation as models may write it, and its canonical call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from te_transform.canonicalize.moves import ALL
from te_transform.graph import ops
from te_transform.graph.nodes import dtype_of, is_number, is_tensor_node, shape_of, value


def back(x: Any, dim: Any, extra: int = 0) -> Any:
    """Return a dimension of `x` counted from the end: -1 is the last dimension for any rank."""
    if isinstance(dim, (tuple, list)):
        return back(x, dim[0], extra) if len(dim) == 1 else tuple(back(x, d, extra) for d in dim)
    first = x[0] if isinstance(x, (tuple, list)) else x
    return dim - len(shape_of(first)) - extra if isinstance(dim, int) and dim >= 0 else dim


def _sizes_as_tuple(sizes: tuple) -> tuple | None:
    """Return sizes given one by one, as a sequence or as a torch.Size; None if one node computes them all."""
    if len(sizes) == 1 and isinstance(sizes[0], fx.Node) and sizes[0].target is torch.Size:
        sizes = sizes[0].args
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return None if len(sizes) == 1 and isinstance(value(sizes[0]), tuple) else sizes


def _swap(x: fx.Node, a: int, b: int) -> tuple:
    if len(shape_of(x)) == 2 and a % 2 != b % 2:
        return torch.t, (x,)
    return torch.transpose, (x, *sorted((back(x, a), back(x, b))))


def permuted(x: fx.Node, *dims: Any) -> tuple:
    """Return the call that permutes the dimensions of `x`: a transpose if it swaps two, else a permute."""
    order = [d % len(shape_of(x)) for d in _sizes_as_tuple(dims)]
    moved = [i for i, d in enumerate(order) if i != d]
    return _swap(x, *moved) if len(moved) == 2 else (torch.permute, (x, tuple(order)))


def _view_as_reshape(x: fx.Node, *sizes: Any, shape: Any = None, size: Any = None) -> tuple | None:
    target = _sizes_as_tuple(sizes or tuple(s for s in (shape, size) if s is not None))
    if not target or any(isinstance(s, torch.dtype) for s in target):  # x.view(dtype) reinterprets the bits
        return None
    return torch.reshape, (x, target)


def _expanded_to(x: fx.Node, *sizes: Any, size: Any = None) -> tuple | None:
    target = _sizes_as_tuple(sizes or (size,))
    return (torch.Tensor.expand, (x, target)) if target else None


def _attribute(x: fx.Node, name: str) -> tuple | None:
    rank = len(shape_of(x)) if is_tensor_node(x) else 0
    return _swap(x, -2, -1) if rank >= 2 and (name == "mT" or (name == "T" and rank == 2)) else None


def _item(x: fx.Node, index: Any) -> tuple | None:
    """Return columns for x[..., a:b], and None for other indices."""
    parts = index if isinstance(index, tuple) else (index,)
    rest = [i for i in parts if not (i is Ellipsis or (isinstance(i, slice) and i == ALL))]
    if not is_tensor_node(x) or len(rest) != 1:
        return None
    reaches_last = parts[0] is Ellipsis or len(parts) == len(shape_of(x))
    sliced = isinstance(rest[0], slice) and rest[0] is parts[-1]
    return _slice_of_columns(x, rest[0]) if reaches_last and sliced else None


def _slice_of_columns(x: fx.Node, part: slice) -> tuple | None:
    bounds, width = (part.start, part.stop), shape_of(x)[-1]
    plain = isinstance(width, int) and all(b is None or type(b) is int for b in bounds)
    return (ops.columns, (x, *part.indices(width)[:2])) if plain and part.step in (None, 1) else None


def _narrowed_columns(x: fx.Node, dim: int, start: Any, length: Any) -> tuple | None:
    plain = type(start) is int and start >= 0 and type(length) is int
    return (ops.columns, (x, start, start + length)) if plain and back(x, dim) == -1 else None


def _tensor_split(input: fx.Node, indices_or_sections: Any, dim: int = 0) -> tuple | None:
    """Return a chunk if all parts have one length; otherwise tensor_split puts the longer parts first."""
    count, length = indices_or_sections, shape_of(input)[dim]
    alike = type(count) is type(length) is int and length % count == 0
    return (torch.chunk, (input, count, back(input, dim))) if alike else None


def _select(input: fx.Node, dim: Any, index: Any) -> tuple | None:
    plain = type(dim) is type(index) is int
    return (operator.getitem, (input, (Ellipsis, index, *[ALL] * (-1 - back(input, dim))))) if plain else None


def _multiplication(input: Any, other: Any) -> tuple:
    return torch.mul, (input, other) if is_tensor_node(input) else (other, input)


def _sum(x: Any, y: Any, alpha: Any = 1) -> tuple | None:
    if not is_number(alpha) or alpha != 1:
        return None
    return torch.add, (x, y) if is_tensor_node(x) else (y, x)


def _subtraction(x: Any, y: Any, alpha: Any = 1) -> tuple | None:
    plain = is_tensor_node(x) and is_number(alpha) and alpha == 1
    return (torch.sub, (x, y)) if plain else None


def _quotient(x: Any, y: Any, rounding_mode: Any = None) -> tuple | None:
    if rounding_mode:
        return None
    return torch.div if is_tensor_node(x) else operator.truediv, (x, y)


def _variance(
    x: fx.Node, dim: Any, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple | None:
    if unbiased is None:
        unbiased = correction != 0
    if not isinstance(unbiased, bool) or correction not in (None, 0, 1):
        return None
    return torch.var, (x, back(x, dim), unbiased, keepdim)


def _var_mean(
    x: fx.Node, dim: Any, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> tuple | None:
    call = _variance(x, dim, unbiased, keepdim, correction=correction)
    return call and (torch.var_mean, call[1])


def _where(condition: Any, x: Any = None, y: Any = None) -> tuple | None:
    return None if x is None or y is None else (torch.where, (condition, x, y))


def _not(x: fx.Node) -> tuple | None:
    return (torch.logical_not, (x,)) if dtype_of(x) is torch.bool else None


def _plain_softmax(
    input: fx.Node, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3
) -> tuple | None:
    if dim is None:
        return None
    # the third argument of F.softmax is a stack level
    given = [r for r in (*rest, dtype) if isinstance(r, torch.dtype)]
    return torch.softmax, (input, back(input, dim), given[0] if given else None)


def _log_softmax(
    input: fx.Node, dim: Any = None, *rest: Any, dtype: Any = None, _stacklevel: int = 3
) -> tuple | None:
    call = _plain_softmax(input, dim, *rest, dtype=dtype)
    return call and (torch.log_softmax, call[1])


def _vector_norm(input: fx.Node, p: Any = "fro", dim: Any = None, keepdim: bool = False) -> tuple | None:
    """Return the vector 2-norm along one dimension, or None for other norms and matrix norms."""
    plain = p in (2, "fro", None) and type(back(input, dim)) is int
    return (torch.linalg.vector_norm, (input, 2, back(input, dim), keepdim)) if plain else None


def _gelu(input: fx.Node, approximate: str = "none") -> tuple:
    return ops.gelu_tanh if approximate == "tanh" else ops.gelu, (input,)


def _baddbmm(input: fx.Node, batch1: fx.Node, batch2: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> tuple:
    return torch.baddbmm, (input, batch1, batch2), {"beta": beta, "alpha": alpha}


def _addmm(input: fx.Node, mat1: fx.Node, mat2: fx.Node, *, beta: Any = 1, alpha: Any = 1) -> tuple:
    scales = {} if beta == alpha == 1 else {"beta": beta, "alpha": alpha}
    return torch.addmm, (input, mat1, mat2), scales


def _addcmul(input: fx.Node, tensor1: fx.Node, tensor2: fx.Node, *, value: Any = 1) -> tuple | None:
    return (torch.addcmul, (input, tensor1, tensor2)) if is_number(value) and value == 1 else None


def _plain_sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> tuple:
    return ops.sdpa, (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _plain_cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
) -> tuple | None:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    return (F.cross_entropy, (input, target, None, None, ignore_index, None, reduction)) if plain else None


def _plain_grouped_mm(
    mat_a: Any, mat_b: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return the op for groups of rows, each multiplied by its own matrix."""
    by_groups = offs is not None and len(shape_of(mat_a)) == 2 and len(shape_of(mat_b)) == 3
    plain = by_groups and bias is None and out_dtype is None
    return (ops.grouped_mm, (mat_a, mat_b, offs)) if plain else None


def _unary(function: Callable) -> Callable:
    return lambda input, inplace=False: (function, (input,))


def _without_inplace(function: Callable) -> Callable:
    """Return the spelling of an activation without `inplace`, with all other arguments by position."""

    def call(*args: Any, **kwargs: Any) -> tuple:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.pop("inplace")
        return function, bound.args

    call.__signature__ = signature = inspect.signature(function)
    return call


def _hardtanh(input: fx.Node, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> tuple:
    """Return F.relu6 for a hardtanh from 0 to 6, the form in which nn.ReLU6 is captured."""
    if (min_val, max_val) == (0, 6):
        return F.relu6, (input,)
    return F.hardtanh, (input, min_val, max_val)


def _along_one(function: Callable) -> Callable:
    return lambda input, dim, keepdim=False: (
        (function, (input, back(input, dim), keepdim)) if type(dim) is int else None
    )


def _comparison(function: Callable) -> Callable:
    return lambda input, other: (function, (input, other)) if is_tensor_node(input) else None


_ACTIVATIONS = (
    F.celu, F.elu, F.hardsigmoid, F.hardswish, F.leaky_relu, F.mish, F.relu6, F.selu,
)  # fmt: skip
_UNARY = (
    "neg", "sqrt", "rsqrt", "square", "reciprocal", "tanh", "erf", "erfc", "exp", "cos", "sin", "logical_not",
)  # fmt: skip
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

# name -> function from the arguments of a call to the canonical call, or None to leave the call unchanged
SPELLINGS: dict[str, Callable[..., tuple | None]] = {
    "add": _sum,
    "sub": _subtraction,
    "subtract": _subtraction,
    "mul": _multiplication,
    "multiply": _multiplication,
    "div": _quotient,
    "divide": _quotient,
    "truediv": _quotient,
    "true_divide": _quotient,
    "floor_divide": lambda input, other: (operator.floordiv, (input, other)),
    "pow": lambda input, exponent: (torch.pow, (input, exponent)),
    "matmul": lambda input, other: (torch.matmul, (input, other)),
    "mm": lambda input, mat2: (torch.matmul, (input, mat2)),
    "linear": lambda input, weight, bias=None: (F.linear, (input, weight, bias)),
    "grouped_mm": _plain_grouped_mm,
    "_grouped_mm": _plain_grouped_mm,
    "bmm": lambda input, mat2: (torch.bmm, (input, mat2)),
    "addmm": _addmm,
    "addcmul": _addcmul,
    "tensordot": lambda a, b, dims=2: (torch.tensordot, (a, b, dims)),
    "baddbmm": _baddbmm,
    "mean": lambda input, dim, keepdim=False: (torch.mean, (input, back(input, dim), keepdim)),
    "sum": lambda input, dim, keepdim=False: (torch.sum, (input, back(input, dim), keepdim)),
    "clamp": lambda input, min=None, max=None: (torch.clamp, (input, min, max)),
    "clip": lambda input, min=None, max=None: (torch.clamp, (input, min, max)),
    "clamp_min": lambda input, min: (torch.clamp, (input, min, None)),
    "max": _along_one(torch.max),
    "amax": _along_one(torch.amax),
    "logsumexp": _along_one(torch.logsumexp),
    "softmax": _plain_softmax,
    "log_softmax": _log_softmax,
    "var": _variance,
    "var_mean": _var_mean,
    "norm": _vector_norm,
    "linalg_norm": lambda A, ord=None, dim=None, keepdim=False: _vector_norm(A, ord, dim, keepdim),
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False: _vector_norm(x, ord, dim, keepdim),
    "masked_fill": lambda input, mask, value: (torch.masked_fill, (input, mask, value)),
    "where": _where,
    "invert": _not,
    "bitwise_not": _not,
    "transpose": lambda input, dim0, dim1: _swap(input, dim0, dim1),
    "swapaxes": lambda input, axis0, axis1: _swap(input, axis0, axis1),
    "swapdims": lambda input, dim0, dim1: _swap(input, dim0, dim1),
    "t": lambda input: (torch.t, (input,)),
    "permute": permuted,
    "getattr": _attribute,
    "view": _view_as_reshape,
    "reshape": _view_as_reshape,
    "expand": _expanded_to,
    "broadcast_to": _expanded_to,
    "expand_as": lambda input, other: (torch.Tensor.expand_as, (input, other)),
    "index_put": lambda input, indices, values: (torch.index_put, (input, tuple(indices), values)),
    "unsqueeze": lambda input, dim: (torch.unsqueeze, (input, back(input, dim, extra=1))),
    "cat": lambda tensors, dim=0: (torch.cat, (tuple(tensors), back(tensors, dim))),
    "concat": lambda tensors, dim=0: (torch.cat, (tuple(tensors), back(tensors, dim))),
    "stack": lambda tensors, dim=0: (torch.stack, (tuple(tensors), back(tensors, dim, extra=1))),
    "split": lambda tensor, split_size_or_sections, dim=0: (
        torch.split,
        (tensor, split_size_or_sections, back(tensor, dim)),
    ),
    "chunk": lambda input, chunks, dim=0: (torch.chunk, (input, chunks, back(input, dim))),
    "tensor_split": _tensor_split,
    "select": _select,
    "unbind": lambda input, dim=0: (torch.unbind, (input, back(input, dim))),
    "repeat_interleave": lambda input, repeats, dim: (
        torch.repeat_interleave,
        (input, repeats, back(input, dim)),
    ),
    "narrow": _narrowed_columns,
    "getitem": _item,
    "detach": lambda input: (torch.Tensor.detach, (input,)),
    "contiguous": lambda input: (torch.Tensor.contiguous, (input,)),
    "dropout": lambda input, p=0.5, training=True, inplace=False, train=None: (
        ops.dropout,
        (input, p, training if train is None else train),
    ),
    "gelu": _gelu,
    "glu": lambda input, dim=-1: (F.glu, (input, back(input, dim))),
    "sigmoid": _unary(ops.sigmoid),
    "expit": _unary(ops.sigmoid),
    "ndtr": _unary(torch.special.ndtr),
    "silu": _unary(ops.silu),
    "relu": _unary(ops.relu),
    "layer_norm": lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: (
        F.layer_norm,
        (input, normalized_shape, weight, bias, eps),
    ),
    "rms_norm": lambda input, normalized_shape, weight=None, eps=None: (
        F.rms_norm,
        (input, normalized_shape, weight, eps),
    ),
    "normalize": lambda input, p=2.0, dim=1, eps=1e-12: (F.normalize, (input, p, back(input, dim), eps)),
    "scaled_dot_product_attention": _plain_sdpa,
    "cross_entropy": _plain_cross_entropy,
    "hardtanh": _hardtanh,
    **{function.__name__: _without_inplace(function) for function in _ACTIVATIONS},
    **{name: _unary(getattr(torch, name)) for name in _UNARY},
    **{name: _comparison(getattr(torch, name)) for name in _COMPARISONS},
}

# methods whose arguments differ in order or name from those of the function
METHODS: dict[str, Callable[..., tuple | None]] = {
    "split": lambda input, split_size, dim=0: (torch.split, (input, split_size, back(input, dim))),
    "where": lambda input, condition, other: (torch.where, (condition, input, other)),
}
