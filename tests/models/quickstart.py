"""A transformer layer in plain PyTorch, sequence first, like the one in Transformer Engine's quickstart."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DotProductAttention(nn.Module):
    """Attention written out with bmm; every tensor is [sequence, batch, heads, channels]."""

    def __init__(self, num_attention_heads: int, kv_channels: int, attention_dropout: float):
        super().__init__()
        self.projection_size = kv_channels * num_attention_heads
        self.hidden_size_per_attention_head = kv_channels
        self.norm_factor = math.sqrt(kv_channels)
        self.dropout = nn.Dropout(attention_dropout)

    def masked_softmax(self, inp: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            inp.masked_fill_(mask, -10000.0)
        return torch.nn.Softmax(dim=-1)(inp)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        b, np = query.size(1), query.size(2)
        sq, sk, hn = query.size(0), key.size(0), value.size(3)

        query = query.view(sq, b * np, -1)
        key = key.view(sk, b * np, -1)
        scores = torch.bmm(query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2)) / self.norm_factor

        probs = self.dropout(self.masked_softmax(scores.view(b, np, sq, sk), attention_mask))

        value = value.view(sk, b * np, -1)
        context = torch.bmm(probs.view(b * np, sq, -1), value.transpose(0, 1))
        context = context.view(b, np, sq, hn).permute(2, 0, 1, 3).contiguous()
        return context.view(sq, b, self.projection_size)


class BasicMLP(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int):
        super().__init__()
        self.linear1 = nn.Linear(hidden_size, ffn_hidden_size, bias=True)
        self.linear2 = nn.Linear(ffn_hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        x = F.gelu(x, approximate="tanh")
        return self.linear2(x)


class BasicLayer(nn.Module):
    """Pre-norm attention, then a pre-norm MLP; the packed projection is interleaved per head."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        layernorm_eps: float = 1e-5,
        attention_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
    ):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.kv_channels = hidden_size // num_attention_heads
        self.ln1 = nn.LayerNorm(hidden_size, eps=layernorm_eps)
        self.qkv_projection = nn.Linear(hidden_size, 3 * hidden_size, bias=True)
        self.attention = DotProductAttention(num_attention_heads, self.kv_channels, attention_dropout)
        self.projection = nn.Linear(hidden_size, hidden_size, bias=True)
        self.dropout = nn.Dropout(hidden_dropout)
        self.ln2 = nn.LayerNorm(hidden_size, eps=layernorm_eps)
        self.mlp = BasicMLP(hidden_size, ffn_hidden_size)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        res = x
        x = self.qkv_projection(self.ln1(x))
        x = x.view(x.size(0), x.size(1), self.num_attention_heads, 3 * self.kv_channels)
        q, k, v = torch.split(x, x.size(3) // 3, dim=3)
        x = self.dropout(self.projection(self.attention(q, k, v, attention_mask)))
        x = res + x

        res = x
        x = self.mlp(self.ln2(x))
        return x + res


class QuickstartModel(nn.Module):
    """`num_layers` BasicLayers; x is [sequence, batch, hidden], a True in `attention_mask` hides a key."""

    def __init__(
        self,
        hidden_size: int = 64,
        ffn_hidden_size: int = 128,
        num_attention_heads: int = 4,
        num_layers: int = 2,
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            BasicLayer(hidden_size, ffn_hidden_size, num_attention_heads) for _ in range(num_layers)
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x
