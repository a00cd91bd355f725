"""The limits of GPU kernels. Functions return the reason why a kernel cannot or should not run a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from te_transform.backends.bands import PLANNED_LENGTHS, Band
from te_transform.backends.tracing import compiling, needs_gradient, recorded
from te_transform.graph.nodes import dtype_name

DEVICE = "cuda"  # the device type of kernels
ALIGNED = 8  # a GPU reads 16 bytes at once, which are 8 numbers of 16 bits
DTYPES = (torch.bfloat16, torch.float16)  # TE multiplies float32 in TF32
# Packed sequences of wider heads get wrong gradients from cuDNN.
MOST_PACKED_WIDTH = 128
# Below this length, cuDNN is not faster. It plans once per length, which in generation means once per token.
MIN_ATTENTION_LENGTH = 512
# batch x length x length x heads x width. Below this work, cuDNN's launches take longer than it saves.
MIN_ATTENTION_WORK = 4e10
# With a mask, PyTorch chooses its memory-efficient kernel, which takes two to three times as long as cuDNN's.
# At 2.1e9, a layer saves 0.08 ms of GPU time in a forward, for 0.2 ms of CPU time. In training, it saves 0.27
# ms for 0.7 ms (H100).
MIN_MASKED_ATTENTION_LENGTH, MIN_MASKED_ATTENTION_WORK = 256, 6e9
# In PyTorch's attention kernels with a mask, one thread block reads all keys. With few heads, few queries and
# many keys, most of the GPU is idle, and two matrix products are faster. Times for 1024 keys (us, H100):
#
#   heads | attention kernel | two products, compiled | two products, uncompiled
#       8 |               44 |                      9 |                       18
#     128 |               42 |                     33 |                       49
MOST_HEADS_WRITTEN_OUT, MOST_QUERIES_WRITTEN_OUT, MIN_KEYS_WRITTEN_OUT = 64, 16, 512
# rows x width x width, where width is the smaller side of a weight. Below this work, the CPU is the
# bottleneck, and ops that take more CPU time than the captured code are slower (H100, docs/benchmarks.md).
MIN_GEMM_WORK, MIN_GEMM_WORK_IN_FP8 = 2.5e10, 5e10
# The minimum work for FP8 in CUDA graphs, whose launches take no CPU time; other fused ops gain there at any
# size. Training steps in FP8 take 0.94 of the time in bf16 at 7.2e9 (GPT-2, H200), 0.90 at 8.6e9 and 0.81 at
# 1.7e10 (H100). Smaller work has not been measured.
MIN_GEMM_WORK_IN_FP8_REPLAYED = 7e9
# The minimum of rows x inputs x outputs for a linear in fp32 on tensor cores. At 2.1e9, a step takes 1.39
# of the original's time, because its launches take more CPU time; at 1.5e10, it takes 0.36 (H200).
MIN_WIDE_WORK = 5e9
WIDE_TERMS = 128  # the number of terms that tensor cores add up with little error, see te/wide_linear.py

# The minimum number of logits for TE's cross entropy. It saves memory traffic, but its launches and its
# nested backward take more CPU time than PyTorch's, which makes steps of few tokens slower. The break-even
# point has not been measured.
MIN_LOGITS = 1e8

# The minimum numbers of tokens and of weight rows for a padded LM head. With fewer, the matrix product saves
# less time than the copy of the weight takes.
MIN_PADDED_TOKENS, MIN_PADDED_ROWS = 256, 4096


class Switch:
    """A setting that is on within a `with` statement, which may be nested.

    It is on in all threads, because autograd runs a backward in another thread than the forward.
    """

    def __init__(self) -> None:
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.entered -= 1

    def __bool__(self) -> bool:
        return self.entered > 0


ignore_size_limits = Switch()
"""Kernels also run calls that are too small for a speedup: for verification."""
replayed = Switch()
"""Calls run as CUDA graphs or prepare one: kernels are chosen by GPU time only."""
whole_logits = Switch()
"""Logits that chunked_loss.py would replace by NaN are computed: to check the code that reads them."""
alike_on_ranks = Switch()
"""Several ranks compute the same products and must get the same bits: no algorithm is chosen by its time."""
small_calls_in_fp8 = Switch()
"""Calls that are too small for a speedup by FP8 also run in FP8."""


def too_small(rows: int, width: int, in_fp8: bool) -> str | None:
    """Return why fused matrix products are not faster than the captured code for `rows` rows, or None."""
    enough = break_even_rows(width, in_fp8, bool(replayed))
    if ignore_size_limits or (in_fp8 and small_calls_in_fp8) or rows >= enough:
        return None
    return f"a call too small to be faster in {'FP8' if in_fp8 else 'fused products'}"


def break_even_rows(width: int, in_fp8: bool, in_cuda_graphs: bool = False) -> int:
    """Return the minimum number of rows of this width for which fused matrix products are faster.

    In 16 bits, only the products of gated MLPs are faster.
    """
    launched, by_graphs = MIN_GEMM_WORK, 0.0
    if in_fp8:
        launched, by_graphs = MIN_GEMM_WORK_IN_FP8, MIN_GEMM_WORK_IN_FP8_REPLAYED
    return math.ceil((by_graphs if in_cuda_graphs else launched) / width**2)


def on_kernels_device(tensor: Tensor) -> bool:
    """Return True if the tensor is on a device with kernels."""
    return tensor.device.type == DEVICE


def written_out(query: Tensor, key: Tensor) -> bool:
    """Return True if masked attention over [batch, heads, length, width] is faster as two matrix products."""
    batch, heads, length, _ = query.shape
    small = batch * heads <= MOST_HEADS_WRITTEN_OUT and length <= MOST_QUERIES_WRITTEN_OUT
    in_16_bits = query.dtype in DTYPES and autocast_dtype(query) is None
    allowed = on_kernels_device(query) and torch.backends.cuda.math_sdp_enabled()
    return allowed and in_16_bits and small and key.shape[-2] >= MIN_KEYS_WRITTEN_OUT


def cuda_graphs() -> bool:
    """Return True if this machine supports CUDA graphs."""
    return torch.cuda.is_available()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of torch.autocast on the device of `x`, or None if autocast is off."""
    if not torch._C._is_any_autocast_enabled():  # the fast path of most calls
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors as torch.autocast casts them for a matrix product. It does not cast float64."""
    dtypes = [None if tensor is None else autocast_dtype(tensor) for tensor in tensors]
    return tuple(
        tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    )


def dtypes_in_fp8(x: Tensor) -> set[torch.dtype]:
    """Return the dtypes that input `x` and the weight may have if their matrix product runs in FP8."""
    cast = autocast_dtype(x)
    if cast is None:
        return {x.dtype} & {*DTYPES}
    return {cast, torch.float32} if cast in DTYPES else set()


def without_kernel(x: Tensor, weight: Tensor, in_fp8: bool = False) -> str | None:
    """Return why TE's modules cannot run with this input and weight, or None.

    Under torch.autocast, TE's modules cast the input of a norm, but PyTorch casts its output. In 16 bits, TE
    would thus round once more than the original. In FP8, the additional rounding is negligible.
    """
    if type(x) not in (Tensor, nn.Parameter) and not compiling.get():
        return f"a {type(x).__name__}"
    if x.dim() < 2 or x.numel() == 0:
        return f"an input of shape {list(x.shape)}"
    if not on_kernels_device(x):
        return f"an input on {x.device.type}"
    if not on_kernels_device(weight):
        return f"weights on {weight.device.type}"
    if in_fp8 and {x.dtype, weight.dtype} <= dtypes_in_fp8(x):
        return None
    if (cast := autocast_dtype(x)) is not None:
        return None if x.dtype == weight.dtype == cast else f"{dtype_name(x.dtype)} under torch.autocast"
    if x.dtype not in DTYPES and in_fp8:
        return f"{dtype_name(x.dtype)}, which runs in FP8 only under torch.autocast"
    if x.dtype not in DTYPES:
        return f"{dtype_name(x.dtype)}, which TE would multiply in TF32"
    if x.dtype == weight.dtype:
        return None
    return f"{dtype_name(x.dtype)} with weights in {dtype_name(weight.dtype)}"


def without_wide_product(x: Tensor, weight: Tensor) -> str | None:
    """Return why a product of 16-bit numbers in fp32 cannot run on tensor cores, or None."""
    if why := without_kernel(x, weight):
        return why
    if x.dtype is not torch.bfloat16:  # a gradient's rest, after rounding, may be too small for float16
        return f"weights in {dtype_name(x.dtype)}"
    if autocast_dtype(x) is not None:
        return "torch.autocast"
    if x.shape[-1] % WIDE_TERMS:
        return f"inputs that are not a multiple of {WIDE_TERMS} wide"
    if not ignore_size_limits and x.shape[:-1].numel() * weight.numel() < MIN_WIDE_WORK:
        return "too small to be faster"
    return None


def without_padding(x: Tensor, weight: Tensor) -> str | None:
    """Return why padding the columns of a matrix product would not make it faster, or None."""
    for tensor in (x, weight):
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"a {type(tensor).__name__}"
        if not on_kernels_device(tensor):
            return f"a tensor on {tensor.device.type}"
    dtype = autocast_dtype(x) or x.dtype
    if dtype not in DTYPES:
        return f"a matrix product in {dtype_name(dtype)}"
    enough = ignore_size_limits or x.shape[:-1].numel() >= MIN_PADDED_TOKENS
    return None if enough else f"fewer than {MIN_PADDED_TOKENS} tokens"


def without_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> str | None:
    """Return why cuDNN's kernel is not the best for this attention, or None."""
    if why := _without_cudnn(query, key, value) or _without_mask(mask, query, key):
        return why
    lengths = query.shape[2], key.shape[2]
    if is_causal and lengths[0] != lengths[1]:
        return "different numbers of queries and keys under a causal mask"
    # With such lengths, replays of cuDNN's attention in a CUDA graph return garbage or read unmapped memory,
    # if called through PyTorch (PyTorch 2.11, cuDNN 9.19). Lengths 16, 64 and 100 are wrong; 128, 512 and
    # 1024 are correct. Calls through TE are correct.
    if has_odd_lengths(query, key) and may_be_replayed():
        return (
            f"{lengths[0]} queries and {lengths[1]} keys in a call that may become a CUDA graph, where "
            f"cuDNN's kernels need multiples of {PLANNED_LENGTHS}"
        )
    return too_small_attention(query, key, mask is not None)


def without_band(
    query: Tensor, key: Tensor, value: Tensor, band: Band, dropout_p: float, enable_gqa: bool
) -> str | None:
    """Return why TE's attention is not the best for this attention within a band, or None."""
    if why := _without_cudnn(query, key, value):
        return why
    heads, groups = query.shape[1], key.shape[1]
    fits = query.shape[0] == key.shape[0] == value.shape[0] and groups == value.shape[1]
    if not fits or heads % groups or (heads != groups and not enable_gqa):
        return "queries, keys and values with different batch sizes or numbers of heads"
    if dropout_p:
        return "dropout"
    if _asks_for_other_kernels():
        return "another kernel or determinism requested"
    in_window = band[:2] not in ((None, None), (None, 0))
    if in_window and query.shape[2] != key.shape[2]:
        return "a sliding window with different numbers of queries and keys"
    if band.documents and not _is_right_packed(query, key, value):
        return f"gradients of packed documents with heads wider than {MOST_PACKED_WIDTH}"
    return too_small_attention(query, key, in_window or band.padded or bool(band.documents))


def gains_packed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if attention is faster when its sequences are treated as packed.

    cuDNN plans its kernels for each length, which takes 100 ms of CPU time (H100). For packed sequences, it
    plans for the maximum length only. CUDA graphs gain nothing, because their lengths recur.
    """
    return has_odd_lengths(query, key) and _is_right_packed(query, key, value) and not may_be_replayed()


def _is_right_packed(*parts: Tensor) -> bool:
    """Return True if cuDNN's kernels are correct for these tensors as packed sequences.

    With wide heads, the gradients are wrong (cuDNN 9.14).
    """
    return not needs_gradient(*parts) or max(part.shape[-1] for part in parts) <= MOST_PACKED_WIDTH


def has_odd_lengths(query: Tensor, key: Tensor) -> bool:
    """Return True if a length is not a multiple of PLANNED_LENGTHS."""
    return any(x.shape[2] % PLANNED_LENGTHS for x in (query, key))


def _without_cudnn(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Return why none of cuDNN's kernels is the best, or None."""
    if why := without_kernel(query, key):
        return why
    if not _is_hopper(query.device):
        return "attention on a GPU older than Hopper, where PyTorch's choice of kernels is as fast"
    if query.dim() != 4:
        return f"queries of {query.dim()} dimensions, where cuDNN's kernels need 4"
    widths, most = (query.shape[-1], value.shape[-1]), _most_width(query.device)
    if any(width % 8 or width > most for width in widths):
        return f"heads of width {max(widths)}, where cuDNN's kernels need multiples of 8 up to {most}"
    return None


def _asks_for_other_kernels() -> bool:
    """Return True if cuDNN's attention is disabled, or deterministic algorithms are required."""
    return not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled()


def _without_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> str | None:
    """Return why cuDNN's kernels cannot run with a mask, or None."""
    if mask is None:
        return None
    if mask.requires_grad:
        return "a mask with a gradient"
    *others, last = mask.shape
    whole = (*query.shape[:3], key.shape[2])
    by_head = mask.dim() == 4 and all(size in (1, most) for size, most in zip(others, whole, strict=False))
    # with a mask that is expanded along the keys, the kernels read unmapped memory (cuDNN 9.14)
    if last != whole[-1] or not (by_head or tuple(mask.shape) == whole[2:]):
        return f"a mask of shape {list(mask.shape)}"
    if _asks_for_other_kernels():
        return "a mask, with another kernel or determinism requested"
    return None


def too_small_attention(query: Tensor, key: Tensor, has_mask: bool, in_graphs: bool = False) -> str | None:
    """Return why attention of these sizes is not faster in kernels, or None.

    Args:
        query: [batch, heads, length, width].
        key: [batch, heads, length, width].
        has_mask: True if a mask is added.
        in_graphs: True if the call will run as a CUDA graph.
    """
    if ignore_size_limits:
        return None
    is_launched = not (compiling.get() or replayed or in_graphs)
    return small_attention(query.shape, key.shape[2], has_mask, is_launched)


def small_attention(
    queries: Sequence[int], keys: int, has_mask: bool = False, is_launched: bool = True
) -> str | None:
    """Return why attention of these sizes is too small for cuDNN's kernels, or None.

    Args:
        queries: the shape [batch, heads, length, width] of the queries.
        keys: the number of keys.
        has_mask: True if a mask is added.
        is_launched: False in compiled graphs and CUDA graphs, where the kernels take no additional CPU time.
    """
    least, work = MIN_ATTENTION_LENGTH, MIN_ATTENTION_WORK
    if has_mask:
        least, work = MIN_MASKED_ATTENTION_LENGTH, MIN_MASKED_ATTENTION_WORK
    batch, heads, length, width = queries
    if min(length, keys) < least:
        return f"attention over fewer than {least} tokens"
    rows = batch * length
    if rows * keys * heads * width >= work or rows >= break_even_rows(heads * width, in_fp8=False):
        return None
    return "attention too small to be faster" if is_launched else None


def rotation_size(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the rows and the width by which a rotation of queries of these sizes [4] is large or small."""
    batch, heads, length, width = sizes
    return batch * length, heads * width


def gains_from_masks(length: int) -> bool:
    """Return True if attention over `length` keys may be faster with a classified mask, see masks.py."""
    return bool(ignore_size_limits) or length >= MIN_MASKED_ATTENTION_LENGTH


def may_be_replayed() -> bool:
    """Return True if the call may become a part of a CUDA graph."""
    return compiling.get() or bool(replayed) or recorded()


@cache
def _most_width(device: torch.device) -> int:
    """Return the maximum width of heads in cuDNN's attention, whose wide backward exists on Hopper only."""
    return 256 if device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0) else 128


@cache
def _is_hopper(device: torch.device) -> bool:
    """Return True if the device is a Hopper GPU or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def without_rotary(x: Tensor, angles: Tensor) -> str | None:
    """Return why TE's rotary kernel cannot or should not run with these tensors, or None."""
    if x.dim() != 4:
        return f"queries or keys of {x.dim()} dimensions, where TE's rotary kernel needs 4"
    if too_small(*rotation_size(x.shape), in_fp8=False):
        return "too small to be faster"
    if why := without_kernel(x, x):
        return why
    batch, _, length, width = x.shape
    if (
        angles.shape not in ((length, width), (1, length, width), (batch, length, width))
        or angles.dtype != torch.float32
        or angles.requires_grad
    ):
        return f"angles of shape {list(angles.shape)} in {dtype_name(angles.dtype)}"
    return None


def without_cross_entropy(logits: Tensor, targets: Tensor) -> str | None:
    """Return why TE's cross entropy cannot or should not run with these tensors, or None."""
    if type(logits) is not Tensor or not on_kernels_device(logits) or logits.device != targets.device:
        return "logits and targets that are not on one GPU"
    if logits.dim() < 2 or logits.numel() == 0 or logits.shape[:-1] != targets.shape:
        return f"logits of shape {list(logits.shape)} for targets of shape {list(targets.shape)}"
    if logits.dtype != torch.bfloat16 or targets.dtype != torch.int64:
        return f"logits in {dtype_name(logits.dtype)}, targets in {dtype_name(targets.dtype)}"
    if ignore_size_limits:
        return None
    if logits.numel() < MIN_LOGITS and not replayed:
        return f"fewer than {MIN_LOGITS:,.0f} logits, too few for TE's kernel to be faster"
    if logits.shape[-1] % ALIGNED:
        return f"rows of {logits.shape[-1]:,} logits, not a multiple of {ALIGNED}: PyTorch is faster"
    return None
