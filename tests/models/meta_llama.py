"""A decoder in the style of Meta's llama: rotary embeddings as complex numbers, heads repeated by expand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, FFN, LENGTH, VOCAB, LAYERS = 64, 4, 2, 96, 64, 99, 2
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps, self.weight = 1e-5, nn.Parameter(torch.ones(WIDTH))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def frequencies() -> Tensor:
    """[LENGTH, HEAD / 2], complex: the angle of each position and pair of columns."""
    inverse = 1.0 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(LENGTH), inverse)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    batch, length, heads, width = x.shape
    x = x[:, :, :, None, :].expand(batch, length, heads, times, width)
    return x.reshape(batch, length, heads * times, width)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        q = rotated(self.wq(x).view(batch, length, HEADS, HEAD), angles)
        k = rotated(self.wk(x).view(batch, length, KV_HEADS, HEAD), angles)
        v = self.wv(x).view(batch, length, KV_HEADS, HEAD)
        k, v = (repeated(part, HEADS // KV_HEADS) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / HEAD**0.5
        if mask is not None:
            scores = scores + mask
        output = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(output.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """`tokens` are [batch, length]; gives the logits in fp32."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.freqs_cis = frequencies()

    def forward(self, tokens: Tensor) -> Tensor:
        length, h, mask = tokens.shape[1], self.tok_embeddings(tokens), None
        self.freqs_cis = self.freqs_cis.to(h.device)
        if length > 1:
            mask = torch.full((length, length), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:length], mask)
        return self.output(self.norm(h)).float()
