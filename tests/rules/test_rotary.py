"""Queries and keys that are turned by known angles: one kernel, where the backend has one."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits, plain
from te_transform.backends.plain.rotary import ROTATIONS
from tests.rules.tables import HEADS, Make, Written, linear, reasons, sites, written
from tests.zoo import seeded

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
    turns.square_()
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


def heads_last(model: Written, x: Tensor) -> Tensor:
    """Rotate as many tokens as there are heads."""
    x = x[:, :, :HEADS].transpose(1, 2)
    turns = angles(model, x.transpose(1, 2))[None]
    return turned(x, turns.cos().to(x.dtype).unsqueeze(2), turns.sin().to(x.dtype).unsqueeze(2))


def indexed(model: Written, x: Tensor) -> Tensor:
    """Angles with two dimensions of one, which cosines and sines index each for themselves."""
    turns = angles(model, x)
    return turned(x, turns[None, None].cos().to(x.dtype), turns[None, None, :, :].sin().to(x.dtype))


def indexed_behind(model: Written, x: Tensor) -> Tensor:
    turns = torch.cat([angles(model, x)] * 2)
    n = x.shape[-2]
    return turned(x, turns[:n].cos()[None, None].to(x.dtype), turns[:n].sin().to(x.dtype)[None, None])


def taken_of_part(model: Written, x: Tensor) -> Tensor:
    turns, n = torch.cat([angles(model, x)] * 2), x.shape[-2]
    return turned(x, turns[None, :n].cos().to(x.dtype)[0], turns[None, :n].sin().to(x.dtype)[0])


def half(model: Written, x: Tensor) -> Tensor:
    """[length, half of the width]"""
    return torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), model.frequencies)


def halves(model: Written, x: Tensor) -> Tensor:
    """Rotate each half separately, as flash-attn and Gemma do."""
    turns = half(model, x)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def modded(model: Written, x: Tensor) -> Tensor:
    """Rotate in the opposite direction, [batch, length, heads, width] in fp32, as modded-nanogpt does."""
    turns = half(model, x)[None, :, None, :]
    cos, sin = turns.cos(), turns.sin()
    first, second = x.transpose(1, 2).float().chunk(2, -1)
    rotated = torch.cat((first * cos + second * sin, first * (-sin) + second * cos), -1)
    return rotated.type_as(x).transpose(1, 2)


def negated(model: Written, x: Tensor) -> Tensor:
    """The sums in another order, by a factor."""
    turns = half(model, x)[None]
    cos, sin = (part[:, None].to(x.dtype) for part in (turns.cos() * 1.5, turns.sin() * 1.5))
    first, second = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return torch.cat((-(second * sin) + cos * first, sin * first + second * cos), -1)


def partial(model: Written, x: Tensor) -> Tensor:
    """Rotate the first columns only, as GPT-NeoX, Phi and GLM do."""
    turns = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), model.frequencies[::2])
    turns = turns.repeat(1, 2)[None]
    cos, sin = turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1)
    return torch.cat((turned(x[..., : WIDTH // 2], cos, sin), x[..., WIDTH // 2 :]), -1)


def in_fp32_throughout(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x.float(), turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)).to(x.dtype)


def by_narrow_cosines(model: Written, x: Tensor) -> Tensor:
    """Rotate as Cohere does."""
    turns = angles(model, x)[None]
    y = turned(x.float(), turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1))
    return y.to(x.dtype)


def by_wide_cosines(model: Written, x: Tensor) -> Tensor:
    """Rotate as OLMo 2 does."""
    turns = angles(model, x)[None]
    return turned(x, turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)).to(x.dtype)


def next_to(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def gptj(model: Written, x: Tensor) -> Tensor:
    turns = half(model, x)
    cos, sin = (f(turns).repeat_interleave(2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + next_to(x) * sin


def gptj_in_part(model: Written, x: Tensor) -> Tensor:
    turns = half(model, x)[..., : WIDTH // 4].repeat_interleave(2, -1)
    cos, sin, some = turns.cos().to(x.dtype), turns.sin().to(x.dtype), x[..., : WIDTH // 2]
    return torch.cat((some * cos + next_to(some) * sin, x[..., WIDTH // 2 :]), -1)


def glm(model: Written, x: Tensor) -> Tensor:
    """Cosines and sines of halves, spread to neighbors; the neighbors come from unbind, as lucidrains' do."""
    turns = angles(model, x)[None]
    cos, sin = (f(turns).to(x.dtype).unsqueeze(1)[..., : WIDTH // 2] for f in (torch.cos, torch.sin))
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((-second, first), -1).flatten(-2)
    return x * cos.repeat_interleave(2, -1) + rotated * sin.repeat_interleave(2, -1)


def ernie(model: Written, x: Tensor) -> Tensor:
    """In fp32, but for the order of the columns."""
    turns = angles(model, x)[None]
    cos, sin = (f(turns).to(x.dtype).unsqueeze(1)[..., : WIDTH // 2] for f in (torch.cos, torch.sin))
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return (x.float() * cos + next_to(x).float() * sin).to(x.dtype)


def halves_in_fp32(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)
    cos, sin = turns.cos(), turns.sin()
    return (x.float() * cos + rotate_half(x).float() * sin).to(x.dtype)


def gpt_fast(model: Written, x: Tensor) -> Tensor:
    turns = half(model, x)
    cos, sin = turns.cos(), turns.sin()
    y = x.float().unflatten(-1, (-1, 2))
    first, second = y[..., 0], y[..., 1]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return rotated.flatten(-2).type_as(x)


def other_way(model: Written, x: Tensor) -> Tensor:
    turns = half(model, x)[None, None]
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos + second * sin, second * cos - first * sin), -1).flatten(-2)


def deepseek(model: Written, x: Tensor) -> Tensor:
    """Neighbors are rotated, and put half a head apart."""
    turns = angles(model, x)[None]
    cos, sin = (f(turns).to(x.dtype)[..., : WIDTH // 2].unsqueeze(1) for f in (torch.cos, torch.sin))
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def by_position(model: Written, x: Tensor) -> Tensor:
    """Angles of positions in time, height and width: [3, batch, length, half of the width]."""
    positions = torch.arange(x.shape[-2], dtype=torch.float32)
    places = torch.stack([positions, positions // 2, 5 - positions])[:, None, :, None].expand(
        -1, len(x), -1, -1
    )
    return places * model.frequencies


SECTIONS = [1, 2, 1]


def turned_by(x: Tensor, join: Callable[[Tensor], Tensor], turns: Tensor) -> Tensor:
    """Rotate halves of x by cosines and sines, scaled, and joined by `join`."""
    with torch.no_grad():
        cos, sin = (join(f(turns) * 1.5).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    return turned(x, cos, sin)


def sections(model: Written, x: Tensor) -> Tensor:
    """As Qwen 2 VL."""

    def join(part: Tensor) -> Tensor:
        columns = torch.cat([m[i % 3] for i, m in enumerate(part.split(SECTIONS, -1))], -1)
        return torch.cat((columns, columns), -1)

    return turned_by(x, join, by_position(model, x))


def doubled_sections(model: Written, x: Tensor) -> Tensor:
    """As Hunyuan."""

    def join(part: Tensor) -> Tensor:
        pieces = torch.cat((part, part), -1).split([2 * section for section in SECTIONS], -1)
        return torch.cat([m[i % 3] for i, m in enumerate(pieces)], -1)

    return turned_by(x, join, by_position(model, x))


def interleaved(part: Tensor) -> Tensor:
    """As Qwen 3 VL and Qwen 3.5."""
    first = part[0]
    for row, offset in enumerate((1, 2), start=1):
        first[..., slice(offset, 6, 3)] = part[row, ..., slice(offset, 6, 3)]
    return torch.cat((first, first), -1)


def interleaved_sections(model: Written, x: Tensor) -> Tensor:
    return turned_by(x, interleaved, by_position(model, x))


def ernie_vision(model: Written, x: Tensor) -> Tensor:
    """Height and width in turn, then time, each column twice."""

    def join(part: Tensor) -> Tensor:
        height, width, time = (m[(i + 1) % 3] for i, m in enumerate(part.split([1, 1, 2], -1)))
        return torch.cat([torch.stack([height, width], -1).flatten(-2), time], -1).repeat_interleave(2, -1)

    turns = by_position(model, x)
    cos, sin = (join(f(turns)).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + next_to(x) * sin


def twice_as_fast(model: Written, x: Tensor) -> Tensor:
    """Neighbors by angles that differ between the two."""
    turns = angles(model, x)
    return x * turns.cos().to(x.dtype) + next_to(x) * turns.sin().to(x.dtype)


def frequencies() -> nn.Buffer:
    return nn.Buffer(10000.0 ** -torch.linspace(0, 1, WIDTH // 2))


def of(function) -> Make:
    tables = {name: lambda: nn.Buffer(torch.rand(9, WIDTH)) for name in ("cos", "sin")}
    return written(function, frequencies=frequencies, **tables)


def model_of(make: Make) -> Make:
    return lambda: nn.Sequential(make(), nn.Linear(WIDTH, WIDTH)).bfloat16()


def cut_behind(model: Written, x: Tensor) -> Tensor:
    turns, n = torch.cat([angles(model, x)] * 2)[None], x.shape[-2]
    return turned(x, turns.cos()[:, :n].to(x.dtype).unsqueeze(1), turns.sin()[:, :n].to(x.dtype).unsqueeze(1))


FUSES = {
    "as Hugging Face does": (of(llama), 1),
    "twice": (of(over_and_over), 2),
    "each row in its own way": (of(rows), 1),
    "of angles that are computed twice": (of(computed_twice), 1),
    "of angles for all rows": (of(without_heads), 1),
    "of angles for all rows, with ones in front": (of(with_ones), 1),
    "by a factor, as in YaRN": (of(yarn), 1),
    "heads last": (of(heads_last), 1),
    "indexed in front of cosines and sines": (of(indexed), 1),
    "indexed behind cosines and sines": (of(indexed_behind), 1),
    "half by half": (of(halves), 1),
    "half by half, the other way, in fp32": (of(modded), 1),
    "half by half, by a factor": (of(negated), 1),
    "in fp32 by cosines in fp32": (of(in_fp32_throughout), 1),
    "the first columns alone": (of(partial), 1),
    "in fp32 by narrower cosines": (of(by_narrow_cosines), 1),
    "by wider cosines": (of(by_wide_cosines), 1),
    "neighbors, as GPT-J": (of(gptj), 1),
    "some neighbors": (of(gptj_in_part), 1),
    "neighbors, by cosines of halves": (of(glm), 1),
    "halves, cast later": (of(halves_in_fp32), 1),
    "neighbors, cast later": (of(ernie), 1),
    "neighbors, as gpt-fast": (of(gpt_fast), 1),
    "neighbors, the other way": (of(other_way), 1),
    "neighbors, by angles of their own": (of(twice_as_fast), 1),
    "cut behind cosines and sines": (of(cut_behind), 1),
    "sections of columns": (of(sections), 1),
    "sections of both halves": (of(doubled_sections), 1),
    "sections of neighbors": (of(ernie_vision), 1),
    "sections that are written to": (of(interleaved_sections), 1),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str, te: ModuleType) -> None:
    make, times = FUSES[name]
    model = seeded(model_of(make))
    model[0].frequencies.data = frequencies().data
    converted = te_transform.convert(model, Q, backend="te")
    te_transform.report(converted).expect(rotary=times)
    with limits.ignore_size_limits:  # as where the kernel runs
        found = outputs_and_gradients(converted, Q)
    torch.testing.assert_close(found, outputs_and_gradients(model, Q), atol=0.02, rtol=0.02)


def outputs_and_gradients(model: nn.Module, q: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and the weight."""
    q = q.detach().requires_grad_()
    out = model(q)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, (q, model[1].weight), weights)]


def flat(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x[:, 0], turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def each_head(model: Written, x: Tensor) -> Tensor:
    """By angles of its own, which only look like those of a batch."""
    turns = torch.stack([angles(model, x), 2 * angles(model, x)])
    return turned(x, turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def widened(model: Written, x: Tensor) -> Tensor:
    """Rotate by wide cosines, as under autocast: products are in 16 bits, and cosines are not."""
    turns = angles(model, x)[None]
    return turned(x, turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)) * 2


def of_two(model: Written, x: Tensor) -> Tensor:
    """Cosines and sines of other angles."""
    turns, others = angles(model, x)[None], angles(model, x.mT[..., :5, :])[None] * 2
    return turned(x, turns.cos().to(x.dtype).unsqueeze(1), others.sin().to(x.dtype).unsqueeze(1))


def shapes(turned: list[int], by: list[int]) -> str:
    return (
        f"queries of shape {turned} are rotated by angles of shape {by}, but the kernel needs [batch, "
        "heads, length, width] and [length, width] or [batch, length, width]: change their layout"
    )


def stored(model: Written, x: Tensor) -> Tensor:
    """Rotate by stored cosines and sines, as modded-nanogpt and nanochat do."""
    cos, sin = (part[None, : x.shape[-2], None, : WIDTH // 2] for part in (model.cos, model.sin))
    first, second = x.transpose(1, 2).chunk(2, -1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), 3).transpose(1, 2)


def looked_up(model: Written, x: Tensor) -> Tensor:
    """Rotate as older versions of transformers did."""
    positions = torch.arange(x.shape[-2])[None]
    return turned(x, model.cos[positions].unsqueeze(1), model.sin[positions].unsqueeze(1))


def stacked(model: Written, x: Tensor) -> Tensor:
    both = torch.stack((angles(model, x).cos(), angles(model, x).sin())).to(x.dtype)
    return turned(x, both[0], both[1])


def by_two_factors(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    cos, sin = turns.cos()[:, None] * 1.5, turns.sin()[:, None] * 1.2
    return turned(x, cos.to(x.dtype), sin.to(x.dtype))


def with_one_factor(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, (turns.cos() * 1.5).to(x.dtype)[:, None], turns.sin().to(x.dtype)[:, None])


def with_negated_cosines(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, -turns.cos().to(x.dtype)[:, None], turns.sin().to(x.dtype)[:, None])


def by_a_tensor(model: Written, x: Tensor) -> Tensor:
    turns, factor = angles(model, x)[None], model.frequencies[0]
    return turned(x, *((part * factor).to(x.dtype)[:, None] for part in (turns.cos(), turns.sin())))


def selected(model: Written, x: Tensor) -> Tensor:
    turns, positions = angles(model, x), torch.arange(x.shape[-2]).flip(0)
    return turned(x, *(part.index_select(0, positions).to(x.dtype) for part in (turns.cos(), turns.sin())))


def selected_in_front(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x).index_select(0, torch.arange(x.shape[-2]).flip(0))
    return turned(x, turns.cos().to(x.dtype), turns.sin().to(x.dtype))


def multiplied_later(model: Written, x: Tensor) -> Tensor:
    return llama(model, x) * model.frequencies[0]


def with_a_dimension_more(model: Written, x: Tensor) -> Tensor:
    return llama(model, x[:, :1])[:, 0]


WIDENED = (
    "a tensor in bfloat16 is rotated by cosines in float32, but the kernel rounds to the dtype of the "
    "rotated tensor: cast the result to that dtype"
)
STORED = (
    "the cosines and sines are stored, but the kernel reads angles: store the angles in float32, and take "
    "cos and sin of them in the forward"
)


def behind(names: str) -> str:
    return (
        f"the cosines and sines go through {names} before the rotation, but the kernel reads angles and one "
        "factor: apply these operations to the angles, before cos and sin"
    )


def multiplied(names: str) -> str:
    return (
        f"the cosines and sines go through {names} before the rotation, but the kernel multiplies both by "
        "one number: write one product with that number for each, or multiply the rotated tensor"
    )


ROTATED = (
    "queries or keys are rotated {}, but the kernel rotates two columns of a head, which are neighbors or "
    "half a head apart: {}"
)
STACK = "torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)"
COMPLEX = ROTATED.format(
    "as complex numbers", f"compute {STACK}, where x1 is x[..., ::2] and x2 is x[..., 1::2]"
)
ANOTHER_FORM = ROTATED.format(
    "in another form",
    f"compute x * cos + torch.cat((-x2, x1), -1) * sin for halves x1 and x2, {STACK} for neighbors",
)


def attends(turn: Callable[[Written, Tensor], Tensor]) -> Make:
    """Attention whose queries and keys [batch, heads, length, width] `turn` rotates."""

    def forward(model: Written, x: Tensor) -> Tensor:
        batch, length = x.shape[0], x.shape[2]
        x = x.transpose(1, 2).flatten(2)
        q, k, v = (
            part(x).view(batch, length, HEADS, WIDTH).transpose(1, 2) for part in (model.q, model.k, model.v)
        )
        return F.scaled_dot_product_attention(turn(model, q), turn(model, k), v, is_causal=True)

    parts = {name: linear(HEADS * WIDTH, HEADS * WIDTH) for name in "qkv"}
    tables = {"table": lambda: nn.Buffer(torch.linspace(-1, 1, 9 * WIDTH).view(9, WIDTH))}
    return written(forward, frequencies=frequencies, **tables, **parts)


def gptj_by_a_table(model: Written, x: Tensor) -> Tensor:
    sin, cos = model.table[torch.arange(x.shape[-2])].split(WIDTH // 2, -1)
    return x * cos.repeat_interleave(2, -1) + next_to(x) * sin.repeat_interleave(2, -1)


def polar(model: Written, x: Tensor) -> Tensor:
    """Rotate complex numbers, as Meta's Llama and Llama 4 of transformers do."""
    turns = torch.polar(torch.ones_like(half(model, x)), half(model, x))
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * turns).flatten(-2).type_as(x)


def by_matrices(model: Written, x: Tensor) -> Tensor:
    """Multiply each pair by a matrix [2, 2], as Flux does."""
    cos, sin = half(model, x).cos(), half(model, x).sin()
    turns = torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2))
    y = x.unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * y[..., 0] + turns[..., 1] * y[..., 1]).reshape(x.shape).type_as(x)


def filled_in(model: Written, x: Tensor) -> Tensor:
    cos, sin, rotated = half(model, x).cos(), half(model, x).sin(), torch.empty_like(x)
    rotated[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    rotated[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return rotated


def rolled(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x).to(x.dtype)
    signs = torch.tensor([-1.0, 1.0], dtype=x.dtype).repeat_interleave(WIDTH // 2)
    return x * turns.cos() + x.roll(WIDTH // 2, -1) * signs * turns.sin()


FORMS = {
    "neighbors, by matrices": by_matrices,
    "neighbors, written in place": filled_in,
    "neighbors to halves": deepseek,
    "halves, rolled": rolled,
}
REFUSES = {
    "complex numbers": (attends(polar), COMPLEX),
    **{name: (attends(turn), ANOTHER_FORM) for name, turn in FORMS.items()},
    "stored": (of(stored), STORED),
    "stored, for neighbors": (attends(gptj_by_a_table), STORED),
    "stored, looked up by positions": (of(looked_up), STORED),
    "stacked": (
        of(stacked),
        "the cosines come from stack and the sines from stack, but the kernel computes them from angles: "
        "take torch.cos and torch.sin of the angles",
    ),
    "by two factors": (of(by_two_factors), multiplied("mul")),
    "cosines times a factor": (of(with_one_factor), multiplied("mul")),
    "negated cosines": (of(with_negated_cosines), multiplied("neg")),
    "by a tensor": (of(by_a_tensor), multiplied("mul")),
    "selected by positions": (of(selected), behind("index_select")),
    "of two tensors": (
        of(of_two),
        "cosines and sines are taken of two tensors, but the kernel reads one: assign the angles to one "
        "variable, and take cos and sin of it",
    ),
    "written to in between": (
        of(written_to),
        "the angles are written to in place, but the kernel reads them at the rotation: write to a new "
        "tensor instead",
    ),
    "three dimensions": (of(flat), shapes([2, 5, 8], [1, 5, 8])),
    "each head in its own way": (of(each_head), shapes([2, 2, 5, 8], [2, 5, 8])),
    "a wider result": (of(widened), WIDENED),
}


def of_stored_angles(model: Written, x: Tensor) -> Tensor:
    cos, sin = (f(model.frequencies[None, : x.shape[-2], None]).to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.transpose(1, 2).chunk(2, -1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), 3).transpose(1, 2)


def written_anew(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    rotated = turned(x, turns.cos().to(x.dtype).unsqueeze(1), turns.sin().to(x.dtype).unsqueeze(1))
    return rotated + (turns * 2).sum().to(x.dtype)


FOLLOWED = {  # what the sentences advise
    "store the angles": written(of_stored_angles, frequencies=lambda: nn.Buffer(torch.rand(9, WIDTH // 2))),
    "take torch.cos and torch.sin of the angles": of(without_heads),
    "apply these operations to the angles": of(selected_in_front),
    "assign the angles to one variable": of(llama),
    "write one product with that number for each": of(yarn),
    "multiply the rotated tensor": of(multiplied_later),
    "write to a new tensor instead": of(written_anew),
    "change their layout": of(with_a_dimension_more),
    "cast the result to that dtype": of(by_wide_cosines),
    "compute torch.stack": of(gpt_fast),
    "compute x * cos + torch.cat((-x2, x1), -1) * sin": of(llama),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str, te: ModuleType) -> None:
    converted = te_transform.convert(seeded(model_of(FOLLOWED[name])).float(), Q.float(), backend="te")
    te_transform.report(converted).expect(rotary=1)
    assert not te_transform.report(converted).refused


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    report = sites(model_of(make), Q, backend="te")
    assert reasons(report, "rotary") == {sentence}


def not_rotated(model: Written, x: Tensor) -> Tensor:
    """By numbers of positions and columns that are no angles: a mask of padding, a learned scale, a norm."""
    padding = (torch.arange(x.shape[-2]) < 3).to(x.dtype)[:, None]
    return F.rms_norm(x, (WIDTH,)) * model.scale * padding * 0.5


def test_queries_that_are_scaled_are_not_rotated() -> None:
    model = seeded(attends(not_rotated))
    model.scale = nn.Parameter(torch.ones(1, WIDTH))
    assert not reasons(te_transform.inspect(model, Q.float(), backend="te"), "rotary")


def scaled(model: Written, x: Tensor) -> Tensor:
    turns = angles(model, x)[None]
    return turned(x, turns.cos()[:, None] * 1.5, turns.sin()[:, None] * 1.2).to(x.dtype)


def given(model: Written, x: Tensor) -> Tensor:
    return turned(x, model.cos[: x.shape[-2]], model.cos[: x.shape[-2]])


@pytest.mark.parametrize("function", [scaled, given, of_two])
def test_other_rotations_stay(function) -> None:
    make = written(function, frequencies=frequencies, cos=lambda: nn.Buffer(torch.rand(9, WIDTH)))
    assert sites(model_of(make), Q, backend="te").counts == {"linear": 1}


def test_plain_pytorch_has_no_kernel_for_it() -> None:
    report = sites(model_of(of(llama)), Q, backend="torch")
    assert not any(site.rule == "rotary" for site in report.sites)


def test_angles_that_are_written_to_before_the_rotation_are_not_taken_instead(te: ModuleType) -> None:
    model = seeded(model_of(of(written_to)))
    model[0].frequencies.data = frequencies().data
    with limits.ignore_size_limits, torch.no_grad():  # as where the kernel runs
        converted = te_transform.convert(model, Q, backend="te", verify=False)
        torch.testing.assert_close(converted(Q), model(Q), atol=0.02, rtol=0.02)


def test_cached_rotations_are_not_recorded() -> None:
    """A replay would use the angles of the recording."""
    turns = torch.arange(5.0).view(1, 5, 1).expand(1, 5, WIDTH).contiguous()
    op = plain.Rotary()
    with limits.replayed:
        recorded = op(Q, turns)
        assert ROTATIONS.get(turns) is None
    assert torch.equal(op(Q, turns), recorded)
    assert ROTATIONS.get(turns) is not None
    with limits.replayed:
        turns.data.mul_(2)  # as a replay's arguments are overwritten
        assert not torch.equal(op(Q, turns), recorded)
