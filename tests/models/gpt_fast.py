"""A decoder in the style of gpt-fast: one product for q, k and v, rotated pairs, a mask that is a buffer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.meta_llama import FeedForward

WIDTH, HEADS, KV_HEADS, LENGTH, VOCAB, LAYERS = 64, 4, 2, 64, 99, 2
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps, self.weight = 1e-5, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [batch, length, heads, HEAD], angles [length, HEAD / 2, 2]: the cosine and sine of each pair."""
    pairs, angles = x.float().reshape(*x.shape[:-1], -1, 2), angles.view(1, x.size(1), 1, -1, 2)
    turned = torch.stack(
        [
            pairs[..., 0] * angles[..., 0] - pairs[..., 1] * angles[..., 1],
            pairs[..., 1] * angles[..., 0] + pairs[..., 0] * angles[..., 1],
        ],
        -1,
    )
    return turned.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        width = KV_HEADS * HEAD
        q, k, v = self.wqkv(x).split([WIDTH, width, width], dim=-1)
        q = rotated(q.view(batch, length, HEADS, HEAD), angles)
        k = rotated(k.view(batch, length, KV_HEADS, HEAD), angles)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v.view(batch, length, KV_HEADS, HEAD)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.wo(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.ffn_norm, self.attention_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class GPTFast(nn.Module):
    """`idx` are [batch, length]; gives the logits."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)
        turns = torch.outer(torch.arange(LENGTH), 1.0 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("freqs_cis", torch.stack([turns.cos(), turns.sin()], -1), persistent=False)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.register_buffer("causal_mask", causal, persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.size(1), device=idx.device)
        mask = self.causal_mask[None, None, positions, : idx.size(1)]
        x, angles = self.tok_embeddings(idx), self.freqs_cis[positions]
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.output(self.norm(x))
