"""Attention within a band of keys: what a mask is found to be, and what is computed in its place."""

import copy
import itertools
from types import ModuleType

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

import te_transform
from te_transform.backends import banded_attention, limits, plain
from te_transform.backends.banded_attention import OPEN, attended, registered_ops
from te_transform.backends.bands import Band, banded, sees_itself
from te_transform.backends.masks import FULL, SEEING, what_is
from te_transform.graph.ops import sdpa
from tests import reference_kernels
from tests.conversions import ALL, error, gradients, run
from tests.recordings import Recorder
from tests.reference_kernels import within_band, within_documents
from tests.zoo import zero_dropout

pytestmark = pytest.mark.usefixtures("at_any_size")

LATER = pytest.mark.integration

SIZE = 12
QUERY, KEY = torch.arange(SIZE)[:, None], torch.arange(SIZE)
CAUSAL = KEY <= QUERY
CPU = torch.device("cpu")


def short(*lengths: int) -> Tensor:
    """The mask [batch, 1, 1, keys] of sequences that are padded at their end."""
    return (torch.tensor(lengths)[:, None] > KEY)[:, None, None]


BANDS = {
    "window": (CAUSAL & (KEY > QUERY - 4), Band(3, 0, False, False)),
    "window on both sides": ((KEY - QUERY).abs() <= 3, Band(3, 3, False, False)),
    "padded": (short(5, 12), Band(None, None, True, False)),
    "padded, the longest too": (short(5, 9), Band(None, None, True, False)),
    "padded, one row for each query": (short(5, 12).expand(2, 1, 7, SIZE), Band(None, None, True, False)),
    "causal and padded": (CAUSAL & short(5, 11), Band(None, 0, True, False)),
    "one token": (CAUSAL & short(1, 1), Band(None, None, True, False)),
    "window and padded": (CAUSAL & (KEY > QUERY - 4) & short(5, 12), Band(3, 0, True, True)),
    "of a cache that is longer": (torch.ones(5, SIZE).tril().bool(), Band(None, 0, True, False)),
    "of a cache that is filled": (torch.ones(5, SIZE).tril(7).bool(), Band(None, 7, False, False)),
}
NUMBERS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])  # of documents of two sequences
TOGETHER = (NUMBERS[:, :, None] == NUMBERS[:, None])[:, None]
WINDOW = CAUSAL & (KEY > QUERY - 4)
FROM = torch.tensor([5, 1])[:, None, None, None]  # where two sequences begin that are padded before
DOCUMENTS = {
    "documents": (TOGETHER & CAUSAL, Band(None, 0, False, False, 8, 128)),
    "documents of all sequences": (TOGETHER[0, 0] & CAUSAL, Band(None, 0, False, False, 4, 128)),
    "documents in both directions": (TOGETHER, Band(None, None, False, False, 8, 128)),
    "documents in a window": (TOGETHER & WINDOW, Band(3, 0, False, False, 8, 128)),
    "documents that are shorter than the window": (
        TOGETHER[:1] & (QUERY - KEY <= 6) & CAUSAL, Band(None, 0, False, False, 4, 128)
    ),
    "padded at the start": (CAUSAL & (KEY >= FROM), Band(None, 0, False, True, 4, 128)),
    "padded at the start, windows": (WINDOW & (KEY >= FROM), Band(3, 0, False, True, 4, 128)),
    "one token of a sequence": (CAUSAL & (KEY >= 11), Band(None, None, False, True, 2, 128)),
    "a sequence without a token": (CAUSAL & short(0, 12), Band(None, 0, False, True, 2, 128)),
    "documents and padding behind": (
        TOGETHER & CAUSAL & short(7, 12) & short(7, 12).mT, Band(None, 0, False, True, 8, 128)
    ),
    "padding within": (
        TOGETHER & (NUMBERS != 1)[:, None, None] & (NUMBERS != 1)[:, None, :, None],
        Band(None, None, False, True, 8, 128),
    ),
}  # fmt: skip
NO_BANDS = {
    "padded at the start, keys alone": short(12, 12) & (KEY >= FROM),
    "documents that see those before them": CAUSAL & (KEY < QUERY // 5 * 5 + 5) & (QUERY != 7),
    "documents whose first tokens see more": (TOGETHER & CAUSAL) | (KEY == 0),
    "a document that others see": (TOGETHER & CAUSAL) | (NUMBERS == 0)[:, None, None],
    "documents with a hole": TOGETHER & CAUSAL & (KEY != 2),
    "a sequence without a token, one row of it": short(0, 12),
    "a hole": short(5, 12) & (KEY != 2),
    "windows of two widths": torch.where(QUERY < 6, KEY > QUERY - 4, KEY > QUERY - 3) & CAUSAL,
    "one for each head": torch.stack([CAUSAL, CAUSAL & (KEY > QUERY - 4)])[None],
    "the tokens before": KEY < QUERY,
    "a window of those before": (KEY < QUERY) & (KEY > QUERY - 4),
    "the tokens behind": (KEY > QUERY) | (KEY == SIZE - 1),
    "tokens further before": KEY < QUERY - 1,
}


def as_numbers(mask: Tensor, hides: float = -torch.inf) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hides)


def kept_by(band: Band, ends: Tensor | None, mask: Tensor) -> Tensor:
    """Return the positions that a band keeps, in the size of the mask."""
    queries, keys = mask.shape[-2:]
    if not band.documents:
        return within_band(band, ends, queries, keys, CPU)
    together = within_documents(ends, len(mask) if mask.dim() == 4 else 1, keys)
    return within_band(band, None, queries, keys, CPU) & together & sees_itself(mask)[:, None, :, None]


@pytest.mark.parametrize("name", BANDS | DOCUMENTS)
def test_a_band_is_found_and_is_the_mask(name: str, kernels_of_hopper: None) -> None:
    mask, band = (BANDS | DOCUMENTS)[name]
    assert what_is(mask) == band
    # rows that numbers hide as a whole are uniform, or NaN
    assert what_is(as_numbers(mask)) == (None if band.blind else band)
    assert what_is(as_numbers(mask, torch.finfo().min)) == (None if band.blind else band)
    found = banded(mask, band)
    assert torch.equal(*torch.broadcast_tensors(kept_by(band, found.ends, mask), mask))
    assert (found.ends is not None) == band.padded or band.documents
    if band.documents:
        assert found.ends.shape == (band.documents + 1,)
        assert (found.ends.diff() >= 0).all()
        assert found.ends.diff().amax() <= band.longest


@pytest.mark.parametrize("name", NO_BANDS)
def test_masks_without_a_band_are_found(name: str, kernels_of_hopper: None) -> None:
    mask = NO_BANDS[name]
    assert what_is(mask) is None
    sees = bool(mask.any(-1).all())  # every query some key, as kernels of masks that are added need it
    assert what_is(as_numbers(mask), beside_sinks=True) == (SEEING if sees else None)


def test_numbers_that_do_not_hide_are_no_band(kernels_of_hopper: None) -> None:
    mask = BANDS["window"][0]
    assert what_is(as_numbers(mask, -1e4)) == SEEING
    assert what_is(as_numbers(mask) + 0.5) == SEEING
    hidden = torch.zeros(SIZE, 1, dtype=torch.bool)
    assert what_is(mask, hidden) == BANDS["window"][1]
    assert what_is(mask, hidden.index_fill(0, torch.tensor(3), True)) is None


def test_masks_of_one_key(te: ModuleType, kernels_of_hopper: None) -> None:
    """One token alone, and one number that is broadcast to all scores."""
    kept = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    assert what_is(kept) == what_is(as_numbers(kept)) == FULL
    assert what_is(as_numbers(kept) + 0.5) == SEEING
    hidden, core = torch.tensor([True, False]).view_as(kept), te.DotProductAttention(written_out=False)
    for length in (1, 4):
        parts = [torch.randn(2, 2, length, 8).bfloat16() for _ in "qkv"]
        expected = F.scaled_dot_product_attention(*parts, hidden)
        torch.testing.assert_close(core(*parts, banded(hidden, what_is(hidden))), expected)


def test_bands_are_looked_for_where_kernels_are() -> None:
    assert what_is(BANDS["window"][0]) is None


def test_bands_are_looked_for_where_attention_is_large_enough(kernels_of_hopper: None, by_size: None) -> None:
    assert what_is(BANDS["window"][0]) is None
    assert isinstance(what_is(F.pad(short(5, 12), (0, 256))), Band)


@pytest.mark.parametrize("seed", range(20))
def test_any_band_is_found(seed: int, kernels_of_hopper: None) -> None:
    random = torch.Generator().manual_seed(seed)
    queries, keys, before, after = torch.randint(1, 20, (4,), generator=random).tolist()
    lengths = torch.randint(1, keys + 1, (3,), generator=random, dtype=torch.int32)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    for reach in itertools.product((None, before), (None, after, 0)):
        mask = within_band(Band(*reach, True, False), ends, queries, keys, CPU)
        answer = what_is(mask)
        if isinstance(answer, Band):
            found = within_band(answer, banded(mask, answer).ends, queries, keys, CPU)
        else:
            found = torch.ones(queries, keys, dtype=torch.bool)
            found = found.tril() if answer == "causal" else found
            assert answer in ("causal", "full") or not mask.any(-1).any(-1).all()
        assert answer is None or torch.equal(*torch.broadcast_tensors(found, mask))


REACHES = {
    "padded": (24, 24, OPEN, OPEN),
    "causal": (24, 24, OPEN, 0),
    "window": (24, 24, 5, 0),
    "both sides": (24, 24, 5, 3),
    "ahead": (24, 24, OPEN, 3),
    "behind": (24, 24, 5, OPEN),
    "more keys": (16, 24, OPEN, 0),
    "fewer keys": (24, 16, OPEN, OPEN),
}


def parts_of(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, of 3 sequences, batch and length first."""
    sizes = ((queries, 4, 8), (keys, 2, 8), (keys, 2, 16))
    return [torch.randn(3, *size, generator=torch.Generator().manual_seed(0)).to(dtype) for size in sizes]


def ends_of(keys: int) -> Tensor:
    return torch.tensor([0, keys, keys + 3, keys + 4], dtype=torch.int32)


SEQUENCES = ("whole", "padded", "documents")
TRACED = ("window", "more keys")  # by a compiler too, to which other bands are other numbers
CASES = [(name, kind) for name in REACHES for kind in SEQUENCES if kind != "documents" or "keys" not in name]


def within_reach(name: str, kind: str) -> tuple[Tensor, Band, Tensor | None]:
    """Of three such sequences the mask, what it is, and where they end, or their documents: eight at most."""
    queries, keys, *reach = REACHES[name]
    reach = (None if end == OPEN else end for end in reach)
    if kind == "documents":
        ends = torch.tensor([0, 7, 7, 20, 24, 25, 48, 72, 72], dtype=torch.int32)
        band = Band(*reach, False, False, 8, 128)
        return within_band(band, None, queries, keys, CPU) & within_documents(ends, 3, keys), band, ends
    band, ends = Band(*reach, kind == "padded", False), ends_of(keys) if kind == "padded" else None
    return within_band(band, ends, queries, keys, CPU), band, ends


def compiled(*given: object) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(attended, backend="aot_eager", fullgraph=True)(*given)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_attention_in_a_band_is_attention_with_the_mask(name: str, kind: str) -> None:
    queries, keys, *_ = REACHES[name]
    mask, band, ends = within_reach(name, kind)
    parts = [part.transpose(1, 2).double().requires_grad_() for part in parts_of(queries, keys)]
    exact = F.scaled_dot_product_attention(*parts, mask, scale=0.3, enable_gqa=True)
    given = (*parts, ends, band, 0.3, False)
    found = attended(*given)
    for out in (found, *([compiled(*given)] if name in TRACED else [])):
        torch.testing.assert_close(out, exact, atol=1e-6, rtol=1e-6)
        grads = [torch.autograd.grad(x, parts, torch.ones_like(x), retain_graph=True) for x in (out, exact)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(attended(*given), found.detach())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_te_gets_what_it_is_to_compute(name: str, kind: str, packed: bool, te: ModuleType) -> None:
    """The stand-in computes sequence by sequence, from TE's description of its arguments."""
    queries, keys, *reach = REACHES[name]
    parts, (_, band, ends) = parts_of(queries, keys), within_reach(name, kind)
    rest = (ends, band.longest, *reach, 0.3, packed or kind == "documents")
    expected, sums, state = reference_kernels.attend(*parts, *rest, True)
    out, *saved = te.attend(*parts, *rest, True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(te.attend(*parts, *rest, False)[0], expected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        te.attend_backward(grad, *parts, out, *saved, *rest),
        reference_kernels.attend_backward(grad, *parts, expected, sums, state, *rest),
    )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_sinks(name: str, kind: str) -> None:
    """A score more for each query, of a key without values, against that key."""
    queries, keys, *_ = REACHES[name]
    mask, band, ends = within_reach(name, kind)
    parts = [part.transpose(1, 2).double().requires_grad_() for part in parts_of(queries, keys)]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], dtype=torch.float64, requires_grad=True)
    exact = sdpa(*parts, mask, scale=0.3, enable_gqa=True, sinks=sinks)
    given = (*parts, ends, band, 0.3, False, sinks)
    core = plain.DotProductAttention()(*parts, mask, 0.0, False, 0.3, True, sinks)
    for out in (attended(*given), core, *([compiled(*given)] if name in TRACED else [])):
        # a row that sees no key has all its probability in the sink
        torch.testing.assert_close(out, exact, atol=1e-6, rtol=1e-6)
        grads = [
            torch.autograd.grad(x, (*parts, sinks), torch.ones_like(x), retain_graph=True)
            for x in (out, exact)
        ]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(attended(*given), exact.detach(), atol=1e-6, rtol=1e-6)


def test_a_sink_of_minus_infinity_has_no_effect() -> None:
    """If a query sees any key, the attention equals one without a sink. All other values are numbers."""
    parts = [part.transpose(1, 2).requires_grad_() for part in parts_of(24, 24)]
    sinks = torch.tensor([-torch.inf, torch.finfo().min, -torch.inf, 1.0], requires_grad=True)
    band, ends = Band(5, 0, True, True), ends_of(24)
    mask = within_band(band, ends, 24, 24, CPU)
    sees = mask.any(-1, keepdim=True)
    exact = F.scaled_dot_product_attention(*parts, mask, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(torch.where(sees, exact, 0)[:, :3].sum(), parts)
    core = plain.DotProductAttention()(*parts, banded(mask, band), 0.0, False, 0.3, True, sinks)
    for out in (attended(*parts, ends, band, 0.3, False, sinks), core):
        assert torch.autograd.grad(out.sum(), sinks, retain_graph=True)[0].isfinite().all()
        seen = torch.where(sees, out, 0)[:, :3]
        torch.testing.assert_close(seen, torch.where(sees, exact, 0)[:, :3])
        torch.testing.assert_close(torch.autograd.grad(seen.sum(), parts), wanted)


@pytest.mark.parametrize(("packed", "kind"), [(False, "padded"), (True, "padded"), (True, "documents")])
def test_te_gets_what_it_is_to_compute_beside_sinks(
    packed: bool, kind: str, te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [part.transpose(1, 2).requires_grad_() for part in parts_of(24, 24)]
    sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], requires_grad=True)
    _, band, ends = within_reach("window", kind)
    given = (*parts, ends, band, 0.3, packed, sinks)
    expected = attended(*given)
    grads = torch.autograd.grad(expected, (*parts, sinks), torch.ones_like(expected))
    for name in ("attend", "attend_backward"):
        monkeypatch.setattr(banded_attention.registered_ops, name, getattr(te, name), raising=False)
    found = attended(*given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (*parts, sinks), torch.ones_like(found)), grads)


@pytest.mark.parametrize("kind", ["padded", "documents"])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_operations_are_what_they_say(keeps: bool, kind: str) -> None:
    _, band, ends = within_reach("window", kind)
    parts, rest = parts_of(24, 24), (ends, band.longest, 5, 0, 0.3, kind == "documents")
    torch.library.opcheck(registered_ops.attend.default, (*parts, *rest, keeps))
    found = registered_ops.attend(*parts, *rest, True)
    torch.library.opcheck(
        registered_ops.attend_backward.default, (torch.randn_like(found[0]), *parts, *found, *rest)
    )


def heads(length: int, width: int = 64, count: int = 4) -> Tensor:
    return torch.zeros(2, count, length, width, dtype=torch.bfloat16)


REFUSED = {
    "dropout": ((heads(64),) * 3, BANDS["padded"][1], 0.1, False, "dropout"),
    "heads that nobody allowed": (
        (heads(64), *(heads(64, count=2),) * 2), BANDS["padded"][1], 0.0, False, "different batch sizes",
    ),
    "one sequence of keys": (
        (heads(64), heads(64)[:1], heads(64)[:1]), BANDS["padded"][1], 0.0, False, "different batch sizes",
    ),
    "a window over other keys": (
        (heads(64), heads(128), heads(128)), BANDS["window"][1], 0.0, False,
        "a sliding window with different numbers of queries and keys",
    ),
    "wide heads of documents": (
        (heads(64, 192).requires_grad_(),) * 3, DOCUMENTS["documents"][1], 0.0, False, "documents with heads",
    ),
    "wide heads": ((heads(64, 264),) * 3, BANDS["padded"][1], 0.0, False, "heads of width 264"),
    "float32": ((heads(64).float(),) * 3, BANDS["padded"][1], 0.0, False, "float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_says_why_not(name: str, kernels_of_hopper: None) -> None:
    parts, *rest, why = REFUSED[name]
    assert why in limits.without_band(*parts, *rest)


def test_another_kernel_that_was_asked_for_runs(kernels_of_hopper: None) -> None:
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)

    def whys() -> list[str | None]:
        parts = (heads(64),) * 3
        return [
            limits.without_band(*parts, BANDS["padded"][1], 0.0, False),
            limits.without_attention(*parts, mask, False),
        ]

    assert whys() == [None, None]
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert all("requested" in why for why in whys())
    torch.use_deterministic_algorithms(True)
    try:
        assert all("requested" in why for why in whys())
    finally:
        torch.use_deterministic_algorithms(False)


def test_masks_that_cudnn_cannot_take(kernels_of_hopper: None) -> None:
    parts = (heads(64),) * 3
    assert "a mask of shape" in limits.without_attention(*parts, torch.ones(2, 1, 64, 1).bool(), False)
    assert "a mask of shape" in limits.without_attention(*parts, torch.ones(4, 64, 64).bool(), False)
    for shape in ((1, 64), (4, 1, 64, 64), (2, 4, 32, 64)):
        assert "a mask of shape" in limits.without_attention(*parts, torch.ones(shape).bool(), False)
    for shape in ((64, 64), (1, 1, 1, 64), (2, 1, 1, 64), (1, 4, 64, 64), (2, 4, 64, 64)):
        assert limits.without_attention(*parts, torch.ones(shape).bool(), False) is None
    learned = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    assert "a gradient" in limits.without_attention(*parts, learned, False)


@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_of_which_there_are_many(
    te: ModuleType, kernels_of_hopper: None, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels would be planned for each of them."""
    core, packed = te.DotProductAttention(written_out=False), []
    monkeypatch.setattr(te.attention.banded_attention, "attended", lambda *a: (packed.append(a[6]), a[0])[1])

    def attend(length: int, width: int = 64, trained: bool = False) -> list[bool]:
        parts = [heads(length, width).requires_grad_(trained) for _ in range(3)]
        packed.clear()
        core(*parts, None, 0.0, is_causal)
        return list(packed)

    assert attend(128) == []
    assert attend(100) == attend(100, trained=True) == attend(100, 192) == [True]
    assert attend(100, 192, trained=True) == [False]  # its gradients would be wrong
    with limits.replayed:
        assert attend(100) == [False]
        assert attend(128) == []
    packed.clear()
    core(*(heads(100) for _ in range(3)), None, 0.5)
    assert not packed  # dropout is PyTorch's


def test_a_mask_that_is_expanded_along_the_keys_is_no_band_of_them(
    te: ModuleType, kernels_of_hopper: None
) -> None:
    core = te.DotProductAttention(written_out=False)
    torch.manual_seed(0)
    mask = torch.ones(1, 1, 4, 1, dtype=torch.bool)
    mask[:, :, 2:] = False
    parts = [torch.randn(1, 2, 4, 8).bfloat16() for _ in range(3)]
    expected = F.scaled_dot_product_attention(*parts, mask)
    torch.testing.assert_close(core(*parts, banded(mask, what_is(mask))), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # as CUDA graphs GPT-OSS has them, test_sinks.py, and causal the documents below
        *(("llama", each) for each in ({}, {"compile": True}, {"graphs": True})),
        ("bert", {"compile": True}),
        ("bart", {}),
    ],
    ids=str,
)
@LATER
@pytest.mark.usefixtures("compilations", "kernels_of_hopper", "te")
def test_padded_batches_of_any_lengths(
    name: str, options: dict, bands: list[Band], cuda_graphs: Recorder
) -> None:
    case = ALL[name]
    model = zero_dropout(case.build(num_hidden_layers=1)).bfloat16()
    inputs = case.sample(padded=True)
    exact = copy.deepcopy(model).double()
    converted = te_transform.convert(model, inputs, backend="te", verify=False, **options)
    for length in (3, 5, 3, 5, inputs["input_ids"].shape[1]):
        mask = torch.ones_like(inputs["attention_mask"])
        mask[0, length:] = 0
        given = inputs | {"attention_mask": mask}
        wanted, allowed = run(exact, given), 1.5 * error(run(model, given), run(exact, given)) + 2**-8
        assert error(run(converted, given), wanted) <= allowed
        grads = [gradients(each, given) for each in (exact, model, converted)]
        of_embedding = [[next(iter(each.values()))] for each in grads]
        allowed = 1.5 * error(of_embedding[1], of_embedding[0]) + 2**-8
        assert error(of_embedding[2], of_embedding[0]) <= allowed
    assert bands
    notes = te_transform.report(converted).notes
    assert not any(f"{runs} uncompiled" in note for note in notes for runs in ("run", "runs"))
    assert ("graphs" in options) == bool(cuda_graphs["forward"])


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_in_the_core(
    name: str, written_out: bool, te: ModuleType, bands: list[Band], kernels_of_hopper: None
) -> None:
    """Queries that see nothing are zero, and so are the gradients of what lies there."""
    mask, band = DOCUMENTS[name]
    batch = len(mask) if mask.dim() == 4 and len(mask) > 1 else 3
    parts = [part[:batch].transpose(1, 2).requires_grad_() for part in parts_of(SIZE, SIZE, torch.bfloat16)]
    wide = [part.detach().double().requires_grad_() for part in parts]
    exact = F.scaled_dot_product_attention(*wide, mask, enable_gqa=True)
    core = te.DotProductAttention(written_out=written_out)
    out = core(*parts, banded(mask, band), 0.0, False, None, True)
    assert bands == [band]
    if written_out and band.blind:  # as a softmax makes them of -inf alone, and their gradients
        exact = torch.where(sees_itself(mask)[:, None, :, None], exact, torch.nan)
    torch.testing.assert_close(out.double(), exact, atol=2**-7, rtol=2**-7, equal_nan=True)
    if out.isnan().any():
        return
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(out, parts, cotangent)
    for found, wanted in zip(grads, torch.autograd.grad(exact, wide, cotangent.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=2**-5, rtol=2**-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, marks=LATER),
        pytest.param("llama", {"compile": True}, marks=LATER),
        pytest.param("llama", {"graphs": True}, marks=LATER),
        pytest.param("mistral", {}, marks=LATER),
    ],
    ids=str,
)
@pytest.mark.usefixtures("compilations", "kernels_of_hopper", "te")
def test_documents_of_models(name: str, options: dict, bands: list[Band], cuda_graphs: Recorder) -> None:
    """Sequences that are packed, as transformers finds by their positions, or padded at the start."""
    case = ALL[name]
    model = zero_dropout(case.build(num_hidden_layers=1)).bfloat16()
    ids = case.sample()["input_ids"]
    length = ids.shape[1]
    exact = copy.deepcopy(model).double()
    converted = te_transform.convert(model, {"input_ids": ids}, backend="te", verify=False, **options)
    for first, is_packed in itertools.product((3, length - 2), (True, False)):
        given = {"input_ids": ids, "use_cache": False}
        if is_packed:
            places = torch.cat([torch.arange(first), torch.arange(length - first)])
            given["position_ids"] = places.expand_as(ids)
        else:
            given["attention_mask"] = torch.ones_like(ids)
            given["attention_mask"][0, :first] = 0
        wanted = run(exact, given)
        assert error(run(converted, given), wanted) <= 1.5 * error(run(model, given), wanted) + 2**-8
        grads = [gradients(each, given) for each in (exact, model, converted)]
        of_embedding = [[next(iter(each.values()))] for each in grads]
        allowed = 1.5 * error(of_embedding[1], of_embedding[0]) + 2**-8
        assert error(of_embedding[2], of_embedding[0]) <= allowed
    assert {band.blind for band in bands if band.documents} == {True, False}
    assert [note for note in te_transform.report(converted).notes if "uncompiled" in note] == []
