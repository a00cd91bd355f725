"""Bring your own model: see what would be fused, convert it, verify it, and read what to change to fuse more.

    python examples/your_own_model.py                           # the prototype in this file
    python examples/your_own_model.py package.module:factory    # what factory() returns
    python examples/your_own_model.py package.module:factory --input 2x16:int64:1000 --input 2x16:bool

An input is SHAPE[:DTYPE[:HIGH]], with NAME= before it where forward() takes it by name: random values,
integers below HIGH. Without any, convert() invents inputs where the model says what it reads.
"""

import argparse
import importlib
import math
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import te_transform
from te_transform.report.report import Report

CANNOT = (te_transform.InputError, te_transform.ModelError, te_transform.TraceError)
console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


class HandWrittenNorm(nn.Module):
    """RMSNorm, spelt out as research code does."""

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
    """An older MLP that nobody has tidied up: the exact GELU, and a dropout inside."""

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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", nargs="?", default="", help="module:factory, called without arguments")
    parser.add_argument("--input", action="append", default=[], help="[NAME=]SHAPE[:DTYPE[:HIGH]]")
    parser.add_argument("--approximate", action="store_true", help="allow rules that change the numbers")
    parser.add_argument("--skip", action="append", default=[], help="a module path or glob to be left alone")
    parser.add_argument("--html", default="report.html", help="where the report is written, with both graphs")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    options = {"approximate": chosen.approximate, "skip": chosen.skip}
    try:
        model = build(chosen.model) if chosen.model else Prototype()
        inputs = made(chosen.input)
        console.rule("What would be done, and why not more (nothing is changed yet)")
        console.print(te_transform.inspect(model, inputs, **options))
        converted = te_transform.convert(model, inputs, **options)
        verification = te_transform.verify(model, converted, inputs)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    except CANNOT as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    report = te_transform.report(converted)
    console.rule("Converted and verified")
    console.print(verification.title, *(f"guilty: {path}" for path in verification.guilty), sep="\n")
    report.to_html(chosen.html)
    console.print(f"the report and both graphs are in {chosen.html}")
    console.rule("What to change to get more fused")
    for reason, count in changes(report).most_common() or [("nothing that the report knows of", 1)]:
        console.print(f"x{count} {reason}", markup=False)
    return 0 if verification else 1


def build(path: str) -> nn.Module:
    """The model that "module:factory" names; modules of the working directory are found too."""
    module, _, name = path.partition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"the model is {path!r}, module:factory is needed")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be imported: {error}") from error
    if isinstance(factory, nn.Module):
        return factory
    try:
        return factory()
    except TypeError as error:
        needed = "a factory without arguments is needed"
        raise argparse.ArgumentTypeError(f"{path}() failed ({error}), {needed}") from error


def made(specs: list[str]) -> Any:
    """Example inputs as convert() takes them: None, a tuple, or a dict where they have names."""
    named = [spec.partition("=") if "=" in spec else ("", "", spec) for spec in specs]
    tensors = [tensor(spec) for _, _, spec in named]
    names = [name for name, _, _ in named]
    if any(names) and not all(names):
        raise argparse.ArgumentTypeError("some inputs have names and some have none, name all or none")
    return (dict(zip(names, tensors, strict=True)) if any(names) else tuple(tensors)) or None


def tensor(spec: str) -> Tensor:
    """2x16:int64:1000 -> [2, 16] of random integers below 1000; 2x16x64 -> normal floats."""
    shape, dtype, high = (*spec.split(":"), "", "")[:3]
    kind = getattr(torch, dtype or "float32", None)
    if not isinstance(kind, torch.dtype) or not all(part.isdecimal() for part in shape.split("x")):
        raise argparse.ArgumentTypeError(f"the input is {spec!r}, for instance 2x16:int64:1000 is needed")
    sizes = [int(part) for part in shape.split("x")]
    if kind.is_floating_point:
        return torch.randn(sizes, dtype=kind)
    return torch.randint(int(high or 2), sizes).to(kind)


def changes(report: Report) -> Counter[str]:
    """Every reason that ends in what to do, and how many sites it stands for.

    A reason reads "what the model has, what the fused module needs: what to change"; where nothing is to be
    changed but the architecture, it ends before the colon.
    """
    reasons = (reason for site in report.refused for reason in site.reasons)
    return Counter(reason for reason in reasons if ": " in reason and not reason.startswith("rolled back"))


if __name__ == "__main__":
    sys.exit(main())
