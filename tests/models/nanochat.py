"""A decoder in the style of nanochat: norms without weights, rotary angles, a squared ReLU, capped logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, LENGTH, VOCAB, LAYERS = 32, 4, 2, 24, 50, 1
HEAD = WIDTH // HEADS


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is [batch, length, heads, HEAD]."""
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([first * cos + second * sin, first * (-sin) + second * cos], 3)


class Linear(nn.Linear):
    """Without a bias, in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype))


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_proj = Linear(WIDTH, WIDTH, bias=False), Linear(WIDTH, WIDTH, bias=False)
        self.c_k, self.c_v = (Linear(WIDTH, GROUPS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.size()
        q = self.c_q(x).view(batch, length, HEADS, HEAD)
        k, v = (project(x).view(batch, length, GROUPS, HEAD) for project in (self.c_k, self.c_v))
        q, k = norm(rotated(q, *cos_sin)), norm(rotated(k, *cos_sin))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Linear(WIDTH, 4 * WIDTH, bias=False)
        self.c_proj = Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(), MLP()

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(norm(x), cos_sin)
        return x + self.mlp(norm(x))


class NanoChat(nn.Module):
    """`idx` are [batch, length]; gives the logits, between -15 and 15."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCAB, WIDTH), "h": nn.ModuleList(Block() for _ in range(LAYERS))}
        )
        self.lm_head = Linear(WIDTH, VOCAB, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cos", angles.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None, :], persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        cos_sin = self.cos[:, : idx.size(1)], self.sin[:, : idx.size(1)]
        x = norm(self.transformer.wte(idx))
        for block in self.transformer.h:
            x = block(x, cos_sin)
        return 15 * torch.tanh(self.lm_head(norm(x)).float() / 15)
