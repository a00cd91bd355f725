"""Queries and keys that are turned by known angles: one kernel, where the backend has one."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits, plain
from tests import stand_in
from tests.rules.tables import HEADS, Make, Written, reasons, sites, written
from tests.zoo import seeded

te = stand_in.te  # a fixture

WIDTH = 8
Q = torch.randn(2, HEADS, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def angles(model: Written, x: Tensor) -> Tensor:
    """[length, width], in fp32"""
    length = torch.arange(x.shape[-2], dtype=torch.float32)
    return torch.outer(length, model.frequencies).repeat(1, 2)


def llama(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1))


def over_and_over(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    cos, sin = turns.cos().unsqueeze(1).to(x.dtype), turns.sin().unsqueeze(1).to(x.dtype)
    return turned(x, cos, sin) + turned(-x, cos, sin)


def rows(model: Written, x: Tensor) -> Tensor:
    turns = torch.stack([angles(model, x), 2 * angles(model, x)])
    return turned(x, turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1))


def computed_twice(model: Written, x: Tensor) -> Tensor:
    length = torch.arange(x.shape[-2], dtype=torch.float32)
    turns = (length[:, None] * model.frequencies)[None]
    cos, sin = torch.cat([turns, turns], -1).cos(), torch.cat([turns, turns], -1).sin()
    return turned(x, cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None])


def written_to(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    cos, sin = turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1)
    turns.mul_(2)
    return turned(x, cos, sin) + turns.sum().to(x.dtype)


def yarn(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, *((part * 1.5).to(x.dtype)[:, None] for part in (turns.cos(), turns.sin())))


def without_heads(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)
    return turned(x, turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def with_ones(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)
    return turned(x, turns.cos()[None].to(x.dtype)[None], turns.sin()[None].to(x.dtype)[None])


def frequencies() -> nn.Buffer:
    return nn.Buffer(10000.0 ** -torch.linspace(0, 1, WIDTH // 2))


def of(function) -> Make:
    return written(function, frequencies=frequencies)


def model_of(make: Make) -> Make:
    return lambda: nn.Sequential(make(), nn.Linear(WIDTH, WIDTH)).bfloat16()


FUSES = {
    "as Hugging Face does": (of(llama), 1),
    "twice": (of(over_and_over), 2),
    "each row in its own way": (of(rows), 1),
    "of angles that are computed twice": (of(computed_twice), 1),
    "of angles for all rows": (of(without_heads), 1),
    "of angles for all rows, with ones in front": (of(with_ones), 1),
    "by a factor, as in YaRN": (of(yarn), 1),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str, te: ModuleType) -> None:
    make, times = FUSES[name]
    model = seeded(model_of(make))
    model[0].frequencies.data = frequencies().data
    converted = te_transform.convert(model, Q, backend="te")
    te_transform.report(converted).expect(rotary=times)
    found, expected = converted(Q), model(Q)
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def flat(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x[:, 0], turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def each_head(model: Written, x: Tensor) -> Tensor:
    """By angles of its own, which only look like those of a batch."""
    turns = torch.stack([angles(model, x), 2 * angles(model, x)])
    return turned(x, turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def heads_last(model: Written, x: Tensor) -> Tensor:
    """Of as many tokens as there are heads."""
    x = x[:, :, :HEADS].transpose(1, 2)
    turns = angles(model, x)[None]
    return turned(x, turns.cos().to(x.dtype).unsqueeze(2), turns.sin().to(x.dtype).unsqueeze(2))


def in_fp32(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    y = turned(x.float(), turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1))
    return y.to(x.dtype)


def by_wide_cosines(model: Written, x: Tensor) -> Tensor:
    """As under autocast, where a product is in 16 bits and what it is multiplied with is not."""
    turns = angles(model, x)[None]
    return turned(x, turns.cos().unsqueeze(1), turns.sin().unsqueeze(1))


def of_two(model: Written, x: Tensor) -> Tensor:
    """Cosines and sines of other angles."""
    turns, others = angles(model, x)[None], angles(model, x.mT[..., :5, :])[None] * 2
    return turned(x, turns.cos().to(x.dtype).unsqueeze(1), others.sin().to(x.dtype).unsqueeze(1))


def shapes(turned: list[int], by: list[int]) -> str:
    return (
        f"queries of {turned} are turned by angles of {by}, [batch, heads, length, width] and [length, "
        "width] or [1, length, width] are needed: lay them out so"
    )


ANOTHER_DTYPE = (
    "the cosines are of another dtype than what they turn, the kernel rounds to that of the latter: cast "
    "cosines and sines to it"
)
REFUSES = {
    "three dimensions": (of(flat), shapes([2, 5, 8], [1, 5, 8])),
    "each head in its own way": (of(each_head), shapes([2, 2, 5, 8], [2, 5, 8])),
    "heads last": (of(heads_last), shapes([2, 2, 2, 8], [1, 2, 8])),
    "narrower cosines": (of(in_fp32), ANOTHER_DTYPE),
    "wider cosines": (of(by_wide_cosines), ANOTHER_DTYPE),
}


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    report = sites(model_of(make), Q, backend="te")
    assert reasons(report, "rotary") == {sentence}


def scaled(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, turns.cos()[:, None] * 1.5, turns.sin()[:, None] * 1.2).to(x.dtype)


def given(model: Written, x: Tensor) -> Tensor:
    return turned(x, model.cos[: x.shape[-2]], model.cos[: x.shape[-2]])


def in_pairs(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x).to(x.dtype)
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * turns.cos() + rotated * turns.sin()


@pytest.mark.parametrize("function", [scaled, given, in_pairs, of_two])
def test_other_rotations_stay(function) -> None:
    make = written(function, frequencies=frequencies, cos=lambda: nn.Buffer(torch.rand(9, WIDTH)))
    assert sites(model_of(make), Q, backend="te").counts == {"linear": 1}


def test_plain_pytorch_has_no_kernel_for_it() -> None:
    report = sites(model_of(of(llama)), Q, backend="torch")
    assert not any(site.rule == "rotary" for site in report.sites)


def test_angles_that_are_written_to_before_the_rotation_are_not_taken_instead(te: ModuleType) -> None:
    model = seeded(model_of(of(written_to)))
    model[0].frequencies.data = frequencies().data
    with limits.at_any_size, torch.no_grad():  # as where the kernel runs
        converted = te_transform.convert(model, Q, backend="te", verify=False)
        torch.testing.assert_close(converted(Q), model(Q), atol=0.02, rtol=0.02)


def test_a_cuda_graph_keeps_no_rotation() -> None:
    """It would be replayed with the one of the angles that it was recorded with."""
    turns = torch.arange(5.0).view(1, 5, 1).expand(1, 5, WIDTH).contiguous()
    op = plain.Rotary()
    with limits.replayed:
        recorded = op(Q, turns)
        assert not vars(turns)
    assert torch.equal(op(Q, turns), recorded)
    assert vars(turns)
    with limits.replayed:
        turns.data.mul_(2)  # as a replay's arguments are overwritten
        assert not torch.equal(op(Q, turns), recorded)
