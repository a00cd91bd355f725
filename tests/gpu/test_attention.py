"""The attention core on a GPU, against fp64: any order in memory, any length, with gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.bands import Seeing
from te_transform.graph import ops

LENGTHS = (16, 512, 777, 1024)
ORDERS = ("heads first", "batch first", "sequence first", "packed", "packed, sequence first")


def tensors(order: str, heads: tuple[int, int], length: int, width: int) -> list[Tensor]:
    """Queries, keys and values [2, heads, length, width], as that order in memory has them."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    counts = (heads[0], heads[1], heads[1])
    if order == "heads first":
        return [random(2, count, length, width) for count in counts]
    if order == "batch first":
        return [random(2, length, count, width).transpose(1, 2) for count in counts]
    if order == "sequence first":
        return [random(length, 2, count, width).permute(1, 2, 0, 3) for count in counts]
    if order == "packed":
        parts = random(2, length, sum(counts) * width).split([count * width for count in counts], -1)
        return [x.view(2, length, -1, width).transpose(1, 2) for x in parts]
    whole = random(length, 2, heads[0], 3 * width).split(width, -1)
    return [x.permute(1, 2, 0, 3) for x in whole]


@pytest.mark.parametrize("order", ORDERS)
def test_is_as_exact_as_pytorch(order: str) -> None:
    from te_transform.backends import te

    core = te.DotProductAttention()
    for length, width, grouped, causal in itertools.product(LENGTHS, (64, 128), (False, True), (False, True)):
        if grouped and order == "packed, sequence first":
            continue  # packed by head: there are as many keys as queries
        given = [x.requires_grad_() for x in tensors(order, (4, 2 if grouped else 4), length, width)]
        wide = [x.detach().double().requires_grad_() for x in given]
        options = (None, 0.0, causal, 0.1, grouped)
        found, exact = core(*given, *options), ops.sdpa(*wide, *options)
        own = ops.sdpa(*given, *options)
        assert not core.plain_calls
        rows = [(found, own, exact)]
        by_heads = torch.randn_like(exact)
        for cotangent in (by_heads, by_heads.transpose(1, 2).contiguous().transpose(1, 2)):
            grads = [
                torch.autograd.grad(out, leaves, cotangent.to(out.dtype), retain_graph=True)
                for out, leaves in ((found, given), (own, given), (exact, wide))
            ]
            rows += zip(*grads, strict=True)
        for got, theirs, wanted in rows:
            allowed = 1.2 * (theirs.double() - wanted).norm() + 2**-8 * wanted.norm()
            assert (got.double() - wanted).norm() <= allowed, (length, width, grouped, causal)


@pytest.mark.parametrize("length", [512, 777, 1024])
@pytest.mark.parametrize("widths", [(192, 128), (160, 160), (256, 256), (128, 256)])
def test_wide_heads_and_values_of_another_width(widths: tuple[int, int], length: int) -> None:
    """The shapes of DeepSeek, whose keys have an additional rotated part, and of Gemma."""
    from te_transform.backends import te

    core = te.DotProductAttention()
    for grouped, causal in itertools.product((False, True), (False, True)):
        query, key, _ = tensors("batch first", (4, 2 if grouped else 4), length, widths[0])
        *_, value = tensors("batch first", (4, 2 if grouped else 4), length, widths[1])
        given = [x.requires_grad_() for x in (query, key, value)]
        wide = [x.detach().double().requires_grad_() for x in given]
        options = (None, 0.0, causal, None, grouped)
        found, exact = core(*given, *options), ops.sdpa(*wide, *options)
        assert not core.plain_calls
        cotangent = torch.randn_like(exact)
        rows = [(found, exact)]
        rows += zip(
            torch.autograd.grad(found, given, cotangent.to(found.dtype)),
            torch.autograd.grad(exact, wide, cotangent),
            strict=True,
        )
        for got, wanted in rows:
            assert (got.double() - wanted).norm() <= 2**-8 * wanted.norm(), (grouped, causal)


@pytest.mark.parametrize("widths", [(192, 128), (256, 256)])
def test_wide_heads_in_cuda_graphs(widths: tuple[int, int]) -> None:
    from te_transform.backends import te

    core = te.DotProductAttention(written_out=False)
    query, key, _ = tensors("batch first", (4, 2), 512, widths[0])
    *_, value = tensors("batch first", (4, 2), 512, widths[1])
    given = [x.requires_grad_() for x in (query, key, value)]

    def run() -> tuple[Tensor, ...]:
        out = core(*given, None, 0.0, True, None, True)
        return out, *torch.autograd.grad(out, given, torch.ones_like(out))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        for x in given:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for got, wanted in zip(found, run(), strict=True):
        assert (got.double() - wanted.double()).norm() <= 2**-8 * wanted.double().norm()
    assert not core.plain_calls


def test_autocast_casts_what_is_in_float32() -> None:
    from te_transform.backends import te

    core = te.DotProductAttention()
    query, key, value = (torch.randn(2, 4, 128, 64, device="cuda") for _ in range(3))
    expected = core(*(x.bfloat16() for x in (query, key, value)))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(core(query, key, value.bfloat16()), expected)
    assert not core.plain_calls


@pytest.mark.parametrize(
    ("shape", "options", "why"),
    [
        ((2, 4, 16, 64), {}, "attention over fewer than 512 tokens"),
        ((2, 4, 512, 264), {}, "heads of width 264"),
        ((4, 512, 64), {}, "queries of 3 dimensions"),
        ((2, 4, 512, 64), {"mask": True}, "attention too small"),
    ],
)
def test_attention_left_to_pytorch_has_a_reason(
    shape: tuple[int, ...], options: dict, why: str, by_size: None
) -> None:
    from te_transform.backends import te

    core = te.DotProductAttention()
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = torch.ones(shape[-2], shape[-2], dtype=torch.bool, device="cuda") if options else None
    expected = ops.sdpa(query, key, value, mask)
    assert torch.equal(core(query, key, value, mask), expected)
    assert any(why in reason for reason in core.plain_calls), core.plain_calls


def test_attention_keeps_only_the_values_of_a_joined_product() -> None:
    """Queries and keys are turned, and so are other tensors than those that the product gave."""
    from te_transform.backends import te

    core, size = te.DotProductAttention(written_out=False), 2 * 1024 * 4 * 64 * 2  # bytes of the values
    x = torch.randn(2, 1024, 12 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    query, key, value = ((x * 1).view(2, 1024, 12, 64).transpose(1, 2)).split(4, 1)
    out = core(query * 1, key * 1, value, None, 0.0, True)
    assert not core.plain_calls
    del query, key, value
    # queries, keys, values, the output and its log-sum-exps
    assert torch.cuda.memory_allocated() - before < 4.5 * size
    out.sum().backward()


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("keys", [100, 1024])
@pytest.mark.parametrize("compile", [False, True])
def test_a_single_query_with_a_mask(batch: int, keys: int, compile: bool) -> None:
    """Generation with a static cache has few heads and many keys, which are computed as two products."""
    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        torch.randn(batch, *size, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for size in ((8, 1), (2, keys), (2, keys))
    ]
    core = plain.DotProductAttention(written_out=False)  # as for calls of scaled_dot_product_attention
    kept = torch.arange(keys, device="cuda").expand(batch, 1, 1, keys) < keys // 2
    kept = kept & (torch.arange(batch, device="cuda").view(-1, 1, 1, 1) != 3)  # where a row sees nothing
    options = (0.0, False, None, True)
    for mask in (kept, torch.zeros_like(kept, dtype=torch.bfloat16).masked_fill(~kept, float("-inf"))):
        wide = [part.double() for part in parts]
        exact = ops.sdpa(*wide, mask if mask.dtype is torch.bool else mask.double(), *options)
        with torch.no_grad():
            attend = torch.compile(core.attend) if compile else core.attend
            found = attend(*parts, mask, *options)
        assert (found - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.parametrize("wide_scores", [False, True])
@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_that_is_added(dtype: torch.dtype, heads: int, wide_scores: bool) -> None:
    """Biases and rows that are hidden everywhere, in the dtype of the scores or, as models cast it, fp32."""
    from te_transform.backends import te

    generator = torch.Generator("cuda").manual_seed(0)
    parts = [
        torch.randn(2, count, 1024, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for count in (8, heads, heads)
    ]
    mask = torch.randn(2, 8, 1024, 1024, generator=generator, device="cuda").to(dtype)
    mask[0, :, :3] = torch.finfo(dtype).min
    core, rest = te.DotProductAttention(wide_scores=wide_scores), (mask, 0.0, False, 0.125, heads == 1)
    given, wide = [[x.to(kind).requires_grad_() for x in parts] for kind in (torch.bfloat16, torch.float64)]
    query, key, value = wide
    exact = (query @ key.mT * 0.125 + mask).softmax(-1) @ value
    with torch.no_grad():
        assert (core(*given, *rest) - exact).norm() <= 0.01 * exact.norm()
    found, cotangent = core(*given, *rest), torch.randn_like(exact)
    assert (found - exact).norm() <= 0.01 * exact.norm()
    grads = (
        torch.autograd.grad(found, given, cotangent.bfloat16()),
        torch.autograd.grad(exact, wide, cotangent),
    )
    for got, wanted in zip(*grads, strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.bfloat16).min])
@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.parametrize("length", [512, 777, 1024])
def test_a_bias_under_which_every_query_sees_a_key(heads: int, length: int, hidden: float) -> None:
    """An added mask goes to cuDNN in training too, even if the scores were written out."""
    from te_transform.backends import te

    generator = torch.Generator("cuda").manual_seed(0)
    given, wide = [], []
    for count in (8, heads, heads):
        part = torch.randn(2, count, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        given.append(part.requires_grad_())
        wide.append(part.detach().double().requires_grad_())
    mask = torch.randn(1, 8, 1, length, generator=generator, device="cuda", dtype=torch.bfloat16)
    mask = mask + torch.full((length, length), hidden, device="cuda", dtype=torch.bfloat16).triu(1)
    core, rest = te.DotProductAttention(), (0.0, False, 0.125, heads < 8)
    found, exact = core(*given, Seeing(mask), *rest), ops.sdpa(*wide, mask.double(), *rest)
    assert not core.plain_calls
    cotangent = torch.randn_like(exact)
    grads = (
        torch.autograd.grad(found, given, cotangent.bfloat16()),
        torch.autograd.grad(exact, wide, cotangent),
    )
    assert (found - exact).norm() <= 0.01 * exact.norm()
    for got, wanted in zip(*grads, strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()
