"""Convert one transformer layer in plain PyTorch, with which the quickstart of Transformer Engine begins.

    python examples/quickstart_layer.py

That tutorial replaces the layer by hand, module by module; here convert() does. The layer has what makes this
tedious by hand: sequence first, queries, keys and values interleaved per head in one projection, attention
written out with two batched products, and norms apart from the linears that read them.
"""

import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import te_transform

HIDDEN, FFN, HEADS = 256, 1024, 8
LENGTH, BATCH = 128, 4

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


class Attention(nn.Module):
    """softmax(q k^T / sqrt(width)) v, written out; q, k, v are [length, batch, heads, width]."""

    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length, batch, heads, width = query.shape
        flat = (x.reshape(length, batch * heads, width) for x in (query, key, value))
        query, key, value = (x.transpose(0, 1) for x in flat)
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(width)
        scores = scores.view(batch, heads, length, length)
        if mask is not None:
            scores = scores.masked_fill(mask, -10000.0)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.bmm(weights.view(batch * heads, length, length), value)
        return context.transpose(0, 1).reshape(length, batch, heads * width)


class MLP(nn.Module):
    """Two linears with the tanh GELU between them."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Layer(nn.Module):
    """Attention, then an MLP, each after a norm; x is [length, batch, hidden], a True in the mask hides."""

    def __init__(self, hidden: int, ffn: int, heads: int, dropout: float = 0.1):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention = Attention(dropout)
        self.projection = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, ffn)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, -1))
        attended = self.attention(*qkv.chunk(3, dim=-1), mask)
        x = x + self.dropout(self.projection(attended))
        return x + self.mlp(self.mlp_norm(x))


def main() -> int:
    torch.set_num_threads(1)  # so that timings can be compared
    torch.manual_seed(0)
    layer = Layer(HIDDEN, FFN, HEADS)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    converted = te_transform.convert(layer, (x, causal))
    report = te_transform.report(converted)
    console.print(report)

    for which in ("before", "after"):
        console.rule(f"The graph {which}")
        print("\n".join(calls(report.graph_text(which))))

    console.rule("The layer now")
    print(converted)

    console.rule("Verified")
    verification = te_transform.verify(layer, converted, (x, causal))
    print(verification.title)

    before, after = seconds(layer, converted, x=x, mask=causal)
    print(f"forward and backward: {1e3 * before:.1f} ms, converted {1e3 * after:.1f} ms")
    print(f"{before / after:.2f} times as fast, in plain PyTorch on this CPU: that says nothing about a GPU")
    return 0 if verification else 1


def calls(text: str) -> list[str]:
    """Return the lines of a listed graph without those of parameters, which only repeat the names."""
    return [line for line in text.splitlines() if "  the model's " not in line]


def seconds(*models: nn.Module, repeats: int = 20, **inputs: Tensor) -> list[float]:
    """Return the median time of a forward and a backward of each model, timed by turns."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(repeats):
        for model, taken in zip(models, times, strict=True):
            start = time.perf_counter()
            model(**inputs).sum().backward()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    sys.exit(main())
