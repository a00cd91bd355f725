"""A stand-in for the backend of Transformer Engine: the same doors, plain PyTorch on the CPU behind them."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform.backends
from te_transform import vocabulary
from te_transform.autocast import Amax
from te_transform.backends import torch as plain
from te_transform.slots import traced


class Core(plain.DotProductAttention):
    """An attention core as TE's is: it stands for SDPA, and has a kernel for some calls without a mask."""

    stands_for = ("eager", "sdpa")

    def __init__(self):
        super().__init__()
        self.plain_calls: Counter[str] = Counter()
        self.causal: list[bool] = []  # of each call that was taken

    def takes(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
        if traced():
            return False
        why = "a mask" if mask is not None else None
        if is_causal and query.shape[2] != key.shape[2]:
            why = "more keys than queries"
        if why:
            self.plain_calls[why] += 1
        else:
            self.causal.append(is_causal)
        return why is None


@dataclass(eq=False)
class Te:
    """What stands at te_transform.backends.te, whose docstrings say what its functions do; it counts."""

    NAME: str = "te"
    PLAIN: bool = False
    HOLDS_FP8: bool = True
    Amax: type = Amax
    turned: int = 0  # how often queries and keys were
    entered: list[str] = field(default_factory=list)  # into the precision, and out of it
    calibrated: list[tuple[nn.Module, Any, list[Amax]]] = field(default_factory=list)

    def rotate(self, query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor] | None:
        if traced() or query.dim() != 4 or angles.dim() != 3 or angles.shape[0] != 1:
            return None
        if angles.shape[1:] != (query.shape[2], query.shape[3]):
            return None
        assert angles.dtype == torch.float32
        self.turned += 1
        columns = angles[None].detach()  # [1, 1, length, width]: no gradient, as the kernel gives none
        cos, sin = columns.cos(), columns.sin()
        return tuple(vocabulary.rope(x.float(), cos, sin).to(x.dtype) for x in (query, key))

    @contextlib.contextmanager
    def autocast(self, recipe: Any, enabled: bool = True) -> Iterator[None]:
        self.entered.append(f"in {recipe}")
        try:
            yield
        finally:
            self.entered.append("out")

    def is_delayed(self, recipe: Any) -> bool:
        return recipe == "delayed"

    def recipe_of(self, asked: Any) -> Any:
        return asked

    def multiple(self, recipe: Any) -> int:
        return 16

    def calibrate(self, fused: nn.Module, recipe: Any, products: list[Amax]) -> None:
        self.calibrated.append((fused, recipe, products))


def install(monkeypatch: pytest.MonkeyPatch) -> Te:
    """Let sites be planned for plain PyTorch's modules as they are for TE's, and attention for SDPA too."""
    te = Te()
    monkeypatch.setitem(sys.modules, "te_transform.backends.te", te)
    monkeypatch.setattr(te_transform.backends, "te", te, raising=False)
    monkeypatch.setattr(plain, "PLAIN", False)
    monkeypatch.setattr(plain, "NAME", "stand-in")  # which the rule for attention has nothing against
    monkeypatch.setattr(plain, "DotProductAttention", Core)
    return te
