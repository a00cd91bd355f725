"""Transformers that nobody wrote: put together of what people write, in all ways that it goes together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS, LONGEST = 32, 4, 40, 24
SIZE = WIDTH // HEADS


@dataclass(frozen=True)
class Drawn:
    """The parts of a drawn model. The defaults are those of GPT-2 without dropout."""

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
    dropouts: frozenset[str] = frozenset({"embed", "scores", "mlp"})  # where
    tied: bool = False
    shared: bool = False
    layers: int = 2
    branch: str | None = None  # what the forward asks for with `if`
    once: bool = False  # the model makes masks and rotary angles, not each layer for itself
    in_place: bool = False  # residuals are added, and masks filled, in the tensors that there are
    cache: str | None = None  # of keys and values: in which form it is passed in and returned
    checkpoints: str | None = None  # what the forward computes anew in the backward of a training
    queries: str | None = None  # what queries and keys are normed by: each head, or all of them
    cap: str | None = None  # what tanh() bounds: scores or logits
    sinks: bool = False  # each head has a score more, which is learned
    gated: bool = False  # what attention computed is gated by its input
    inner_norms: bool = False  # in front of the last linears of attention and MLP
    residual: str | None = None  # what is added is multiplied by a number, or by a learned one a channel
    transposed: bool = False  # linears have weights of [in, out], as GPT-2's
    outputs: str = "logits"  # beside them the states between the blocks, or the loss
    hook: str | None = None  # on the last norm's output, after the head: it reads a number or an attribute

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

    def empty_cache(self, batch: int, dtype: torch.dtype) -> Any:
        """Return the cache that the first call gets."""
        if self.cache == "room":
            return Room(batch, self.groups, self.layers + 1, dtype)
        return Growing() if self.cache == "object" else None


# Norms


class ByHand(nn.Module):
    """RMSNorm as people write it."""

    def __init__(self, how: str, size: int):
        super().__init__()
        self.how, self.size, self.eps = how, size, 1e-5
        self.weight = nn.Parameter(torch.zeros(size) if how == "one plus" else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in fp32":
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * wide.to(x.dtype)
        if self.how == "one plus":
            wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
            return (wide * (1.0 + self.weight.float())).type_as(x)
        if self.how == "by norm":
            return F.normalize(x, dim=-1) * math.sqrt(self.size) * self.weight
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * self.weight


class LayerByHand(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.gamma * (x - mean) / (variance + 1e-5).sqrt() + self.beta


NORMS = {
    "layer": nn.LayerNorm,
    "layer without bias": partial(nn.LayerNorm, bias=False),
    "layer without weights": partial(nn.LayerNorm, elementwise_affine=False),
    "layer by hand": LayerByHand,
    "rms": partial(nn.RMSNorm, eps=1e-6),
    "rms without eps": nn.RMSNorm,
    **{f"rms {how}": partial(ByHand, how) for how in ("by hand", "in fp32", "one plus", "by norm")},
    "none": nn.Identity,
}

# Linears


class Transposed(nn.Module):
    """x W + b, as GPT-2 has it."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.randn(in_features, out_features) / math.sqrt(3 * in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        flat = torch.addmm(self.bias, x.reshape(-1, self.in_features), self.weight)
        return flat.view(*x.shape[:-1], self.out_features)


def linear(drawn: Drawn, name: str, in_features: int, out_features: int) -> nn.Module:
    kind = Transposed if drawn.transposed else nn.Linear
    return kind(in_features, out_features, bias=name in drawn.biases)


# Activations, by names under which a pickle finds them


def gelu_by_hand(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def silu_by_hand(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def nothing(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "gelu by hand": gelu_by_hand,
    "gelu tanh by hand": gelu_tanh_by_hand,
    "quick gelu": quick_gelu,
    "silu": F.silu,
    "silu by hand": silu_by_hand,
    "relu": torch.relu,
    "squared relu": squared_relu,
    "mish": F.mish,
    "tanh": torch.tanh,
    "none": nothing,
}

# Positions


def angles_of(drawn: Drawn, x: Tensor, past: int) -> tuple[Tensor, Tensor] | None:
    """The cosines and sines of the positions in x [batch, length, width], as [length, size]."""
    if drawn.rotary is None:
        return None
    size = SIZE // 2 if drawn.rotary == "partial" else SIZE
    angles = torch.outer(torch.arange(past, past + x.shape[1]), 10000.0 ** (-torch.arange(0, size, 2) / size))
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


# Caches of keys and values [batch, groups, length, size], for each layer


class Growing:
    """Each call joins what it has to what there is."""

    def __init__(self, layers: Any = ()):
        self.layers = list(layers)

    def length(self, layer: int = 0) -> int:
        return self.layers[layer][0].shape[2] if layer < len(self.layers) else 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            before = self.layers[layer]
            self.layers[layer] = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        return self.layers[layer]


class Room:
    """There is room for all tokens, which calls write to."""

    def __init__(self, batch: int, groups: int, layers: int, dtype: torch.dtype):
        sizes = 2, batch, groups, LONGEST, SIZE
        self.layers, self.end = [torch.zeros(sizes, dtype=dtype) for _ in range(layers)], 0

    def length(self, layer: int = 0) -> int:
        return self.end

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        end = self.end + k.shape[2]
        keys[:, :, self.end : end] = k
        values[:, :, self.end : end] = v
        return keys[:, :, :end], values[:, :, :end]


# Masks: what is added to scores [batch, heads, length, all that there are], or which are kept


def hidden_of(name: str, length: int, past: int, padding: Tensor | None) -> Tensor | None:
    """True where a key is hidden."""
    order = torch.arange(past + length)
    later = order[None, :] > order[past:, None]
    if name == "padding":
        return None if padding is None else ~padding[:, None, None, :]
    if name == "padding and causal":
        return later if padding is None else later | ~padding[:, None, None, :]
    if name.startswith("window"):
        return later | (order[past:, None] - order[None, :] > 3)
    return later if name.startswith("causal") else None


def tables(drawn: Drawn, x: Tensor, past: int, padding: Tensor | None) -> tuple[Any, Any]:
    """Return what layers may share: hidden keys, and the cosines and sines of positions."""
    return hidden_of(drawn.mask, x.shape[1], past, padding), angles_of(drawn, x, past)


def offsets(length: int, past: int) -> Tensor:
    """Return the position of each key relative to each query, [length, number of keys]."""
    order = torch.arange(past + length)
    return order[None, :] - order[past:, None]


def slopes(length: int, past: int) -> Tensor:
    return offsets(length, past).clamp(max=0) * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(HEADS, 1, 1)


FILLS = {"-inf": float("-inf"), "lowest": None, "-1e4": -1e4}
MASKS = (
    "none", "causal flag", "causal bool", *(f"causal {fill}" for fill in FILLS), "causal buffer",
    "window bool", "window -inf", "padding", "padding and causal", "slopes", "learned",
)  # fmt: skip


def fill_of(drawn: Drawn, scores: Tensor) -> float:
    """Return the fill of hidden keys."""
    fill = next((value for name, value in FILLS.items() if drawn.mask.endswith(name)), float("-inf"))
    return torch.finfo(scores.dtype).min if fill is None else fill


DROPOUTS = "embed", "scores", "attention", "inner", "mlp", "path"


def dropout(drawn: Drawn, place: str) -> nn.Dropout:
    """Return the dropout at a position. "path" drops a whole residual branch of a sequence."""
    return nn.Dropout(drawn.dropout if place in drawn.dropouts else 0.0)


class Attention(nn.Module):
    """Self-attention over [batch, length, width]."""

    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn, groups = drawn, drawn.groups
        self.sizes = [WIDTH, groups * SIZE, groups * SIZE]
        if drawn.projections == "separate":
            for name, size in zip("qkv", self.sizes, strict=True):
                setattr(self, name, linear(drawn, name, WIDTH, size))
        else:
            self.qkv = linear(drawn, "q", WIDTH, sum(self.sizes))
        self.o = linear(drawn, "o", WIDTH, WIDTH)
        if drawn.queries is not None:
            sizes = (SIZE, SIZE) if drawn.queries == "each head" else self.sizes[:2]
            self.norm_q, self.norm_k = map(NORMS[drawn.norm], sizes)
        self.sinks = nn.Parameter(torch.zeros(HEADS)) if drawn.sinks else None
        self.gate = nn.Linear(WIDTH, WIDTH) if drawn.gated else None
        self.norm_o = NORMS[drawn.norm](WIDTH) if drawn.inner_norms else nn.Identity()
        self.distances = nn.Embedding(2 * LONGEST, HEADS) if drawn.mask == "learned" else None
        self.drop, self.drop_out = dropout(drawn, "scores"), dropout(drawn, "attention")
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
        if self.drawn.queries == "all":
            parts = self.norm_q(parts[0]), self.norm_k(parts[1]), parts[2]
        return [part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts]

    def forward(
        self, x: Tensor, padding: Tensor | None, shared: tuple[Any, Any] | None, cache: Any, layer: int
    ) -> Tensor:
        drawn = self.drawn
        q, k, v = self.heads(x)
        if drawn.queries == "each head":
            q, k = self.norm_q(q), self.norm_k(k)
        hidden, angles = shared or tables(drawn, x, 0 if cache is None else cache.length(layer), padding)
        if angles is not None:
            q, k = (turned(part, *angles, drawn.rotary) for part in (q, k))
        if cache is not None:
            k, v = cache.update(layer, k, v)
        if drawn.groups < HEADS and drawn.repeat != "enable_gqa":
            k, v = (self.repeated(part) for part in (k, v))
        scale = self.scaling
        if drawn.scale == "on queries":
            q, scale = q * scale, 1.0
        out = self.core(q, k, v, scale, hidden).transpose(1, 2).flatten(2)
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(x))
        return self.drop_out(self.o(self.norm_o(out)))

    def repeated(self, part: Tensor) -> Tensor:
        times = HEADS // self.drawn.groups
        if self.drawn.repeat == "expand":
            return part[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
        return part.repeat_interleave(times, dim=1)

    def core(self, q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
        drawn, length, past = self.drawn, q.shape[-2], k.shape[-2] - q.shape[-2]
        bias = slopes(length, past).to(q.dtype) if drawn.mask == "slopes" else None
        if self.distances is not None:
            bias = self.distances(offsets(length, past) + LONGEST).permute(2, 0, 1)
        if drawn.mask == "causal buffer":
            hidden = ~self.kept[:, :, past : past + length, : past + length]
        if drawn.spelling.startswith("sdpa"):
            how: dict[str, Any] = {"dropout_p": self.drop.p if self.training else 0.0, "scale": scale}
            if drawn.groups < HEADS and drawn.repeat == "enable_gqa":
                how["enable_gqa"] = True
            if drawn.mask == "causal flag":
                how["is_causal"] = not past  # calls with a past are of one token
            elif hidden is not None and (drawn.mask.endswith("bool") or "padding" in drawn.mask):
                how["attn_mask"] = ~hidden
            elif hidden is not None:
                zeros = torch.zeros(length, past + length, dtype=q.dtype)
                how["attn_mask"] = zeros.masked_fill(hidden, fill_of(drawn, q))
            elif bias is not None:
                how["attn_mask"] = bias[None]
            return F.scaled_dot_product_attention(q, k, v, **how)
        if drawn.spelling == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        if drawn.cap == "scores":
            scores = torch.tanh(scores / 5.0) * 5.0
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores = self.masked(scores, hidden, fill_of(drawn, scores))
        if self.sinks is not None:
            sinks = self.sinks.view(1, HEADS, 1, 1).expand(len(q), -1, length, 1)
            scores = torch.cat((scores, sinks), -1)
        if drawn.spelling == "in fp32":
            kept = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            kept = scores.softmax(-1)
        kept = self.drop(kept if self.sinks is None else kept[..., :-1])
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
        self.up = linear(drawn, "up", WIDTH, 2 * inner if packed else inner)
        if drawn.gate in ("first", "second"):
            self.gate = linear(drawn, "gate", WIDTH, inner)
        self.norm = NORMS[drawn.norm](inner) if drawn.inner_norms else nn.Identity()
        self.down = linear(drawn, "down", inner, WIDTH)
        self.act, self.drop = ACTIVATIONS[drawn.activation], dropout(drawn, "mlp")
        self.drop_inner = dropout(drawn, "inner")

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
        return self.drop(self.down(self.norm(self.drop_inner(inner))))


PLACEMENTS = ("pre", "post", "sandwich", "parallel", "parallel with two norms")


class Block(nn.Module):
    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn, self.attention, self.mlp = drawn, Attention(drawn), MLP(drawn)
        self.path = dropout(drawn, "path")
        norm = NORMS[drawn.norm]
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        if drawn.placement == "sandwich":
            self.norm3, self.norm4 = norm(WIDTH), norm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5)) if drawn.residual == "learned" else None

    def plus(self, x: Tensor, out: Tensor) -> Tensor:
        if self.training and self.path.p:
            out = out * self.path(out.new_ones(out.shape[0], 1, 1))
        if self.drawn.residual is not None:
            out = out * (0.7 if self.scale is None else self.scale)
        if self.drawn.in_place:
            out += x
            return out
        return x + out

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.drawn.checkpoints == "mlp" and self.training:
            return checkpoint(self.mlp, x, use_reentrant=False)
        return self.mlp(x)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        placement = self.drawn.placement
        if self.drawn.branch == "length" and x.shape[1] > 10:
            x = x + 0.5 * self.mlp(self.norm2(x))
        if placement == "post":
            x = self.norm1(self.plus(x, self.attention(x, *given)))
            return self.norm2(self.plus(x, self.feed_forward(x)))
        if placement == "sandwich":
            x = self.plus(x, self.norm3(self.attention(self.norm1(x), *given)))
            return self.plus(x, self.norm4(self.feed_forward(self.norm2(x))))
        if placement == "parallel":
            normed = self.norm1(x)
            return x + self.attention(normed, *given) + self.feed_forward(normed)
        if placement == "parallel with two norms":
            return x + self.attention(self.norm1(x), *given) + self.feed_forward(self.norm2(x))
        x = self.plus(x, self.attention(self.norm1(x), *given))
        return self.plus(x, self.feed_forward(self.norm2(x)))


HOOKS = "number", "attribute"


def doubled(grad: Tensor) -> Tensor:
    return grad * 2


BRANCHES = "length", "mode", "gradients", "values", "calls"


class Model(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, words]; with a cache (logits, cache), and where
    there is more to return a dictionary.

    The padding is of all tokens, also those that are in the cache.
    """

    def __init__(self, drawn: Drawn):
        super().__init__()
        self.drawn, self.calls, self.factor = drawn, 0, 0.5
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        first = Block(drawn)
        self.blocks = nn.ModuleList(
            first if drawn.shared or not layer else Block(drawn) for layer in range(drawn.layers)
        )
        self.norm, self.drop = NORMS[drawn.norm](WIDTH), dropout(drawn, "embed")
        self.head = nn.Linear(WIDTH, WORDS, bias="head" in drawn.biases)
        if drawn.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, padding: Tensor | None = None, cache: Any = None) -> Any:
        drawn, given = self.drawn, cache
        if drawn.cache == "tuples":
            cache = Growing(given or ())
        past = 0 if cache is None else cache.length()
        positions = torch.arange(past, past + ids.shape[1], device=ids.device)
        x = self.drop(self.embed(ids) + self.positions(positions))
        if self.scales(ids):
            x = x * 1.5
        shared = tables(drawn, x, past, padding) if drawn.once else None
        states = [x]
        for layer, block in enumerate(self.blocks):
            if (drawn.checkpoints or "").startswith("blocks") and self.training:
                again = drawn.checkpoints == "blocks, reentrant"
                x = checkpoint(block, x, padding, shared, cache, layer, use_reentrant=again)
            else:
                x = block(x, padding, shared, cache, layer)
            states.append(x)
        x = self.norm(x)
        logits = self.head(x)
        if drawn.hook is not None and x.requires_grad:
            x.register_hook(doubled if drawn.hook == "number" else lambda grad: grad * self.factor)
        if drawn.cap == "logits":
            logits = torch.tanh(logits / 5.0) * 5.0
        if drawn.outputs == "states":
            return {"logits": logits, **{f"state {n}": state for n, state in enumerate([*states, x])}}
        if drawn.outputs == "loss":
            targets = ids.flip(1) if padding is None else ids.flip(1).masked_fill(~padding, -100)
            loss = F.cross_entropy(logits.view(-1, WORDS).float(), targets.flatten())
            return {"logits": logits, "loss": loss.to(x.dtype)}
        if cache is None:
            return logits
        if drawn.cache == "room":
            cache.end = past + ids.shape[1]
        return logits, tuple(cache.layers) if drawn.cache == "tuples" else cache

    def scales(self, ids: Tensor) -> bool:
        """Return True if this call scales, by a mode, the values of ids, or state of the model."""
        branch = self.drawn.branch
        if branch == "calls":
            self.calls = 1 - self.calls
            return bool(self.calls)
        if branch == "values":
            return bool(ids.sum() % 2)
        return self.training if branch == "mode" else branch == "gradients" and torch.is_grad_enabled()
