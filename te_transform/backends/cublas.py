"""FP8 products by the fastest of the algorithms that cuBLAS proposes.

cuBLAS proposes several algorithms for a product, the one that it expects to be the fastest first. Another one
takes up to 10% less time (docs/decisions.md). PyTorch and TE always run the first one, so this file calls the
library that PyTorch has loaded. Constants and structures are those of cublasLt.h in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_transform.backends.fp8.ops import multiply as by_pytorch
from te_transform.backends.limits import alike_on_ranks

MAX_PROPOSALS = 16
WORKSPACE = 2**25  # the maximum bytes that an algorithm uses; PyTorch's limit on Hopper
ALIGNMENT = 256  # bytes, of the operands for which cuBLAS proposes algorithms
TIMED_ROUNDS, CALLS_A_ROUND = 4, 3  # of timed calls; the first round is dropped (cold caches)
GAIN = 0.98  # another proposal must take less than this share of the first one's time

_TYPES = {
    torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29,
}  # fmt: skip
_COMPUTE_IN_FP32, _SCALES_IN_FP32 = 68, 0
_TRANSPOSE_FIRST, _SCALE_OF_FIRST, _SCALE_OF_SECOND, _FAST_ACCUMULATION = 3, 17, 18, 25  # of a product
_MAX_WORKSPACE = 1  # of a search
_ALPHA, _BETA = ctypes.c_float(1.0), ctypes.c_float(0.0)


class Proposal(ctypes.Structure):
    """An algorithm: cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Sizes(NamedTuple):
    """The sizes and dtypes of a product a [rows, inner] b [columns, inner]^T, which decide its algorithms."""

    rows: int
    columns: int
    inner: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    fast: bool
    device: int


def fastest_product(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    """Compute fp8.ops.multiply() by the fastest algorithm, found by timing in the first call of its sizes.

    The choice, and with it the last bits, may differ from run to run. PyTorch's choice stays with
    deterministic algorithms, with a bias, and where several ranks must get the same bits.
    """
    a_inverse, b_inverse, bias, dtype, fast = rest
    if bias is None and not (torch.are_deterministic_algorithms_enabled() or alike_on_ranks):
        sizes = Sizes(len(a), *b.shape, a.dtype, b.dtype, dtype, fast, a.device.index)
        product = _known_product(sizes)
        if product is not None and product.takes(a, b):
            return product.run(a, b, a_inverse, b_inverse)
    return by_pytorch(a, b, *rest)


class TimedProduct:
    """A product of certain sizes, described to cuBLAS, whose matrices are stored by columns: out^T = b a^T.

    Attributes:
        proposals: the algorithms, in the order in which cuBLAS proposes them.
        fastest: the fastest one, if it is known.

    Raises:
        RuntimeError: cuBLAS does not know such products.
    """

    def __init__(self, sizes: Sizes):
        rows, columns, inner = sizes[:3]
        self.sizes, self.library, self.handle = sizes, _library(), _handle(sizes.device)
        self.lock = threading.Lock()  # a call writes its scales into the description
        self.description = self._create("MatmulDesc", ctypes.c_int(_COMPUTE_IN_FP32), _SCALES_IN_FP32)
        self._set(_TRANSPOSE_FIRST, ctypes.c_int32(1))
        self._set(_FAST_ACCUMULATION, ctypes.c_int8(sizes.fast))
        self.layouts = [
            self._create("MatrixLayout", _TYPES[kind], *map(ctypes.c_uint64, (height, width, height)))
            for kind, height, width in (
                (sizes.b, inner, columns),
                (sizes.a, inner, rows),
                (sizes.out, columns, rows),
            )
        ]
        self.proposals = self._proposed()
        self.fastest: Proposal | None = None

    def takes(self, a: Tensor, b: Tensor) -> bool:
        """Return True if the algorithms are for these operands, and the fastest one is known or can be."""
        if any(x.data_ptr() % ALIGNMENT or not x.is_contiguous() for x in (a, b)):
            return False
        is_known = self.fastest is not None or not torch.cuda.is_current_stream_capturing()
        return is_known and torch.cuda.current_device() == self.sizes.device

    def run(self, *operands: Tensor) -> Tensor:
        """Return the product of a and b, given with the inverses of their scales."""
        out = operands[0].new_empty(self.sizes.rows, self.sizes.columns, dtype=self.sizes.out)
        with self.lock:
            if self.fastest is None:
                self.fastest = self._timed(operands, out)
            self._launch(self.fastest, operands, out)
        return out

    def _timed(self, operands: Sequence[Tensor], out: Tensor) -> Proposal:
        """Run all proposals by turns, and return the fastest one."""
        times = [math.inf] * len(self.proposals)
        for timed_round in range(TIMED_ROUNDS):
            for index, proposal in enumerate(self.proposals):
                taken = self._milliseconds(proposal, operands, out)
                if timed_round:
                    times[index] = min(times[index], taken)
        best = min(range(len(times)), key=times.__getitem__)
        return self.proposals[best if times[best] < GAIN * times[0] else 0]

    def _milliseconds(self, proposal: Proposal, operands: Sequence[Tensor], out: Tensor) -> float:
        """Return the time of a round, or infinity if cuBLAS does not run its own proposal."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        try:
            for _ in range(CALLS_A_ROUND):
                self._launch(proposal, operands, out)
        except RuntimeError:
            return math.inf
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)

    def _launch(self, proposal: Proposal, operands: Sequence[Tensor], out: Tensor) -> None:
        a, b, a_inverse, b_inverse = operands
        self._set(_SCALE_OF_FIRST, ctypes.c_void_p(b_inverse.data_ptr()))
        self._set(_SCALE_OF_SECOND, ctypes.c_void_p(a_inverse.data_ptr()))
        workspace = out.new_empty(proposal.workspace, dtype=torch.uint8)
        first, second, result = self.layouts
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (b, a, out, out, workspace)]
        _raise_for(
            self.library.cublasLtMatmul(
                self.handle, self.description, ctypes.byref(_ALPHA), pointers[0], first, pointers[1], second,
                ctypes.byref(_BETA), pointers[2], result, pointers[3], result,
                ctypes.byref(proposal.algorithm), pointers[4], ctypes.c_size_t(proposal.workspace),
                ctypes.c_void_p(torch.cuda.current_stream(out.device).cuda_stream),
            )
        )  # fmt: skip

    def _proposed(self) -> list[Proposal]:
        search, limit = self._create("MatmulPreference"), ctypes.c_size_t(WORKSPACE)
        _raise_for(
            self.library.cublasLtMatmulPreferenceSetAttribute(
                search, _MAX_WORKSPACE, ctypes.byref(limit), ctypes.sizeof(limit)
            )
        )
        proposals, count = (Proposal * MAX_PROPOSALS)(), ctypes.c_int()
        first, second, result = self.layouts
        _raise_for(
            self.library.cublasLtMatmulAlgoGetHeuristic(
                self.handle, self.description, first, second, result, result, search,
                MAX_PROPOSALS, proposals, ctypes.byref(count),
            )
        )  # fmt: skip
        return [each for each in proposals[: count.value] if not each.status]

    def _create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Return a new object of the library. It lives as long as the process, as its sizes do."""
        pointer = ctypes.c_void_p()
        _raise_for(getattr(self.library, f"cublasLt{kind}Create")(ctypes.byref(pointer), *arguments))
        return pointer

    def _set(self, attribute: int, setting: Any) -> None:
        _raise_for(
            self.library.cublasLtMatmulDescSetAttribute(
                self.description, attribute, ctypes.byref(setting), ctypes.sizeof(setting)
            )
        )


@cache
def _known_product(sizes: Sizes) -> TimedProduct | None:
    """Return the product of these sizes, or None if there is nothing to choose."""
    try:
        product = TimedProduct(sizes)
    except (AttributeError, KeyError, OSError, RuntimeError):  # no such library, type or product
        return None
    return product if len(product.proposals) > 1 else None


@cache
def _library() -> ctypes.CDLL:
    """Return the library that PyTorch has loaded, by its name."""
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        _raise_for(_library().cublasLtCreate(ctypes.byref(pointer)))
    return pointer


def _raise_for(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS returned status {status}")
