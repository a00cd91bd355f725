"""A decoder in the style of x-transformers: [norm, block, residual], results beside intermediates."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, VOCAB, DEPTH = 32, 4, 24, 50, 1


@dataclass
class Intermediates:
    """The intermediate results of an attention."""

    qk_similarities: Tensor | None = None
    values: Tensor | None = None
    cached_kv: tuple[Tensor, Tensor] | None = None


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.g = WIDTH**0.5, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class LayerNorm(nn.Module):
    """With a gamma around zero, and no beta."""

    def __init__(self):
        super().__init__()
        self.ln, self.gamma = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(x) * (self.gamma + 1.0)


class Residual(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Intermediates]:
        similarities = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        i, j = similarities.shape[-2:]
        hidden = torch.ones((i, j), dtype=torch.bool, device=q.device).triu(j - i + 1)
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, :]
        lowest = -torch.finfo(similarities.dtype).max
        attention = similarities.masked_fill(hidden, lowest).softmax(dim=-1, dtype=torch.float32)
        out = torch.einsum("b h i j, b h j d -> b h i d", attention.type(q.dtype), v)
        return out, Intermediates(qk_similarities=similarities, values=v)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out, self.attend = nn.Linear(WIDTH, WIDTH, bias=False), Attend()

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_intermediates: bool = False
    ) -> Tensor | tuple[Tensor, Intermediates]:
        q, k, v = (
            to(x).reshape(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        out, intermediates = self.attend(q, k, v, mask)
        intermediates.cached_kv = k, v
        out = self.to_out(out.permute(0, 2, 1, 3).reshape(x.shape))
        return (out, intermediates) if return_intermediates else out


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.proj = nn.SiLU(), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(GLU(), nn.Dropout(0.0), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class XTransformer(nn.Module):
    """`x` are ids [batch, length], a False in `mask` hides a key; gives the logits."""

    def __init__(self, norm: type[nn.Module] = RMSNorm):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer_types = ("a", "f") * DEPTH
        blocks = {"a": Attention, "f": FeedForward}
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([norm(), None]), blocks[kind](), Residual()])
            for kind in self.layer_types
        )
        self.final_norm, self.to_logits = norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_intermediates: bool = False
    ) -> Tensor | tuple[Tensor, list[Intermediates]]:
        x, kept = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device)), []
        for kind, (norms, block, residual) in zip(self.layer_types, self.layers, strict=True):
            pre_norm, post_norm = norms
            inner, out = x, pre_norm(x)
            if kind == "a":
                out, intermediates = block(out, mask=mask, return_intermediates=True)
                kept.append(intermediates)
            else:
                out = block(out)
            x = residual(out if post_norm is None else post_norm(out), inner)
        logits = self.to_logits(self.final_norm(x))
        return (logits, kept) if return_intermediates else logits
