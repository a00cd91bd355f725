"""Models as other packages write them: what an expert would fuse is fused, whoever's forward it is in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.models import mingpt, nanochat, tiny, whisper, xtransformers
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")


class Together(nn.Module):
    """Attention and MLP in the forward of one module."""

    def __init__(self):
        super().__init__()
        self.block = tiny.Block()

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp, y = self.block.attention, self.block.mlp, self.block.norm1(x)
        y = F.scaled_dot_product_attention(attention.q_proj(y), attention.k_proj(y), attention.v_proj(y))
        x = x + attention.out_proj(y)
        return x + mlp.fc2(mlp.act(mlp.fc1(self.block.norm2(x))))


class FlatBlock(nn.Module):
    """fc1 and fc2 are the block's own, as in OPT and BART."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(tiny.WIDTH), tiny.Attention()
        self.norm2 = nn.LayerNorm(tiny.WIDTH)
        self.fc1, self.fc2 = nn.Linear(tiny.WIDTH, 2 * tiny.WIDTH), nn.Linear(2 * tiny.WIDTH, tiny.WIDTH)
        self.activation_fn = F.relu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.activation_fn(self.fc1(self.norm2(x))))


class Twice(nn.Module):
    """One block for two layers, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.block = tiny.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Renamed(nn.Module):
    """Whose forward calls its module by another name than self."""

    def __init__(self):
        super().__init__()
        self.block = tiny.Block()

    def forward(this, x: Tensor) -> Tensor:
        return this.block(x)


def ids(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {"idx": torch.randint(0, mingpt.VOCAB, (2, length), generator=generator)}


def hidden(length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, length, tiny.WIDTH, generator=torch.Generator().manual_seed(length))}


def speech(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    mel = torch.randn(2, whisper.MELS, 2 * whisper.FRAMES, generator=generator)
    return {"mel": mel, "tokens": ids(length)["idx"]}


def padded(length: int) -> dict[str, Tensor]:
    mask = torch.arange(length) < torch.tensor([[length], [length - 3]])
    return {"x": ids(length)["idx"], "mask": mask}


@dataclass(frozen=True)
class Style:
    """A model, what it is called with at a length, and the fused sites by rule."""

    build: Callable[[], nn.Module]
    sample: Callable[[int], dict[str, Tensor]]
    counts: dict[str, int]


def style(build: Callable[[], nn.Module], sample: Callable[[int], dict[str, Tensor]], **counts: int) -> Style:
    return Style(partial(seeded, build), sample, counts)


# Whisper's key has no bias, for which zeros stand. layernorm_linear has q, k and v of self-attention (2), the
# query of cross attention, its keys and values, and the head, which is the embedding.
_WHISPER = {"merge_siblings": 3, "layernorm_linear": 5, "layernorm_mlp": 2, "linear": 3}
_BLOCK = {"merge_siblings": 1, "layernorm_mlp": 1, "layernorm_linear": 1, "linear": 1}
STYLES = {
    "minGPT": style(mingpt.MinGPT, ids, attention=1, layernorm_mlp=1, layernorm_linear=2, linear=1),
    "whisper": style(whisper.Whisper, speech, **_WHISPER),
    "whisper, written out": style(partial(whisper.Whisper, use_sdpa=False), speech, attention=3, **_WHISPER),
    "nanochat": style(
        nanochat.NanoChat, ids, merge_siblings=1, layernorm_mlp=1, layernorm_linear=2, linear=1
    ),
    "x-transformers": style(
        xtransformers.XTransformer, padded, attention=1, **_BLOCK | {"layernorm_linear": 2}
    ),
    "attention and MLP in one forward": style(Together, hidden, **_BLOCK),
    "fc1 and fc2 in the block": style(FlatBlock, hidden, **_BLOCK),
    "a block called twice": style(Twice, hidden, **dict.fromkeys(_BLOCK, 2)),  # a site for each call
    "self by another name": style(Renamed, hidden, **_BLOCK),
}
every_style = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in STYLES]
)


# nanoGPT writes attention out too (test_models_numbers.py), and the package itself is in test_families.py
LATER = {name: [pytest.mark.integration] for name in ("whisper, written out", "x-transformers", "minGPT")}


@cache
def converted(name: str) -> nn.Module:
    """Converted in place, which the lambda of minGPT needs, and verified."""
    return te_transform.convert(STYLES[name].build(), STYLES[name].sample(10), inplace=True)


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    out = model(**inputs)
    out.square().mean().backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def close(actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@every_style
def test_fuses_what_an_expert_would(name: str):
    report = te_transform.report(converted(name))
    assert report.counts == STYLES[name].counts
    assert {site.path for site in report.sites} <= {path for path, _ in converted(name).named_modules()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.xdist_group(name), *LATER.get(name, ())]) for name in STYLES],
)
def test_answers_as_the_original(name: str):
    style, model = STYLES[name], converted(name)
    original = style.build()
    for length, training in ((10, True), (7, True), (7, False)):
        expected = gradients(original.train(training), style.sample(length))
        close(gradients(model.train(training), style.sample(length)), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("minGPT", "x-transformers")]
)
@pytest.mark.integration  # as their conversions are
@pytest.mark.usefixtures("as_given")
def test_verifies(name: str):
    assert te_transform.verify(STYLES[name].build(), converted(name), STYLES[name].sample(9))


def test_a_copy_whose_lambda_reads_the_originals_modules_is_refused():
    model, expected = STYLES["minGPT"].build(), STYLES["minGPT"].build().state_dict()
    with pytest.raises(te_transform.ModelError, match="pass inplace=True"):
        te_transform.convert(model, ids(10))
    assert type(model) is mingpt.MinGPT
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.xdist_group("whisper")
def test_activations_in_another_dtype_than_the_weights():
    model, original = converted("whisper"), STYLES["whisper"].build()
    inputs = speech(10)
    inputs["mel"] = inputs["mel"].bfloat16()
    close(gradients(model, inputs), gradients(original, inputs), rtol=5e-2, atol=5e-2)


@pytest.mark.xdist_group("x-transformers")
def test_objects_beside_the_result_are_returned():
    """Objects that a forward makes, among tensors of the graph."""
    model, original = converted("x-transformers"), STYLES["x-transformers"].build()
    logits, kept = model(**padded(10), return_intermediates=True)
    expected, others = original(**padded(10), return_intermediates=True)
    close(logits, expected)
    assert [type(one) for one in kept] == [xtransformers.Intermediates] * xtransformers.DEPTH
    for one, other in zip(kept, others, strict=True):
        close(one.qk_similarities, other.qk_similarities)
        close((one.values, *one.cached_kv), (other.values, *other.cached_kv))
