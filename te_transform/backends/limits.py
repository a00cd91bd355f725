"""Which calls the kernels of a GPU take: each function gives the reason why not, or None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from te_transform.backends.bands import PLANNED_LENGTHS, Band
from te_transform.backends.tracing import compiling, recorded
from te_transform.graph.nodes import dtype_name

DEVICE = "cuda"  # where kernels run
ALIGNED = 8  # 16-bit numbers in the 16 bytes that a GPU reads at once
DTYPES = (torch.bfloat16, torch.float16)  # TE multiplies float32 in TF32
MOST_PACKED_WIDTH = 128
# Below this length cuDNN gains nothing; it plans anew for each length, so for each token that is generated.
MIN_ATTENTION_LENGTH = 512
# batch x length x length x width from which cuDNN's attention gains more than its way on the CPU costs.
MIN_ATTENTION_WORK = 4e10
# With a mask PyTorch's own choice is its memory-efficient kernel, which takes two to three times as long.
MIN_MASKED_ATTENTION_LENGTH, MIN_MASKED_ATTENTION_WORK = 256, 1e9
# In those kernels of PyTorch's attention that take a mask, one block of threads goes through all keys. With
# few heads and queries, and from so many keys on, most of the GPU has nothing to do (H100: 1024 keys of
# 8 heads take 44 us, written out 9 compiled and 18 uncompiled; of 128 heads 42, 33 and 49).
MOST_HEADS_WRITTEN_OUT, MOST_QUERIES_WRITTEN_OUT, MIN_KEYS_WRITTEN_OUT = 64, 16, 512
# rows x width x width, width being the smaller side of a weight: below, the CPU sets the pace, and what takes
# it longer than the captured code does is slower (H100, docs/benchmarks.md).
MIN_GEMM_WORK, MIN_GEMM_WORK_IN_FP8 = 2.5e10, 5e10
# The least work for FP8 where a CUDA graph launches the kernels, which takes none of the CPU's time: all else
# gains there at any size (H100: a training step in FP8 takes 0.90 of one in bf16 at 8.6e9, 0.81 at 1.7e10).
MIN_GEMM_WORK_IN_FP8_REPLAYED = 8e9

# Logits from which on TE's cross entropy is taken: it saves memory's traffic, and its launches and its
# nested backward take the CPU longer than PyTorch's do, which shows in steps of few tokens. Where the two
# meet has not been measured.
MIN_LOGITS = 1e8

# Tokens from which on the product of a padded head gains more than the copy of its weight takes, and rows of
# the weight: products with fewer take no time that is worth that copy.
MIN_PADDED_TOKENS, MIN_PADDED_ROWS = 256, 4096


class Switch:
    """A setting that is on within `with`, which may be nested. It is on in all threads: autograd runs a
    backward in another one than the forward."""

    def __init__(self) -> None:
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.entered -= 1

    def __bool__(self) -> bool:
        return self.entered > 0


ignore_size_limits = Switch()
"""Kernels take calls that are too small to gain from them: to check what they compute."""
replayed = Switch()
"""Calls run as CUDA graphs, or show what is going to: kernels are chosen by what the GPU takes alone."""
whole_logits = Switch()
"""Logits that are withheld are computed all the same: to check what reads them."""
small_calls_in_fp8 = Switch()
"""Calls that are too small to gain from FP8 run in it too."""


def too_small(rows: int, width: int, in_fp8: bool) -> str | None:
    """Why fused products are not faster than what was captured for so many rows, or None."""
    enough = break_even_rows(width, in_fp8, bool(replayed))
    if ignore_size_limits or (in_fp8 and small_calls_in_fp8) or rows >= enough:
        return None
    return f"a call too small to be faster in {'FP8' if in_fp8 else 'fused products'}"


def break_even_rows(width: int, in_fp8: bool, in_cuda_graphs: bool = False) -> int:
    """From how many rows of this width on fused products are faster, those of gated MLPs if not in FP8."""
    launched, by_graphs = MIN_GEMM_WORK, 0.0
    if in_fp8:
        launched, by_graphs = MIN_GEMM_WORK_IN_FP8, MIN_GEMM_WORK_IN_FP8_REPLAYED
    return math.ceil((by_graphs if in_cuda_graphs else launched) / width**2)


def on_kernels_device(tensor: Tensor) -> bool:
    """Whether the tensor is where kernels run."""
    return tensor.device.type == DEVICE


def written_out(query: Tensor, key: Tensor) -> bool:
    """Whether attention over [batch, heads, length, width] with a mask is faster as two products."""
    batch, heads, length, _ = query.shape
    small = batch * heads <= MOST_HEADS_WRITTEN_OUT and length <= MOST_QUERIES_WRITTEN_OUT
    in_16_bits = query.dtype in DTYPES and autocast_dtype(query) is None
    allowed = on_kernels_device(query) and torch.backends.cuda.math_sdp_enabled()
    return allowed and in_16_bits and small and key.shape[-2] >= MIN_KEYS_WRITTEN_OUT


def cuda_graphs() -> bool:
    """Whether there are CUDA graphs on this machine."""
    return torch.cuda.is_available()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What torch.autocast computes in on the device of `x`, None where it is off."""
    if not torch._C._is_any_autocast_enabled():  # which is all that most calls need to know
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as torch.autocast has them in a product, which casts those that are no float64."""
    dtypes = [None if tensor is None else autocast_dtype(tensor) for tensor in tensors]
    return tuple(
        tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    )


def dtypes_in_fp8(x: Tensor) -> set[torch.dtype]:
    """What the input `x` of a product and its weight may be of for it to run in FP8."""
    cast = autocast_dtype(x)
    if cast is None:
        return {x.dtype} & {*DTYPES}
    return {cast, torch.float32} if cast in DTYPES else set()


def without_kernel(x: Tensor, weight: Tensor, in_fp8: bool = False) -> str | None:
    """Why TE's modules cannot take this tensor, or None.

    Under torch.autocast they cast what a norm reads, and PyTorch what it returns: in 16 bits that would round
    once more than the original does, in FP8 it is far below the rounding that was asked for.
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
        return f"{dtype_name(x.dtype)}, which runs in FP8 under torch.autocast alone"
    if x.dtype not in DTYPES:
        return f"{dtype_name(x.dtype)}, which TE would multiply in TF32"
    if x.dtype == weight.dtype:
        return None
    return f"{dtype_name(x.dtype)} with weights in {dtype_name(weight.dtype)}"


def without_padding(x: Tensor, weight: Tensor) -> str | None:
    """Why a product with an odd number of columns gains nothing from more of them, or None."""
    for tensor in (x, weight):
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"a {type(tensor).__name__}"
        if not on_kernels_device(tensor):
            return f"a tensor on {tensor.device.type}"
    dtype = autocast_dtype(x) or x.dtype
    if dtype not in DTYPES:
        return f"a product in {dtype_name(dtype)}"
    enough = ignore_size_limits or x.shape[:-1].numel() >= MIN_PADDED_TOKENS
    return None if enough else f"less than {MIN_PADDED_TOKENS} tokens"


def without_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> str | None:
    """Why cuDNN is not the best for this attention, or None."""
    if why := _without_cudnn(query, key, value) or _without_mask(mask, query, key):
        return why
    lengths = query.shape[2], key.shape[2]
    if is_causal and lengths[0] != lengths[1]:
        return "more keys than queries under a causal mask"
    # Called through PyTorch, cuDNN's attention over such lengths gives garbage, or reads memory that is not
    # there, when a CUDA graph replays it (PyTorch 2.11, cuDNN 9.19): seen at 16, 64 and 100, and right at
    # 128, 512 and 1024. Through TE it is right.
    if has_odd_lengths(query, key) and may_be_replayed():
        return (
            f"{lengths[0]} queries and {lengths[1]} keys in what may become a CUDA graph, cuDNN's kernels "
            f"need multiples of {PLANNED_LENGTHS} there"
        )
    return too_small_attention(query, key, mask is not None)


def without_band(
    query: Tensor, key: Tensor, value: Tensor, band: Band, dropout_p: float, enable_gqa: bool
) -> str | None:
    """Why TE's attention is not the best for this one within a band, or None."""
    if why := _without_cudnn(query, key, value):
        return why
    heads, groups = query.shape[1], key.shape[1]
    as_they_are = query.shape[0] == key.shape[0] == value.shape[0] and groups == value.shape[1]
    if not as_they_are or heads % groups or (heads != groups and not enable_gqa):
        return "queries, keys and values of other batches or heads"
    if dropout_p:
        return "dropout"
    if _asks_for_other_kernels():
        return "another kernel that was asked for"
    in_window = band[:2] not in ((None, None), (None, 0))
    if in_window and query.shape[2] != key.shape[2]:
        return "a window over other keys than its queries' own"
    if band.documents and not _is_right_packed(query, key, value):
        return f"gradients of documents with heads wider than {MOST_PACKED_WIDTH}"
    return too_small_attention(query, key, in_window or band.padded or bool(band.documents))


def gains_packed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether attention gains from taking sequences as if they lay one behind the other: of lengths that may
    never come again, as they do in a CUDA graph.

    cuDNN plans its kernels for each length, 100 ms of the CPU (H100), but of packed sequences for the
    greatest length that there may be.
    """
    return has_odd_lengths(query, key) and _is_right_packed(query, key, value) and not may_be_replayed()


def _is_right_packed(*parts: Tensor) -> bool:
    """Whether cuDNN's kernels are right for packed sequences of such queries, keys and values: with
    wide heads the gradients are wrong (cuDNN 9.14)."""
    trained = torch.is_grad_enabled() and any(part.requires_grad for part in parts)
    return not trained or max(part.shape[-1] for part in parts) <= MOST_PACKED_WIDTH


def has_odd_lengths(query: Tensor, key: Tensor) -> bool:
    """Whether there are many such lengths."""
    return any(x.shape[2] % PLANNED_LENGTHS for x in (query, key))


def _without_cudnn(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Why none of cuDNN's kernels is the best, or None."""
    if why := without_kernel(query, key):
        return why
    if not _is_hopper(query.device):
        return "attention on a GPU where PyTorch's own choice of kernels is as fast"
    if query.dim() != 4:
        return f"queries of {query.dim()} dimensions, cuDNN's kernels take 4"
    widths, most = (query.shape[-1], value.shape[-1]), _most_width(query.device)
    if any(width % 8 or width > most for width in widths):
        return f"heads of width {max(widths)}, cuDNN's kernels take multiples of 8 up to {most}"
    return None


def _asks_for_other_kernels() -> bool:
    """Whether somebody has turned cuDNN's attention off, or what may round otherwise the next time."""
    return not torch.backends.cuda.cudnn_sdp_enabled() or torch.are_deterministic_algorithms_enabled()


def _without_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> str | None:
    """Why cuDNN's kernels cannot take a mask, or None."""
    if mask is None:
        return None
    if mask.requires_grad:
        return "a mask with a gradient"
    *others, last = mask.shape
    whole = (*query.shape[:3], key.shape[2])
    by_head = mask.dim() == 4 and all(size in (1, most) for size, most in zip(others, whole, strict=False))
    # from a mask that is expanded along the keys they read memory that is not there (cuDNN 9.14)
    if last != whole[-1] or not (by_head or tuple(mask.shape) == whole[2:]):
        return f"a mask of shape {list(mask.shape)}"
    if _asks_for_other_kernels():
        return "a mask with another kernel that was asked for"
    return None


def too_small_attention(query: Tensor, key: Tensor, has_mask: bool, in_graphs: bool = False) -> str | None:
    """Return why attention of these sizes gains nothing in kernels, or None.

    Args:
        in_graphs: True if the call will run as a CUDA graph.
    """
    least, work = MIN_ATTENTION_LENGTH, MIN_ATTENTION_WORK
    if has_mask:
        least, work = MIN_MASKED_ATTENTION_LENGTH, MIN_MASKED_ATTENTION_WORK
    if ignore_size_limits:
        return None
    if min(query.shape[2], key.shape[2]) < least:
        return f"attention over less than {least} tokens"
    if compiling.get() or replayed or in_graphs or is_large(query.shape, key.shape[2], work):
        return None  # such a graph takes no more of the CPU for these kernels than for others
    return "attention too small to be faster"


def is_large(queries: Sequence[int], keys: int, work: float = MIN_ATTENTION_WORK) -> bool:
    """Whether attention of queries [batch, heads, length, width] gains more in cuDNN's kernels than its way
    on the CPU costs."""
    batch, heads, length, width = queries
    rows = batch * length
    return rows * keys * heads * width >= work or rows >= break_even_rows(heads * width, in_fp8=False)


def gains_from_masks(length: int) -> bool:
    """Whether attention over so many keys may be faster where it is known what hides some of them."""
    return bool(ignore_size_limits) or length >= MIN_MASKED_ATTENTION_LENGTH


def may_be_replayed() -> bool:
    """Whether the call may become a part of a CUDA graph."""
    return compiling.get() or bool(replayed) or recorded()


@cache
def _most_width(device: torch.device) -> int:
    """The widest heads that PyTorch gives to cuDNN's attention, which has backwards of wide ones on Hopper
    alone."""
    return 256 if device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0) else 128


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether it is of the generation of Hopper, or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def without_experts(x: Tensor, dtype: torch.dtype, *weights: Tensor) -> str | None:
    """Why kernels cannot take these tokens and weights of experts, summed up in `dtype`, or None."""
    if why := next(filter(None, (without_kernel(x, weight) for weight in weights)), None):
        return why
    return None if dtype is x.dtype else f"a sum in {dtype_name(dtype)}"


def without_rotary(x: Tensor, angles: Tensor) -> str | None:
    """Why TE's rotary kernel cannot take these, or None."""
    if x.dim() != 4:
        return f"queries or keys of {x.dim()} dimensions, TE's rotary kernel takes 4"
    batch, heads, length, width = x.shape
    if too_small(batch * length, heads * width, in_fp8=False):
        return "too small to be faster"
    if why := without_kernel(x, x):
        return why
    if (
        angles.shape not in ((length, width), (1, length, width))
        or angles.dtype != torch.float32
        or angles.requires_grad
    ):
        return f"angles of shape {list(angles.shape)} in {dtype_name(angles.dtype)}"
    return None


def without_cross_entropy(logits: Tensor, targets: Tensor) -> str | None:
    """Why TE's cross entropy cannot take these, or None."""
    if type(logits) is not Tensor or not on_kernels_device(logits) or logits.device != targets.device:
        return "logits and targets that are not on one GPU"
    if logits.dim() < 2 or logits.numel() == 0 or logits.shape[:-1] != targets.shape:
        return f"logits of shape {list(logits.shape)} for targets of shape {list(targets.shape)}"
    if logits.dtype != torch.bfloat16 or targets.dtype != torch.int64:
        return f"logits in {dtype_name(logits.dtype)}, targets in {dtype_name(targets.dtype)}"
    if ignore_size_limits:
        return None
    if logits.numel() < MIN_LOGITS and not replayed:
        return f"less than {MIN_LOGITS:,.0f} logits, too few to be faster in TE's kernel"
    if logits.shape[-1] % ALIGNED:
        return f"rows of {logits.shape[-1]:,} logits, no multiple of {ALIGNED}: PyTorch's kernels are faster"
    return None
