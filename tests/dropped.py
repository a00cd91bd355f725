"""A model whose layers are dropped, and schedules of dropping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.training import LayerDropping, drop_layers
from tests import ranks

WIDTH, LAYERS = ranks.WIDTH, 4
X = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
PASSED = 1000  # steps after which theta(t) is at its limit


class Net(nn.Module):
    """Pre-norm layers of two branches, and a head."""

    def __init__(self, layers: int = LAYERS, reentrant: bool | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(ranks.Block() for _ in range(layers))
        self.head, self.reentrant = nn.Linear(WIDTH, 8), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and self.reentrant is not None:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return self.head(x)


def net(make: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    """Return the converted model, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(**{name: options.pop(name) for name in ("layers", "reentrant") if name in options})
    return te_transform.convert(model, X, verify=False, inplace=True, **options).train()


def dropping(model: nn.Module, **options: Any) -> LayerDropping:
    """Return a schedule whose theta(t) has reached its limit."""
    schedule = drop_layers(model, 100, **options)
    schedule.load_state_dict({**schedule.state_dict(), "steps": PASSED})
    return schedule


def gradients(model: nn.Module, x: Tensor = X) -> dict[str, Tensor]:
    """Return the gradients of the mean square of the output, zeros for parameters without one."""
    model.zero_grad()
    model(x).square().mean().backward()
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(map(torch.equal, one.values(), other.values()))


class Fixed:
    """A policy with given factors, by the layers' paths, in every step."""

    def __init__(self, factors: dict[str, float | None]):
        self.factors = factors

    def __call__(self) -> Fixed:
        return self

    def is_on(self) -> bool:
        return True

    def factor(self, path: str) -> float | None:
        return self.factors[path]


def by_hand(model: nn.Module, factors: dict[str, float | None], x: Tensor = X) -> Tensor:
    """Compute the model's output with each branch times the layer's factor."""
    for number, block in enumerate(model.blocks):
        factor = factors[f"blocks.{number}"]
        if factor is not None:
            y = block.norm(x)
            x = x + block.o(block.q(y) * torch.tanh(block.k(y))) * factor
            x = x + block.mlp(block.norm2(x)) * factor
    return model.head(x)
