"""The classes of operations: one table from the names of operations and kernels."""

from __future__ import annotations

import re
from functools import cache

from te_transform.plan.cost import WAITING

PRODUCT, ATTENTION, NORM, CAST, COPY = "products", "attention", "norms", "casts", "copies"
ELEMENTWISE, COMPILED = "elementwise", "compiled code"
COMMUNICATION, OVERHEAD, IDLE = "exposed communication", "Python and launches", WAITING

CLASSES = (
    PRODUCT, ATTENTION, NORM, ELEMENTWISE, CAST, COPY, COMPILED, COMMUNICATION, OVERHEAD, IDLE,
)  # fmt: skip

_VIEW_PATTERN = (
    "view|_unsafe_view|view_as|reshape|_reshape_alias|transpose|t|permute|movedim|swapaxes|expand|expand_as|"
    "broadcast_to|as_strided|slice|select|narrow|unsqueeze|squeeze|detach|alias|chunk|split|split_with_sizes|"
    "tensor_split|unbind|unflatten|flatten|unfold|diagonal|real|imag|view_as_real|view_as_complex|"
    "empty|empty_like|empty_strided|new_empty|resize_|set_|resolve_conj|resolve_neg|lift_fresh|"
    "is_nonzero|item|_local_scalar_dense|result_type|numpy_T|matrix_H|mT|adjoint"
)
# composed of other operations, which have the classes
_CALLS_OTHER_OPS = "linear|matmul|einsum|tensordot|to|_to_copy|type_as|contiguous|softmax|log_softmax|dropout"

# The first pattern that matches the whole name decides.
_TABLE: tuple[tuple[str, str], ...] = (
    (COMMUNICATION, r"c10d.*|_c10d.*|.*\b(?:nccl\w*Kernel|(?:nccl|gloo|mpi|ucc)[:_]).*|record_param_comms"),
    (OVERHEAD, r".*\(dynamo_timed\)|FSDP::.*|torch[.:].*|autograd::.*|te_transform\b.*|profiler::.*"),
    (OVERHEAD, rf"aten::(?:{_VIEW_PATTERN}|{_CALLS_OTHER_OPS})"),
    (COMPILED, r"Torch-Compiled Region.*|CompiledFunction.*|## Call CompiledFxGraph.*|triton_.*|cpp_fused.*"),
    (
        ATTENTION,
        r".*(?:scaled_dot_product|flash_?(?:att|fwd|bwd)|sdpa|fmha|efficient_attention|fused_att).*",
    ),
    (PRODUCT, r".*(?:gemm|gemv|cutlass|xmma|wgrad|dgrad|scaled_mm|grouped_mm|mkldnn_linear|nvjet).*"),
    (PRODUCT, r"aten::(?:mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|ger|addr|_addmm_activation|bilinear)"),
    (PRODUCT, r"aten::(?:_|mkldnn_|cudnn_|miopen_|slow_|thnn_)*conv\w*"),
    (NORM, r".*(?:layer_?norm|rms_?norm|batch_?norm|group_?norm|instance_?norm).*"),
    (
        COPY,
        r"aten::(?:copy_|clone|cat|stack|_copy_from\w*|repeat|pad|constant_pad_nd|roll|flip)|Mem(?:cpy|set).*",
    ),
    (ELEMENTWISE, r"aten::.*|.*(?:elementwise|reduce|softmax|index|scatter|gather)\w*.*"),
)


@cache
def kernel_class(name: str) -> str:
    """Return the class of a kernel, or of an operation with a namespace."""
    return next(
        (kind for kind, pattern in _TABLE if re.fullmatch(pattern, name, re.DOTALL | re.I)), ELEMENTWISE
    )


@cache
def operation_class(name: str) -> str:
    """Return the class of an event on the CPU.

    OVERHEAD means that the event itself computes nothing: views, composed operations, ranges, autograd nodes
    and functions in Python. The class of what runs inside then counts.
    """
    name_of_class = kernel_class(name)
    return name_of_class if "::" in name or name_of_class in (COMMUNICATION, COMPILED) else OVERHEAD


def operation_class_of_copy(name: str, dtypes: tuple[str, ...]) -> str:
    """Return the class of an operation with these dtypes of its inputs: a copy between dtypes is a cast."""
    kind = operation_class(name)
    return CAST if kind == COPY and name == "aten::copy_" and len({*dtypes[:2]}) > 1 else kind
