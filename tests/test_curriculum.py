"""The sequence-length curriculum: lengths, what is cut along with the inputs, workers, resuming, errors."""

import logging
import pickle
from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate
from transformers import BatchEncoding

import te_transform
from te_transform.training import CurriculumError, SequenceCurriculum, TokenSchedule, variance_norms
from te_transform.training.length_schedule import LengthSchedule
from tests.ranks import WIDTH, Net, spawn
from tests.zoo import seeded

ROWS, SIZE = 3, 32
SMALL = {"max_length": SIZE, "bucket": 8}
Pair = namedtuple("Pair", "ids labels")


@dataclass
class Sample:
    ids: Tensor
    weights: Tensor


class Numbered(Dataset):
    """Rows of one number each, so that a batch says which it is."""

    def __init__(self, rows: int = 24) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((SIZE,), index)
        return {"input_ids": row, "labels": row}


class Streamed(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from map(Numbered().__getitem__, range(24))


class Stateful:
    """A loader with a state of its own, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.given, 8):
            self.given = number + 1
            yield default_collate([Numbered()[number]])
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def ids(rows: int = ROWS, size: int = SIZE) -> Tensor:
    return torch.arange(rows * size).view(rows, size)


def cut(batch: Any, length: int = 8, **options: Any) -> Any:
    """Return `batch` as the first step gets it, cut to `length` tokens."""
    settings = {"total_steps": 2, "schedule": {0: length}, "longest_first": False}
    return SequenceCurriculum(**SMALL | settings | options).cut(batch)


def lengths_of(curriculum: SequenceCurriculum) -> list[int]:
    return [batch["input_ids"].shape[1] for batch in curriculum]


@pytest.mark.parametrize(("schedule", "degree"), [("linear", 1), ("root", 2)])
@pytest.mark.parametrize(
    ("low", "high", "total", "bucket"), [(8, 100, 37, 8), (64, 1024, 15, 64), (1, 9, 3, 1)]
)
def test_lengths_are_those_of_the_formula(
    schedule: str, degree: int, low: int, high: int, total: int, bucket: int
) -> None:
    """In exact arithmetic: (s - min)^r / (max - min)^r <= t / T, for the largest such s."""
    found = LengthSchedule(low, high, total, schedule, bucket)
    for step in range(total):
        part = Fraction(step, total) * (high - low) ** degree
        exact = max(grown for grown in range(high - low + 1) if grown**degree <= part)
        assert found.length_at(step) == floor((exact + low) / bucket) * bucket
    assert found.length_at(total) == found.length_at(10 * total) == high
    assert found.lengths == tuple(sorted({found.length_at(step) for step in range(total + 1)}))


def test_tokens_of_whole_trainings_are_counted_exactly() -> None:
    curriculum = SequenceCurriculum(max_length=2048, total_tokens=15 * 10**12)
    assert curriculum.lengths == tuple(range(64, 2049, 64))
    assert curriculum.schedule.length_at(15 * 10**12 // 31 + 1) == 128


def test_the_number_of_lengths_is_said_beforehand() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("te_transform.training.curriculum")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        curriculum = SequenceCurriculum(max_length=1024, total_steps=3000)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(curriculum.lengths) == 16
    said = (
        "SequenceCurriculum(linear over 3000 steps, truncating, first step of 1024, 16 lengths: 64, 128, "
        "192, ..., 1024)"
    )
    assert [repr(curriculum), *records] == [said, said]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_cut_for_the_step_that_uses_it(workers: int) -> None:
    """Workers fetch four batches ahead; the lengths are those of the steps all the same."""
    loader = DataLoader(Numbered(), batch_size=3, num_workers=workers)
    curriculum = SequenceCurriculum(loader, **SMALL, total_steps=4)
    assert lengths_of(curriculum) == [32, 8, 16, 24, 32, 32, 32, 32]
    assert (curriculum.step, curriculum.tokens) == (8, 3 * 208)
    assert len(curriculum) == 8
    assert curriculum.batch_size == 3  # of the loader


def test_streams_and_generators_and_several_epochs() -> None:
    curriculum = SequenceCurriculum(DataLoader(Streamed(), batch_size=12), **SMALL, total_steps=4)
    assert [lengths_of(curriculum) for _ in range(3)] == [[32, 8], [16, 24], [32, 32]]
    batches = ({"input_ids": ids()} for _ in range(2))
    assert lengths_of(SequenceCurriculum(batches, **SMALL, total_steps=4, longest_first=False)) == [8, 8]


def test_all_batches_of_a_step_have_one_length() -> None:
    """An epoch of five batches ends in the middle of a step, which trainers take then."""
    loader = [{"input_ids": ids()}] * 5
    curriculum = SequenceCurriculum(loader, **SMALL, total_steps=4, accumulation=2)
    assert lengths_of(curriculum) == [32, 32, 8, 8, 16]
    assert curriculum.step == 3
    assert lengths_of(curriculum) == [24, 24, 32, 32, 32]


def test_tokens_are_those_of_all_ranks() -> None:
    loader = [{"input_ids": ids()}] * 6
    total = 2 * ROWS * (32 + 8 + 16 + 24)
    curriculum = SequenceCurriculum(loader, **SMALL, total_tokens=total, ranks=2)
    assert lengths_of(curriculum) == [32, 16, 16, 24, 32, 32]
    assert curriculum.tokens == 2 * ROWS * (32 + 16 + 16 + 24 + 32 + 32)


def on_a_rank() -> tuple[list[int], int, list[float], tuple[float, float]]:
    """Train a sharded model on this rank's rows; return lengths, tokens, learning rates and norms."""
    sampler = DistributedSampler(Numbered(), shuffle=False)
    loader = DataLoader(Numbered(), batch_size=2, sampler=sampler)
    curriculum = SequenceCurriculum(loader, **SMALL, total_tokens=320)
    model = fully_shard(nn.Sequential(nn.Embedding(24, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=False)
    full = 2 * SIZE * dist.get_world_size()
    schedule = TokenSchedule(ExponentialLR(optimizer, 0.5), full, source=curriculum)
    lengths, rates = [], []
    for batch in curriculum:
        lengths.append(batch["input_ids"].shape[1])
        model(batch["input_ids"]).sum().backward()
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return lengths, curriculum.tokens, rates, variance_norms(optimizer)


@pytest.mark.parametrize(
    ("ranks", "lengths", "rates"),
    [
        # after 0, 128, 192, 256, 352, 480 tokens, and 608 in the end; the rate counts each 128
        (2, [32, 16, 16, 24, 32, 32], [0.5, 0.5, 0.25, 0.25, 0.125, 0.0625]),
        # after 0, 256, 448 tokens, and 704 in the end; the rate counts each 256
        (4, [32, 24, 32], [0.5, 0.5, 0.25]),
    ],
)
def test_ranks_agree(ranks: int, lengths: list[int], rates: list[float], tmp_path: Path) -> None:
    """On lengths and learning rates by tokens, without communication; norms are those of all shards."""
    first, *others = spawn(on_a_rank, ranks, tmp_path)
    assert all(first == other for other in others)
    assert first[:3] == (lengths, ranks * 2 * sum(lengths), rates)
    norms = first[3]
    assert norms.l1 > norms.max > 0


def test_the_sampler_is_told_the_epoch() -> None:
    sampler = DistributedSampler(Numbered(), num_replicas=2, rank=1, seed=3)
    curriculum = SequenceCurriculum(DataLoader(Numbered(), 4, sampler=sampler), **SMALL, total_steps=4)
    curriculum.sampler.set_epoch(5)
    assert sampler.epoch == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    def made() -> SequenceCurriculum:
        loader = DataLoader(Numbered(), batch_size=3, num_workers=workers)
        return SequenceCurriculum(loader, **SMALL, total_tokens=900, accumulation=2)

    whole, stopped = made(), made()
    expected = [batch["input_ids"] for _ in range(2) for batch in whole]
    reached = iter(stopped)
    before = [next(reached)["input_ids"] for _ in range(5)]
    state = pickle.loads(pickle.dumps(stopped.state_dict()))
    resumed = made()
    resumed.load_state_dict(state)
    after = [batch["input_ids"] for _ in range(2) for batch in resumed]
    torch.testing.assert_close([*before, *after], expected, rtol=0, atol=0)
    assert resumed.state_dict() == whole.state_dict()


def test_a_loader_with_a_state_goes_on_by_itself() -> None:
    reached = iter(curriculum := SequenceCurriculum(Stateful(), **SMALL, total_steps=4))
    before = [next(reached)["labels"][0, 0].item() for _ in range(3)]
    resumed = SequenceCurriculum(Stateful(), **SMALL, total_steps=4)
    resumed.load_state_dict(curriculum.state_dict())
    after = [(batch["labels"][0, 0].item(), batch["labels"].shape[1]) for batch in resumed]
    assert before == [0, 1, 2]
    assert after == [(3, 24), (4, 32), (5, 32), (6, 32), (7, 32)]


def test_collates() -> None:
    curriculum = SequenceCurriculum(**SMALL, total_steps=4)
    loader = DataLoader(Numbered(), batch_size=6, collate_fn=curriculum.collate(default_collate))
    assert [batch["labels"].shape for batch in loader] == [(6, 32), (6, 8), (6, 16), (6, 24)]
    loader = DataLoader(Numbered(), batch_size=6, collate_fn=curriculum.collate(), num_workers=1)
    with pytest.raises(
        CurriculumError, match="got a worker, which fetches batches before their step is known"
    ):
        next(iter(loader))


BATCHES = {
    "a tensor": (ids(), ids()[:, :8]),
    "a pair": ((ids(), ids() + 1), (ids()[:, :8], ids()[:, :8] + 1)),
    "a list": ([ids(), "text"], [ids()[:, :8], "text"]),
    "a named tuple": (Pair(ids(), ids()), Pair(ids()[:, :8], ids()[:, :8])),
    "a dataclass": (Sample(ids(), torch.ones(ROWS)), Sample(ids()[:, :8], torch.ones(ROWS))),
    "nested": (
        {"text": {"input_ids": ids(), "labels": ids()}, "image": torch.ones(ROWS, 5, 5), "names": ["a", "b"]},
        {
            "text": {"input_ids": ids()[:, :8], "labels": ids()[:, :8]},
            "image": torch.ones(ROWS, 5, 5),
            "names": ["a", "b"],
        },
    ),
    "masks": (
        {
            "input_ids": ids(),
            "attention_mask": torch.ones(ROWS, SIZE).bool(),
            "token_type_ids": ids(),
            "position_ids": torch.arange(SIZE).expand(3, ROWS, SIZE),
            "causal_mask": torch.ones(1, 1, SIZE, SIZE).tril(),
            "key_mask": torch.ones(ROWS, 1, 1, SIZE),
            "cache_position": torch.arange(SIZE),
            "weights": torch.ones(ROWS),
            "loss": torch.tensor(0.0),
        },
        {
            "input_ids": ids()[:, :8],
            "attention_mask": torch.ones(ROWS, 8).bool(),
            "token_type_ids": ids()[:, :8],
            "position_ids": torch.arange(8).expand(3, ROWS, 8),
            "causal_mask": torch.ones(1, 1, 8, 8).tril(),
            "key_mask": torch.ones(ROWS, 1, 1, 8),
            "cache_position": torch.arange(8),
            "weights": torch.ones(ROWS),
            "loss": torch.tensor(0.0),
        },
    ),
    "embeddings": (
        {"inputs_embeds": torch.ones(ROWS, SIZE, 5), "labels": ids()},
        {"inputs_embeds": torch.ones(ROWS, 8, 5), "labels": ids()[:, :8]},
    ),
    "as many rows as tokens": (
        {"input_ids": ids(SIZE), "labels": ids(SIZE)},
        {"input_ids": ids(SIZE)[:, :8], "labels": ids(SIZE)[:, :8]},
    ),
    "several classes of labels": (
        {"input_ids": ids(), "labels": torch.ones(ROWS, 5)},
        {"input_ids": ids()[:, :8], "labels": torch.ones(ROWS, 5)},
    ),
    "short already": ({"input_ids": ids(size=8)}, {"input_ids": ids(size=8)}),
    "short already, and unclear": (
        {"input_ids": ids(8, 8), "classes": torch.ones(8)},
        {"input_ids": ids(8, 8), "classes": torch.ones(8)},
    ),
    "no tokens": (
        {"input_ids": ids(size=0), "attention_mask": torch.ones(ROWS, 0)},
        {"input_ids": ids(size=0), "attention_mask": torch.ones(ROWS, 0)},
    ),
    "a mask for each kind of layer": (
        {"input_ids": ids(), "attention_mask": {"sliding_attention": torch.ones(ROWS, 1, SIZE, SIZE)}},
        {"input_ids": ids()[:, :8], "attention_mask": {"sliding_attention": torch.ones(ROWS, 1, 8, 8)}},
    ),
    "a mask that is added": (
        {
            "input_ids": ids(),
            "attention_mask": torch.tensor([0.0] * 20 + [-torch.inf] * 12).expand(ROWS, SIZE),
        },
        {"input_ids": ids()[:, :8], "attention_mask": torch.zeros(ROWS, 8)},
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_all_that_has_the_sequence_is_cut(name: str) -> None:
    batch, expected = BATCHES[name]
    found = cut(batch)
    assert type(found) is type(batch)
    given, wanted = ((vars(x) if name == "a dataclass" else x) for x in (found, expected))
    check(given, wanted)


def check(found: Any, expected: Any) -> None:
    """Compare containers of tensors and texts; tensors are in memory of their own order."""
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
        assert found.is_contiguous() or found is expected
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        for key in expected:
            check(found[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            check(*pair)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", [BatchEncoding, UserDict, lambda data: defaultdict(list, data)])
def test_mappings_keep_their_class(kind: Any) -> None:
    batch = kind({"input_ids": ids(), "labels": ids()})
    found = cut(batch)
    assert type(found) is type(batch)
    assert torch.equal(found["labels"], ids()[:, :8])
    assert torch.equal(batch["labels"], ids())  # the loader's own batch stays as it is


def test_tokens_behind_the_length_become_rows() -> None:
    batch = {
        "input_ids": ids(2, 24),
        "labels": ids(2, 24),
        "attention_mask": (torch.arange(24) < 20).expand(2, 24),
        "position_ids": torch.arange(24).expand(2, 24),
        "embeddings": ids(2, 24)[..., None].expand(2, 24, 3),
        "rate": torch.tensor(1.0),
    }
    found = cut(batch, max_length=24, reshape=True)
    assert torch.equal(found["input_ids"], ids(6, 8))
    assert torch.equal(found["labels"], ids(6, 8))
    assert found["attention_mask"].sum(1).tolist() == [8, 8, 4, 8, 8, 4]
    assert torch.equal(found["position_ids"], torch.arange(8).expand(6, 8))
    assert torch.equal(found["embeddings"][..., 0], ids(6, 8))
    assert all(tensor.is_contiguous() for tensor in found.values())


def test_the_rest_of_a_row_is_dropped() -> None:
    found = cut(ids(2, 28), max_length=28, reshape=True)
    assert torch.equal(found, torch.cat([ids(2, 28)[row, :24].view(3, 8) for row in range(2)]))


def test_positions_of_packed_documents_restart_where_they_did() -> None:
    positions = torch.tensor([[*range(11), *range(5)]])  # two documents
    found = cut({"input_ids": ids(1, 16), "position_ids": positions}, reshape=True)
    assert found["position_ids"].tolist() == [[*range(8)], [0, 1, 2, 0, 1, 2, 3, 4]]


def test_declared_dimensions_count() -> None:
    """The hidden size equals the length, layouts are time-first, or tensors must be left alone."""
    batch = {"input_ids": ids(), "hidden": torch.ones(ROWS, SIZE, SIZE), "first": torch.ones(SIZE, ROWS)}
    batch["table"] = torch.ones(ROWS, SIZE)
    found = cut(batch, dims={"hidden": 1, "first": (0,), "table": ()})
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {"input_ids": (3, 8), "hidden": (3, 8, 32), "first": (8, 3), "table": (3, 32)}
    x, y = cut((torch.ones(SIZE), ids(), torch.ones(SIZE, 7)), inputs=1, dims={0: [], 2: [0]})[1:]
    assert (x.shape, y.shape) == ((3, 8), (8, 7))


BAD_BATCHES = {
    "expected labels as long as the inputs [3, 32], got [3, 31]; give both the same length, or pass "
    "dims={'labels': ()} to leave labels alone": {"input_ids": ids(), "labels": ids()[:, 1:]},
    "expected 1 as long as the inputs [3, 32], got [3, 31]": (ids(), ids()[:, 1:]),
    "expected attention_mask as long": {"input_ids": ids(), "attention_mask": torch.ones(3, 40).bool()},
    "expected sequences of at most max_length=32, got input_ids [3, 40]; raise max_length, or truncate": {
        "input_ids": ids(3, 40)
    },
    "expected inputs of [batch, sequence] in the batch, got a SimpleNamespace": SimpleNamespace(
        input_ids=ids()
    ),
    "got a dict with {'pixel_values': [3, 3, 32, 32]}": {"pixel_values": torch.ones(3, 3, 32, 32)},
    "expected to tell the sequence dimension of pixel_values [3, 3, 32, 32] beside inputs of [3, 32], got 2 "
    "dimensions of 32; pass dims={'pixel_values': 1} with the dimension, or dims={'pixel_values': ()}": {
        "input_ids": ids(), "pixel_values": torch.ones(3, 3, 32, 32)
    },
    "expected to tell the sequence dimension of hidden": {"ids": ids(), "hidden": torch.ones(3, 32, 32)},
    "expected to tell the sequence dimension of classes": {"ids": ids(32), "classes": torch.ones(32)},
    "expected to tell the sequence dimension of time_first": {"ids": ids(), "time_first": torch.ones(32, 3)},
    "expected sequences whose lengths their shapes have, got cu_seqlens_q [4] with the uncut": {
        "input_ids": ids(), "cu_seqlens_q": torch.arange(4)
    },
    "got cu_seq_lens_k [4]": {"input_ids": ids(), "cu_seq_lens_k": torch.arange(4)},
    "got lengths [3]": {"input_ids": ids(), "lengths": torch.arange(3)},
    "expected padding at the end of rows to truncate, got attention_mask [3, 32] with padding at the start": {
        "input_ids": ids(), "attention_mask": (torch.arange(32) > 3).expand(3, 32)
    },
    "expected padded or packed tensors, got extra as a nested tensor": {
        "input_ids": ids(), "extra": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    },
    "expected padded or packed tensors, got input_ids as a nested tensor": {
        "input_ids": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    },
    "got edges as a sparse tensor; pad it, cut the samples before they are joined, or pass "
    "dims={'edges': ()} to leave it alone": {"input_ids": ids(), "edges": torch.eye(ROWS).to_sparse()},
    "expected loss_mask as long": {"input_ids": ids(), "loss_mask": torch.ones(3, 31)},
    "got seq_lens_q [3]": {"input_ids": ids(), "seq_lens_q": torch.arange(3)},
    "got input_lengths [3]": {"input_ids": ids(), "input_lengths": torch.arange(3)},
    "got num_tokens [3]": {"input_ids": ids(), "num_tokens": torch.arange(3)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_a_batch_that_is_not_clear_is_an_error(message: str) -> None:
    curriculum = SequenceCurriculum(**SMALL, total_steps=2, longest_first=False)
    before = curriculum.state_dict()
    with pytest.raises(CurriculumError) as error:
        curriculum.cut(BAD_BATCHES[message])
    assert message in str(error.value)
    assert curriculum.state_dict() == before


def test_declared_dimensions_that_a_tensor_does_not_have_are_an_error() -> None:
    curriculum = SequenceCurriculum(**SMALL, total_steps=2, longest_first=False, dims={"edges": (0,)})
    said = rf"expected dimension 0 of edges to have the {SIZE} tokens of the inputs, got \[2, 3\]; correct"
    with pytest.raises(CurriculumError, match=said):
        curriculum.cut({"input_ids": ids(), "edges": torch.ones(2, 3)})


@pytest.mark.parametrize(
    "other",
    [
        {"classes": torch.ones(ROWS)},
        {"position_ids": torch.arange(SIZE).expand(3, ROWS, SIZE)},
        {"position_ids": torch.arange(SIZE)[None]},
        {"mask": torch.ones(ROWS, 1, SIZE, SIZE)},
        {"cache_position": torch.arange(SIZE)},
    ],
    ids=str,
)
def test_batches_that_cannot_become_rows_are_an_error(other: dict[str, Tensor]) -> None:
    with pytest.raises(
        CurriculumError, match=r"expected tensors of \[batch, sequence, ...\] to reshape, got"
    ):
        cut({"input_ids": ids(), **other}, reshape=True)


BAD_ARGUMENTS: dict[str, dict[str, Any]] = {
    "expected either total_steps or total_tokens, got total_steps=None and total_tokens=None": {
        "total_steps": None
    },
    "got total_steps=5 and total_tokens=5": {"total_tokens": 5},
    "expected total_steps of at least 1, got 0": {"total_steps": 0},
    "expected total_steps of at least 1, got 2.5": {"total_steps": 2.5},
    "expected total_tokens of at least 1, got -1": {"total_steps": None, "total_tokens": -1},
    "expected min_length of at least one bucket of 64 tokens, got 8; pass bucket=8, or min_length=64": {
        "min_length": 8
    },
    "expected min_length to be a multiple of bucket=64, got 100; pass 64 or 128": {"min_length": 100},
    "expected min_length of at most max_length=1024, got 2048": {"min_length": 2048},
    "expected min_length of at most max_length=32, got 64": {"max_length": 32},
    "expected max_length of at least 1, got '1024'": {"max_length": "1024"},
    "expected bucket of at least 1, got 0": {"bucket": 0},
    "expected accumulation of at least 1, got 0": {"accumulation": 0},
    "expected ranks of at least 1, got 0": {"ranks": 0},
    "such as {0: 64, 1000: 256} for a discrete one, got 'liner'; did you mean 'linear'?": {
        "schedule": "liner"
    },
    "for a discrete one, got None": {"schedule": None},
    "for a discrete one, got array([64, 64])": {"schedule": numpy.array([64, 64])},
    "expected inputs to be a key or an index of a batch, got 1.5; pass the name": {"inputs": 1.5},
    "expected dims to map names to sequence dimensions, such as {'hidden': 1} or {'image': ()}, got 3": {
        "dims": 3
    },
    "got {'hidden': '1'}; pass an integer or a tuple of integers for each name": {"dims": {"hidden": "1"}},
    "expected a schedule that starts at 0, got {3: 64}": {"schedule": {3: 64}},
    "expected stages that start from 0 to 4, got 7": {"schedule": {0: 64, 7: 128}},
    "expected the length from 1 on of at least one bucket of 64 tokens, got 8": {"schedule": {0: 64, 1: 8}},
    "expected the length from 1 on to be a multiple of bucket=64, got 65": {"schedule": {0: 64, 1: 65}},
    "expected lengths of at most max_length=1024, got 2048 from 1 on": {"schedule": {0: 64, 1: 2048}},
    "expected no min_length beside a mapping of lengths, got 64": {"schedule": {0: 64}, "min_length": 64},
    "expected a loader, an iterable of batches, got a function": {"loader": default_collate},
}


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments_say_what_would_work(message: str) -> None:
    options: dict[str, Any] = {"max_length": 1024, "total_steps": 5} | BAD_ARGUMENTS[message]
    with pytest.raises(CurriculumError) as error:
        SequenceCurriculum(**options)
    assert message in str(error.value)


def test_a_misspelled_argument_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="'max_lenght'; did you mean 'max_length'"):
        SequenceCurriculum(max_lenght=1024, total_steps=5)


def test_without_a_loader_and_with_another_state() -> None:
    curriculum = SequenceCurriculum(max_length=1024, total_steps=5)
    with pytest.raises(CurriculumError, match="expected a loader to iterate over, got none"):
        next(iter(curriculum))
    with pytest.raises(CurriculumError, match=r"got one without tokens, batches, epoch_batches, length"):
        curriculum.load_state_dict({"step": 3})
    for wrong in (None, {"step": -1}, {"step": True}):
        with pytest.raises(CurriculumError, match="got one without step, tokens"):
            curriculum.load_state_dict(wrong)
    assert curriculum.step == 0
    with pytest.raises(
        AttributeError, match="a SequenceCurriculum without a loader has no attribute 'sampler'"
    ):
        _ = curriculum.sampler
    assert curriculum  # without a loader, it has no length


def test_resumes_with_another_accumulation_or_loader() -> None:
    def resumed(size: int, **state: int) -> SequenceCurriculum:
        curriculum = SequenceCurriculum([{"input_ids": ids()}] * size, **SMALL, total_steps=4, accumulation=2)
        curriculum.load_state_dict(curriculum.state_dict() | state)
        return curriculum

    assert lengths_of(resumed(4, step=1, batches=3, length=8)) == [8, 16, 16, 24]
    assert lengths_of(resumed(4, epoch_batches=4)) == []
    with pytest.raises(CurriculumError, match="expected an epoch of at least the 5 batches before the check"):
        lengths_of(resumed(4, epoch_batches=5))


def test_a_converted_model_trains_on_all_lengths() -> None:
    """With the losses of the original."""
    seed = torch.Generator().manual_seed(0)
    loader = [torch.randn(2, 24, WIDTH, generator=seed) for _ in range(6)]
    losses, model = [], seeded(Net, 1)
    for each in (model, te_transform.convert(model, loader[0], verify=False)):
        curriculum = SequenceCurriculum(loader, max_length=24, bucket=8, total_steps=4)
        losses.append([each(batch).item() for batch in curriculum])
    torch.testing.assert_close(losses[1], losses[0])
