"""Attention with masks on a GPU, against fp64: bands of keys, batches that are padded, and any other mask."""

import math

import pytest
import torch
import transformers
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits
from te_transform.backends.banded_attention import attended, registered_ops
from te_transform.backends.bands import Band, banded
from te_transform.backends.masks import what_is
from tests.gpu.attended import ends_of, poison, random, recorded
from tests.reference_kernels import within_band, within_documents

# queries and keys, and how far a query sees
REACHES = {
    "padded": (1024, 1024, None, None),
    "padded, other keys": (512, 1024, None, None),
    "padded, fewer keys": (1024, 512, None, None),
    "padded, odd": (777, 999, None, None),
    "causal, padded": (1024, 1024, None, 0),
    "causal, padded, odd": (1001, 1001, None, 0),
    "causal, padded, more keys": (512, 1024, None, 0),
    "window": (1024, 1024, 255, 0),
    "window, odd": (1001, 1001, 100, 0),
    "both sides": (1024, 1024, 64, 64),
    "both sides, odd": (999, 999, 64, 64),
    "ahead": (1024, 1024, None, 100),
    "behind": (1024, 1024, 100, None),
}


def close(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for got, wanted in zip(found, exact, strict=True):
        assert (got.double() - wanted).norm() <= 2**-8 * wanted.norm()


def exact(parts: list[Tensor], mask: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    wide = [part.detach().double().requires_grad_() for part in parts]
    mask = mask if mask.dtype is torch.bool else mask.double()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        out = nn.functional.scaled_dot_product_attention(*wide, mask, enable_gqa=True)
    return out, *torch.autograd.grad(out, wide, cotangent.double())


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("name", REACHES)
def test_bands_are_as_exact_as_masks(name: str, widths: tuple[int, int]) -> None:
    from te_transform.backends import te

    queries, keys, before, after = REACHES[name]
    core = te.DotProductAttention(written_out=False)
    torch.manual_seed(0)
    for lengths, groups in (([keys, keys // 2 + 5, 1], 2), ([keys] * 3, 4)):
        padded = lengths[-1] < keys
        ends = ends_of(lengths) if padded else None
        mask = within_band(Band(before, after, padded, False), ends, queries, keys, torch.device("cuda"))
        band = what_is(mask)
        if not isinstance(band, Band):
            assert not padded
            continue
        parts = [random(3, 4, queries, widths[0]), *(random(3, groups, keys, width) for width in widths)]
        cotangent = torch.randn_like(parts[0][..., : widths[1]])
        poison()
        out = core(*parts, banded(mask, band), 0.0, False, None, True)
        poison()
        found = out, *torch.autograd.grad(out, parts, cotangent)
        assert not core.plain_calls
        assert "Attended" in str(out.grad_fn) + str(out.grad_fn.next_functions)
        close(found, exact(parts, mask.expand(3, 1, queries, keys), cotangent))
        with torch.no_grad():
            assert torch.equal(core(*parts, banded(mask, band), 0.0, False, None, True), out)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("length", [16, 64, 100, 600, 997, 1024])
@pytest.mark.parametrize(("before", "after"), [(None, 0), (None, None), (100, 0), (20, 30)])
def test_bands_in_cuda_graphs(
    length: int, before: int | None, after: int | None, width: int, padded: bool
) -> None:
    torch.manual_seed(0)
    parts = [random(2, 4, length, width) for _ in range(3)]
    cotangent, ends = torch.randn_like(parts[0]), ends_of([length, length // 2]) if padded else None
    band = Band(before, after, padded, False)

    def run() -> tuple[Tensor, ...]:
        out = attended(*parts, ends, band, width**-0.5, False)
        return out, *torch.autograd.grad(out, parts, cotangent)

    from te_transform.backends import te  # noqa: F401  whose kernels run

    graph, found = recorded(run)
    for lengths in ([length, 7], [length // 3, length], [2, 9]):
        poison()
        with torch.no_grad():
            for x in (*parts, cotangent):
                x.copy_(torch.randn_like(x))
            if padded:
                ends.copy_(ends_of(lengths))
        graph.replay()
        mask = within_band(band, ends, length, length, torch.device("cuda"))
        close(found, exact(parts, mask, cotangent))


# how many tokens each document of two sequences has; those with a minus are padding, which sees nothing
DOCUMENTS = {
    "one each": [[1024], [1024]],
    "a few": [[100, 500, 424], [7, 1017]],
    "many": [[8] * 128, [1] * 24 + [1000]],
    "odd": [[333, 666], [1, 997, 1]],
    "padded before": [[-500, 524], [1024]],
    "padded before, odd": [[-1, 1000], [-1000, 1]],
    "padded within": [[200, -300, 524], [1000, -24]],
    "short": [[3, 97], [-40, 60]],
}
REACH_OF_DOCUMENTS = [(None, 0), (None, None), (100, 0), (20, 30)]


def documents_of(lengths: list[list[int]], before: int | None, after: int | None) -> Tensor:
    """The mask [batch, 1, length, length] of such documents."""
    flat = [abs(length) for sequence in lengths for length in sequence]
    length, padding = sum(flat) // len(lengths), [length < 0 for s in lengths for length in s]
    counts = torch.tensor(flat, device="cuda")
    seen = ~torch.tensor(padding, device="cuda").repeat_interleave(counts).view(len(lengths), 1, length, 1)
    together = within_documents(ends_of(flat), len(lengths), length) & seen & seen.mT
    return (
        within_band(Band(before, after, False, False), None, length, length, torch.device("cuda")) & together
    )


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("before", "after"), REACH_OF_DOCUMENTS)
def test_documents_are_as_exact_as_masks(
    name: str, width: int, before: int | None, after: int | None
) -> None:
    from te_transform.backends import te

    torch.manual_seed(0)
    mask = documents_of(DOCUMENTS[name], before, after)
    band, length = what_is(mask), mask.shape[-1]
    known = banded(mask, band) if isinstance(band, Band) else band
    core = te.DotProductAttention(written_out=False)
    parts = [random(2, heads, length, width) for heads in (4, 2, 2)]
    cotangent = torch.randn_like(parts[0])
    poison()
    out = core(*parts, known, 0.0, False, None, True)
    poison()
    found = out, *torch.autograd.grad(out, parts, cotangent)
    assert not core.plain_calls
    wanted = exact(parts, mask, cotangent)
    close(found, wanted)
    poison()
    with torch.no_grad():  # in which kernels of documents take wide heads
        close((core(*parts, known, 0.0, False, None, True),), wanted[:1])


@pytest.mark.parametrize("sizes", [(8, 1024), (64, 512)])
@pytest.mark.parametrize("length", [100, 600, 997, 1024])
@pytest.mark.parametrize(("before", "after"), REACH_OF_DOCUMENTS)
def test_documents_in_cuda_graphs(
    length: int, before: int | None, after: int | None, sizes: tuple[int, int]
) -> None:
    from te_transform.backends import te

    torch.manual_seed(0)
    parts = [random(2, 4, length, 64) for _ in range(3)]
    cotangent, band = torch.randn_like(parts[0]), Band(before, after, False, True, *sizes)
    core, mask = te.DotProductAttention(written_out=False), documents_of([[length]] * 2, before, after)

    def run() -> tuple[Tensor, ...]:
        out = core(*parts, banded(mask, band), 0.0, False, None, True)
        return out, *torch.autograd.grad(out, parts, cotangent)

    graph, found = recorded(run)
    for lengths in (
        [[50, length - 50]] * 2,
        [[-9, length - 9], [1, 2, length - 3]],
        [[length - 90, -90], [length]],
    ):
        poison()
        with torch.no_grad():
            for x in (*parts, cotangent):
                x.copy_(torch.randn_like(x))
            mask.copy_(documents_of(lengths, before, after))
        graph.replay()
        close(found, exact(parts, mask, cotangent))


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["whole", "padded", "documents"])
def test_the_operations_are_what_they_say(kind: str, keeps: bool) -> None:
    from te_transform.backends import te  # noqa: F401

    parts = [random(2, 4, 256, 64).detach().transpose(1, 2).contiguous() for _ in range(3)]
    ends = {"whole": None, "padded": ends_of([256, 100]), "documents": ends_of([100, 156, 1, 255])}[kind]
    packed = kind == "documents"
    rest = (ends, 256 * packed, 100, 0, 0.125, packed)
    torch.library.opcheck(registered_ops.attend.default, (*parts, *rest, keeps))
    saved = registered_ops.attend(*parts, *rest, True)
    torch.library.opcheck(
        registered_ops.attend_backward.default, (torch.randn_like(saved[0]), *parts, *saved, *rest)
    )


def masks(batch: int, heads: int, queries: int, keys: int, device: str = "cuda") -> dict[str, Tensor]:
    def kept(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) > 0.3

    hidden = kept(batch, 1, queries, keys)
    hidden[0, :, : queries // 2] = False
    return {
        "[queries, keys]": kept(queries, keys),
        "[1, 1, queries, keys]": kept(1, 1, queries, keys),
        "[batch, 1, 1, keys]": kept(batch, 1, 1, keys),
        "[batch, heads, queries, keys]": kept(batch, heads, queries, keys),
        "[1, heads, 1, keys]": kept(1, heads, 1, keys),
        "expanded": kept(batch, 1, 1, keys).expand(batch, heads, queries, keys),
        "transposed": kept(batch, 1, keys, queries).transpose(-1, -2),
        "sliced": kept(batch, 1, queries, keys + 3)[..., 3:],
        "hidden rows": hidden,
    }


@pytest.mark.parametrize("name", masks(1, 1, 1, 1, device="cpu"))
@pytest.mark.parametrize("kind", ["boolean", "-inf", "numbers"])
@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (640, 512), (513, 777)])
def test_any_mask(name: str, kind: str, queries: int, keys: int) -> None:
    from te_transform.backends import te

    torch.manual_seed(0)
    core = te.DotProductAttention(written_out=False)
    mask = masks(2, 4, queries, keys)[name]
    if kind != "boolean":
        wide = torch.zeros_like(mask, dtype=torch.bfloat16)
        mask = wide.masked_fill(~mask, -math.inf) if kind == "-inf" else torch.randn_like(wide)
    if name == "sliced" and kind != "boolean":
        mask = nn.functional.pad(mask, (3, 0))[..., 3:]
    parts = [random(2, 4, queries, 64), *(random(2, 2, keys, 64) for _ in range(2))]
    cotangent = torch.randn_like(parts[0])
    poison()
    out = core(*parts, mask, 0.0, False, None, True)
    found = out, *torch.autograd.grad(out, parts, cotangent)
    assert not core.plain_calls
    assert "Cudnn" in str(out.grad_fn)
    close(found, exact(parts, mask, cotangent))


def test_a_mask_that_is_trained_gets_its_gradient() -> None:
    from te_transform.backends import te

    core = te.DotProductAttention(written_out=False)
    parts = [random(2, 4, 512, 64) for _ in range(3)]
    mask = torch.randn(1, 4, 512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    core(*parts, mask).sum().backward()
    assert mask.grad.norm() > 0


TINY = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TINY | {"num_key_value_heads": 2}),
    "Mistral": (
        "MistralForCausalLM", "MistralConfig", TINY | {"num_key_value_heads": 2, "sliding_window": 100}
    ),
    "Gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        TINY | {"num_key_value_heads": 2, "head_dim": 256, "sliding_window": 100, "num_hidden_layers": 6},
    ),
    "BERT": (
        "BertForMaskedLM", "BertConfig", TINY | {"hidden_dropout_prob": 0.0, "max_position_embeddings": 1024}
    ),
    "ModernBERT": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        TINY | {"local_attention": 64, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "BART": (
        "BartForConditionalGeneration", "BartConfig",
        {
            "vocab_size": 128, "d_model": 256, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
        },
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    kind, config, told = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**told))
    for module in model.modules():  # which dropout takes to another kernel
        if hasattr(module, "attention_probs_dropout_prob"):
            module.attention_probs_dropout_prob = 0.0
    return model.to("cuda", torch.bfloat16)


def batch(length: int, lengths: list[int]) -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (len(lengths), length), device="cuda")
    mask = torch.arange(length, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids}


def check(model: nn.Module, converted: nn.Module, given: dict[str, Tensor]) -> None:
    """By verify(), which runs nothing compiled and no CUDA graph, and by a training step, which does."""
    result = te_transform.verify(model, converted, given)
    assert result, result
    grads = []
    for each in (model, converted):
        each.zero_grad()
        each(**given).loss.backward()
        grads.append([p.grad.double().flatten() for p in each.parameters() if p.grad is not None])
    expected, found = map(torch.cat, grads)
    assert (found - expected).norm() <= 2**-5 * expected.norm()  # both round as bf16 does


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"graphs": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_padded_batches(name: str, options: dict, bands: list[Band]) -> None:
    """Lengths vary with each call, which no guard shows."""
    model = built(name)
    converted = te_transform.convert(model, batch(512, [512, 300]), backend="te", **options)
    for length, lengths in ((512, [512, 300]), (512, [17, 512]), (512, [512, 512]), (640, [640, 5])):
        for flipped in (False, True):  # padded before
            given = batch(length, lengths)
            given["attention_mask"] = given["attention_mask"].flip(1 if flipped else ())
            check(model, converted, given)
    assert bands


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"graphs": True}], ids=str)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
def test_models_with_packed_documents(name: str, options: dict, bands: list[Band]) -> None:
    """Transformers finds documents by their positions."""
    model = built(name)

    def packed(*lengths: int) -> dict[str, Tensor]:
        given = batch(512, [512, 512])
        del given["attention_mask"]
        positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
        return given | {"position_ids": positions.expand(2, -1), "use_cache": False}

    converted = te_transform.convert(model, packed(200, 312), backend="te", **options)
    for lengths in ((200, 312), (1, 500, 11), (512,), (100,) * 5 + (12,)):
        check(model, converted, packed(*lengths))
    assert name == "Gemma3" or any(band.documents for band in bands)  # whose heads are of width 256


def test_a_small_call_takes_no_band(by_size: None) -> None:
    parts = [random(2, 4, 128, 64) for _ in range(3)]
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool, device="cuda")
    mask[1, ..., 60:] = False
    assert what_is(mask) is None
    assert "fewer than 256" in limits.without_band(*parts, Band(None, None, True, False), 0.0, False)
