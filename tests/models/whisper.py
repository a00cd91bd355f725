"""An encoder and decoder in the style of openai/whisper: layers cast their weights to the activations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, MELS, FRAMES, LENGTH, VOCAB, LAYERS = 32, 4, 8, 16, 24, 50, 1


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Conv1d(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class MultiHeadAttention(nn.Module):
    """Attention from x to itself or to `xa`. It returns the result, and the scores if they were computed."""

    def __init__(self, use_sdpa: bool):
        super().__init__()
        self.use_sdpa = use_sdpa
        self.query, self.value, self.out = (Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        source = x if xa is None else xa
        out, scores = self.attend(self.query(x), self.key(source), self.value(source), mask)
        return self.out(out), scores

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        length, scale = q.shape[1], (WIDTH // HEADS) ** -0.25
        q, k, v = (t.view(*t.shape[:2], HEADS, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        if self.use_sdpa:
            is_causal, scores = mask is not None and length > 1, None
            y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        else:
            scores = (q * scale) @ (k * scale).transpose(-1, -2)
            if mask is not None:
                scores = scores + mask[:length, :length]
            scores = scores.float()
            y, scores = F.softmax(scores, dim=-1).to(q.dtype) @ v, scores.detach()
        return y.permute(0, 2, 1, 3).flatten(start_dim=2), scores


class ResidualAttentionBlock(nn.Module):
    def __init__(self, cross: bool, use_sdpa: bool):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(use_sdpa), LayerNorm(WIDTH)
        self.cross_attn = MultiHeadAttention(use_sdpa) if cross else None
        self.cross_attn_ln = LayerNorm(WIDTH) if cross else None
        self.mlp = nn.Sequential(Linear(WIDTH, 4 * WIDTH), nn.GELU(), Linear(4 * WIDTH, WIDTH))
        self.mlp_ln = LayerNorm(WIDTH)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask)[0]
        if self.cross_attn:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)[0]
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, use_sdpa: bool):
        super().__init__()
        self.conv1 = Conv1d(MELS, WIDTH, kernel_size=3, padding=1)
        self.conv2 = Conv1d(WIDTH, WIDTH, kernel_size=3, stride=2, padding=1)
        angles = torch.arange(FRAMES)[:, None] * 10.0 ** -torch.linspace(0, 4, WIDTH // 2)
        self.register_buffer("positional_embedding", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.blocks = nn.ModuleList(ResidualAttentionBlock(False, use_sdpa) for _ in range(LAYERS))
        self.ln_post = LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).permute(0, 2, 1)
        x = (x + self.positional_embedding[: x.shape[1]]).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self, use_sdpa: bool):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, WIDTH)
        self.positional_embedding = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(ResidualAttentionBlock(True, use_sdpa) for _ in range(LAYERS))
        self.ln = LayerNorm(WIDTH)
        mask = torch.full((LENGTH, LENGTH), float("-inf")).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor, xa: Tensor) -> Tensor:
        x = (self.token_embedding(x) + self.positional_embedding[: x.shape[-1]]).to(xa.dtype)
        for block in self.blocks:
            x = block(x, xa, mask=self.mask)
        x = self.ln(x)
        return (x @ self.token_embedding.weight.to(x.dtype).transpose(0, 1)).float()


class Whisper(nn.Module):
    """`mel` is [batch, MELS, frames], `tokens` are [batch, length]; gives the logits."""

    def __init__(self, use_sdpa: bool = True):
        super().__init__()
        self.encoder, self.decoder = AudioEncoder(use_sdpa), TextDecoder(use_sdpa)
        heads = torch.ones(LAYERS, HEADS, dtype=torch.bool)
        self.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        return self.decoder(tokens, self.encoder(mel))
