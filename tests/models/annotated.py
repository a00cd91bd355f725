"""An encoder and decoder in the style of the annotated transformer: a norm over the unbiased deviation, masks
of booleans that are filled with -1e9, sublayers that are handed to their connection as functions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, HEADS, FFN, LENGTH, VOCAB, LAYERS = 64, 4, 128, 64, 99, 2


class LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + 1e-6) + self.b_2


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(dropout(scores.softmax(dim=-1)), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch = query.size(0)
        query, key, value = (
            linear(x).view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        x = attention(query, key, value, mask.unsqueeze(1), self.dropout)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(batch, -1, WIDTH))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.dropout(self.w_1(x).relu()))


class SublayerConnection(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = LayerNorm(), nn.Dropout(0.1)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


class Layer(nn.Module):
    def __init__(self, attentions: int):
        super().__init__()
        self.attentions = nn.ModuleList(MultiHeadedAttention() for _ in range(attentions))
        self.feed_forward = FeedForward()
        self.sublayer = nn.ModuleList(SublayerConnection() for _ in range(attentions + 1))

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.attentions[0](x, x, x, mask))
        if memory is not None:
            x = self.sublayer[1](x, lambda x: self.attentions[1](x, memory, memory, seen))
        return self.sublayer[-1](x, self.feed_forward)


class Annotated(nn.Module):
    """`src` and `tgt` are ids [batch, length], those that are 0 are padding; gives the logits."""

    def __init__(self):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Layer(1) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(2) for _ in range(LAYERS))
        self.encoder_norm, self.decoder_norm = LayerNorm(), LayerNorm()
        self.generator = nn.Linear(WIDTH, VOCAB)
        angles = torch.arange(LENGTH)[:, None] * torch.exp(
            torch.arange(0, WIDTH, 2) * -(math.log(1e4) / WIDTH)
        )
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def embedded(self, embed: nn.Embedding, ids: Tensor) -> Tensor:
        return embed(ids) * math.sqrt(WIDTH) + self.pe[: ids.size(1)].requires_grad_(False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        src_mask, tgt_mask = (src != 0).unsqueeze(-2), (tgt != 0).unsqueeze(-2)
        later = torch.triu(torch.ones(1, tgt.size(-1), tgt.size(-1), device=tgt.device), diagonal=1)
        tgt_mask = tgt_mask & (later == 0)
        x = self.embedded(self.src_embed, src)
        for layer in self.encoder:
            x = layer(x, src_mask)
        memory, x = self.encoder_norm(x), self.embedded(self.tgt_embed, tgt)
        for layer in self.decoder:
            x = layer(x, tgt_mask, memory, src_mask)
        return self.generator(self.decoder_norm(x)).log_softmax(dim=-1)
