"""Blocks whose attention has several spellings, fast and slow ones, to profile."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Attention(nn.Module):
    """Attention in several spellings."""

    def __init__(self, spelled: str = "fused", width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out, self.spelled = nn.Linear(width, 3 * width), nn.Linear(width, width), spelled

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
        if self.spelled == "written out":
            scores = (q @ k.transpose(-2, -1) / 3).masked_fill(~causal, -torch.inf)
            return F.softmax(scores, -1) @ v
        if self.spelled == "dropout":
            return F.dropout(F.softmax(q @ k.transpose(-2, -1), -1), 0.1) @ v
        if self.spelled == "no dropout":
            return F.dropout(F.softmax(q @ k.transpose(-2, -1), -1), 0.0) @ v
        if self.spelled == "math":
            with sdpa_kernel(SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v)
        low = torch.zeros_like(causal, dtype=q.dtype).masked_fill(~causal, -1e9)
        masks = {
            "causal mask": causal,
            "causal mask of -1e9": low,
            "full mask": torch.ones_like(causal),
            "other mask": causal.flip(-1),
        }
        return F.scaled_dot_product_attention(q, k, v, masks.get(self.spelled))


class Block(nn.Module):
    """A pre-norm block with a linear in place of an MLP."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        width = attention.out.in_features
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), attention, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + F.gelu(self.mlp(x))
