"""nn.MultiheadAttention the way research code calls it: behind a norm, beside a residual, without weights."""

from torch import Tensor, nn


class SelfAttention(nn.Module):
    """x is [batch, sequence, hidden]; a True in `key_padding_mask` [batch, sequence] hides a key."""

    def __init__(self, hidden_size: int = 64, num_heads: int = 4, dropout: float = 0.1):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.attention = nn.MultiheadAttention(hidden_size, num_heads, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        y, _ = self.attention(y, y, y, key_padding_mask=key_padding_mask, need_weights=False)
        return x + y
