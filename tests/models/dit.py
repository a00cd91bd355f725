"""A diffusion transformer in the style of facebook's DiT: norms without scales, modulated by a condition."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CHANNELS, SIDE, PATCH, CLASSES, LAYERS = 64, 4, 4, 8, 2, 10, 2


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(16, device=t.device) / 16)
        angles = t[:, None].float() * frequencies[None]
        embedding = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        return self.mlp(embedding.to(self.mlp[0].weight.dtype))


class Attention(nn.Module):
    """The attention of timm when DiT was written."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """`x` is [batch, CHANNELS, SIDE, SIDE], `t` and `y` are [batch]; gives what x is to be changed by."""

    def __init__(self):
        super().__init__()
        self.x_embedder = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
        self.t_embedder, self.y_embedder = TimestepEmbedder(), nn.Embedding(CLASSES, WIDTH)
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(LAYERS))
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.linear(modulate(self.norm_final(x), *self.adaLN_modulation(c).chunk(2, dim=1)))
        x = x.reshape(len(x), SIDE // PATCH, SIDE // PATCH, PATCH, PATCH, CHANNELS)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), CHANNELS, SIDE, SIDE)
