"""Inspect, convert and verify a model of your own, and list what to change to fuse more of it.

    python examples/your_own_model.py

On the command line, `te-transform inspect package.module:factory` and `te-transform verify` do the same.
"""

import math
import sys
from collections import Counter

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import te_transform
from te_transform.report.report import Report

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


class HandWrittenNorm(nn.Module):
    """RMSNorm, written out as in research code."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Mixer(nn.Module):
    """Causal attention, written out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.wq, self.wk, self.wv))
        query, key, value = (heads.transpose(1, 2) for heads in projected)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.wo((weights @ value).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Memory(nn.Sequential):
    """An MLP with the exact GELU and a dropout inside."""

    def __init__(self, width: int, ffn: int):
        super().__init__(nn.Linear(width, ffn), nn.GELU(), nn.Dropout(0.1), nn.Linear(ffn, width))


class Prototype(nn.Module):
    """Token ids [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, vocabulary: int = 100, width: int = 64, heads: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(HandWrittenNorm(width) for _ in range(2))
        self.mixer, self.gated = Mixer(width, heads), Gated(width, 3 * width)
        self.memory_norm, self.memory = nn.LayerNorm(width), Memory(width, 2 * width)
        self.last_norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mixer(self.norms[0](x))
        x = x + self.gated(self.norms[1](x))
        x = x + self.memory(self.memory_norm(x))
        return self.head(self.last_norm(x))


def main() -> int:
    torch.manual_seed(0)
    model = Prototype()
    console.rule("What would be done, and why not more (nothing is changed yet)")
    console.print(te_transform.inspect(model))
    converted = te_transform.convert(model)
    verification = te_transform.verify(model, converted)
    report = te_transform.report(converted)
    console.rule("Converted and verified")
    console.print(verification.title, *(f"guilty: {path}" for path in verification.guilty), sep="\n")
    report.to_html("report.html")
    console.print("the report and both graphs are in report.html")
    console.rule("What to change to get more fused")
    for reason, count in changes(report).most_common() or [("nothing that the report knows of", 1)]:
        console.print(f"x{count} {reason}", markup=False)
    return 0 if verification else 1


def changes(report: Report) -> Counter[str]:
    """Count the sites of each reason.

    A reason reads "what the model has, but what the fused module needs: what to change".
    """
    reasons = (reason for site in report.refused for reason in site.reasons)
    return Counter(reason for reason in reasons if not reason.startswith("rolled back"))


if __name__ == "__main__":
    sys.exit(main())
