"""Transformers that nobody wrote: put together of what people write, in all ways that it goes together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LONGEST = 32, 4, 40, 24
SIZE = WIDTH // HEADS


@dataclass(frozen=True)
class Drawn:
    """What a model is made of; the defaults are GPT-2's, but for dropout."""

    norm: str = "layer"
    placement: str = "pre"
    groups: int = HEADS
    projections: str = "separate"
    biases: frozenset[str] = frozenset({"q", "k", "v", "o", "up", "down"})
    spelling: str = "sdpa"
    repeat: str = "repeat_interleave"
    mask: str = "causal flag"
    rotary: str | None = None
    scale: str | None = None
    activation: str = "gelu tanh"
    gate: str | None = None
    dropout: float = 0.0
    tied: bool = False
    shared: bool = False
    layers: int = 2
    branches: bool = False
    once: bool = False  # the model makes masks and rotary angles, not each layer for itself
    in_place: bool = False  # residuals are added, and masks filled, in the tensors that there are

    def build(self) -> nn.Module:
        """The model, always of the same weights."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = Model(self)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.dim() == 1:  # norms and biases that do something
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    elif "embed" in name:
                        parameter.normal_()
        return model


# Norms


class ByHand(nn.Module):
    """RMSNorm as people write it."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.eps = how, 1e-5
        self.weight = nn.Parameter(torch.zeros(WIDTH) if how == "one plus" else torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in fp32":
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * wide.to(x.dtype)
        if self.how == "one plus":
            wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            return (wide * (1.0 + self.weight.float())).type_as(x)
        if self.how == "by norm":
            return F.normalize(x, dim=-1) * math.sqrt(WIDTH) * self.weight
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * self.weight


class LayerByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * (x - mean) / (variance + 1e-5).sqrt() + self.beta


NORMS = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer without weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "layer by hand": LayerByHand,
    "rms": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "rms without eps": lambda: nn.RMSNorm(WIDTH),
    **{f"rms {how}": lambda how=how: ByHand(how) for how in ("by hand", "in fp32", "one plus", "by norm")},
    "none": nn.Identity,
}

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by hand": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu tanh by hand": lambda x: (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "relu": torch.relu,
    "squared relu": lambda x: F.relu(x).square(),
    "mish": F.mish,
    "tanh": torch.tanh,
    "none": lambda x: x,
}

# Positions


def angles_of(drawn: Drawn, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines of the positions in x [batch, length, width], as [length, size]."""
    if drawn.rotary is None:
        return None
    size = SIZE // 2 if drawn.rotary == "partial" else SIZE
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, size, 2) / size))
    angles = angles.to(torch.float32)
    if drawn.rotary != "interleaved":
        angles = torch.cat((angles, angles), -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, how: str) -> Tensor:
    """Rotary embedding of [batch, heads, length, size]."""
    if how == "interleaved":
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    half = torch.cat((-part[..., size // 2 :], part[..., : size // 2]), -1)
    return torch.cat((part * cos + half * sin, rest), -1)


# Masks: what is added to scores [batch, heads, length, length], or which are kept


def hidden_of(name: str, length: int, padding: Tensor | None) -> Tensor | None:
    """True where a key is hidden."""
    order = torch.arange(length)
    later = order[None, :] > order[:, None]
    if name == "padding":
        return None if padding is None else ~padding[:, None, None, :]
    if name == "padding and causal":
        return later if padding is None else later | ~padding[:, None, None, :]
    if name.startswith("window"):
        return later | (order[:, None] - order[None, :] > 3)
    return later if name.startswith("causal") else None


def tables(drawn: Drawn, x: Tensor, padding: Tensor | None) -> tuple[Any, Any]:
    """What layers may share: which keys are hidden, and the cosines and sines of the positions."""
    return hidden_of(drawn.mask, x.shape[1], padding), angles_of(drawn, x)


def slopes(length: int) -> Tensor:
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    return distance.clamp(max=0) * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(HEADS, 1, 1)


FILLS = {"-inf": float("-inf"), "lowest": None, "-1e4": -1e4}
MASKS = (
    "none", "causal flag", "causal bool", *(f"causal {fill}" for fill in FILLS), "causal buffer",
    "window bool", "window -inf", "padding", "padding and causal", "slopes",
)  # fmt: skip


def fill_of(drawn: Drawn, scores: Tensor) -> float:
    """What stands at hidden keys."""
    fill = next((value for name, value in FILLS.items() if drawn.mask.endswith(name)), float("-inf"))
    return torch.finfo(scores.dtype).min if fill is None else fill


class Attention(nn.Module):
    """Self-attention over [batch, length, width]."""

    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn, groups = drawn, drawn.groups
        self.sizes = [WIDTH, groups * SIZE, groups * SIZE]
        if drawn.projections == "separate":
            for name, size in zip("qkv", self.sizes, strict=True):
                setattr(self, name, nn.Linear(WIDTH, size, bias=name in drawn.biases))
        else:
            self.qkv = nn.Linear(WIDTH, sum(self.sizes), bias="q" in drawn.biases)
        self.o = nn.Linear(WIDTH, WIDTH, bias="o" in drawn.biases)
        self.drop, self.p = nn.Dropout(drawn.dropout), drawn.dropout
        self.register_buffer("kept", torch.ones(LONGEST, LONGEST).tril().bool().view(1, 1, LONGEST, LONGEST))
        self.scaling = {None: SIZE**-0.5, "another": 0.3, "on queries": SIZE**-0.5, "none": 1.0}[drawn.scale]

    def heads(self, x: Tensor) -> list[Tensor]:
        if self.drawn.projections == "separate":
            parts = [getattr(self, name)(x) for name in "qkv"]
        elif self.drawn.projections == "packed by head":
            whole = self.qkv(x).unflatten(-1, (HEADS, 3, SIZE))
            return [whole[..., part, :].transpose(1, 2) for part in range(3)]
        else:
            parts = self.qkv(x).split(self.sizes, -1)
        return [part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts]

    def forward(self, x: Tensor, padding: Tensor | None, shared: tuple[Any, Any] | None) -> Tensor:
        drawn = self.drawn
        q, k, v = self.heads(x)
        hidden, angles = shared or tables(drawn, x, padding)
        if angles is not None:
            q, k = (turned(part, *angles, drawn.rotary) for part in (q, k))
        if drawn.groups < HEADS and drawn.repeat != "enable_gqa":
            k, v = (self.repeated(part) for part in (k, v))
        scale = self.scaling
        if drawn.scale == "on queries":
            q, scale = q * scale, 1.0
        out = self.core(q, k, v, scale, hidden)
        return self.o(out.transpose(1, 2).flatten(2))

    def repeated(self, part: Tensor) -> Tensor:
        times = HEADS // self.drawn.groups
        if self.drawn.repeat == "expand":
            return part[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
        return part.repeat_interleave(times, dim=1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        drawn, length = self.drawn, q.shape[-2]
        bias = slopes(length).to(q.dtype) if drawn.mask == "slopes" else None
        if drawn.mask == "causal buffer":
            hidden = ~self.kept[:, :, :length, :length]
        if drawn.spelling.startswith("sdpa"):
            how: dict[str, Any] = {"dropout_p": self.p if self.training else 0.0, "scale": scale}
            if drawn.groups < HEADS and drawn.repeat == "enable_gqa":
                how["enable_gqa"] = True
            if drawn.mask == "causal flag":
                how["is_causal"] = True
            elif hidden is not None and (drawn.mask.endswith("bool") or "padding" in drawn.mask):
                how["attn_mask"] = ~hidden
            elif hidden is not None:
                zeros = torch.zeros(length, length, dtype=q.dtype)
                how["attn_mask"] = zeros.masked_fill(hidden, fill_of(drawn, q))
            elif bias is not None:
                how["attn_mask"] = bias[None]
            return F.scaled_dot_product_attention(q, k, v, **how)
        if drawn.spelling == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = self.masked(scores, hidden, fill_of(drawn, scores))
        if drawn.spelling == "in fp32":
            kept = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            kept = scores.softmax(-1)
        kept = self.drop(kept)
        return torch.einsum("bhqk,bhkd->bhqd", kept, v) if drawn.spelling == "einsum" else kept @ v

    def masked(self, scores: Tensor, hidden: Tensor, fill: float) -> Tensor:
        if self.drawn.spelling == "added":
            return scores + torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill(hidden, fill)
        if self.drawn.spelling == "where":
            return torch.where(hidden, torch.tensor(fill, dtype=scores.dtype), scores)
        return scores.masked_fill_(hidden, fill) if self.drawn.in_place else scores.masked_fill(hidden, fill)


SPELLINGS = ("sdpa", "matmul", "einsum", "added", "where", "in fp32")


class MLP(nn.Module):
    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn, inner = drawn, 48
        packed = (drawn.gate or "").startswith("packed")
        self.up = nn.Linear(WIDTH, 2 * inner if packed else inner, bias="up" in drawn.biases)
        if drawn.gate in ("first", "second"):
            self.gate = nn.Linear(WIDTH, inner, bias="gate" in drawn.biases)
        self.down = nn.Linear(inner, WIDTH, bias="down" in drawn.biases)
        self.act, self.drop = ACTIVATIONS[drawn.activation], nn.Dropout(drawn.dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.drawn.gate
        if gate is None:
            inner = self.act(self.up(x))
        elif gate.startswith("packed"):
            first, second = self.up(x).chunk(2, dim=-1)
            inner = self.act(first) * second if gate == "packed first" else first * self.act(second)
        else:
            both = self.act(self.gate(x)), self.up(x)
            inner = both[0] * both[1] if gate == "first" else both[1] * both[0]
        return self.drop(self.down(inner))


PLACEMENTS = ("pre", "post", "sandwich", "parallel", "parallel with two norms")


class Block(nn.Module):
    def __init__(self, drawn: Drawn):
        super().__init__()
        self.placement, self.branches, self.in_place = drawn.placement, drawn.branches, drawn.in_place
        self.attention, self.mlp = Attention(drawn), MLP(drawn)
        self.norm1, self.norm2 = NORMS[drawn.norm](), NORMS[drawn.norm]()
        if drawn.placement == "sandwich":
            self.norm3, self.norm4 = NORMS[drawn.norm](), NORMS[drawn.norm]()

    def plus(self, x: Tensor, out: Tensor) -> Tensor:
        if self.in_place:
            out += x
            return out
        return x + out

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        if self.branches and x.shape[1] > 10:
            x = x + 0.5 * self.mlp(self.norm2(x))
        if self.placement == "post":
            x = self.norm1(self.plus(x, self.attention(x, *given)))
            return self.norm2(self.plus(x, self.mlp(x)))
        if self.placement == "sandwich":
            x = self.plus(x, self.norm3(self.attention(self.norm1(x), *given)))
            return self.plus(x, self.norm4(self.mlp(self.norm2(x))))
        if self.placement == "parallel":
            normed = self.norm1(x)
            return x + self.attention(normed, *given) + self.mlp(normed)
        if self.placement == "parallel with two norms":
            return x + self.attention(self.norm1(x), *given) + self.mlp(self.norm2(x))
        x = self.plus(x, self.attention(self.norm1(x), *given))
        return self.plus(x, self.mlp(self.norm2(x)))


class Model(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, words]."""

    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn = drawn
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        first = Block(drawn)
        self.blocks = nn.ModuleList(
            first if drawn.shared or not layer else Block(drawn) for layer in range(drawn.layers)
        )
        self.norm, self.drop = NORMS[drawn.norm](), nn.Dropout(drawn.dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias="head" in drawn.biases)
        if drawn.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        shared = tables(self.drawn, x, padding) if self.drawn.once else None
        for block in self.blocks:
            x = block(x, padding, shared)
        return self.head(self.norm(x))
