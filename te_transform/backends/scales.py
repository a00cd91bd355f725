"""The first scales of delayed scaling.

It quantizes with the scales of earlier steps, and has none at first: numbers beyond 448 and gradients below
1e-5, which is most of them, would be lost. So a product runs in its own dtype until its input, its weight
and, where it is trained, its output's gradient have been seen in a whole forward; the scales are those that
these call for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.limits import Switch
from te_transform.backends.running import forward_number

looking = Switch()
"""All products run in their own dtype and look at what goes through them, whatever they have seen."""


@dataclass
class Amax:
    """The largest absolute values around one product, as 0-dim tensors; None where nothing was seen."""

    input: Tensor | None = None
    weight: Tensor | None = None
    grad: Tensor | None = None


@dataclass
class Seen:
    """What has gone through the products of one fused op, in their order."""

    products: Sequence[Amax]
    used: set[str] = field(default_factory=set)  # the directions that is_new() was asked for
    forward: int | None = None  # the number of the last one that was looked at

    @classmethod
    def of(cls, products: int) -> Seen:
        """Nothing yet, of so many products."""
        return cls([Amax() for _ in range(products)])

    def is_new(self, direction: str) -> bool:
        """Whether this is the first time that this direction is asked for."""
        new = direction not in self.used
        self.used.add(direction)
        return new

    def knows(self, gradients: bool) -> bool:
        """Whether there are scales for a call, with `gradients` for its backward too.

        Not before the forward ends that was looked at: a layer that a model calls several times, as ALBERT's,
        has other inputs each time, and the scales are to fit them all.
        """
        known = all(p.input is not None and (p.grad is not None or not gradients) for p in self.products)
        number = forward_number()
        return known and not looking and (number is None or number != self.forward)

    def product(self) -> plain.Product:
        """plain.product, which notes what it sees; for the products of one call, in their order."""
        products, self.forward = iter(self.products), forward_number()

        def noting(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            amax = next(products)
            amax.input, amax.weight = _larger(amax.input, x), _larger(amax.weight, weight)
            out = plain.product(x, weight, bias)
            if out.requires_grad:
                out.register_hook(lambda grad: _note_gradient(amax, grad))
            return out

        return noting


def _note_gradient(amax: Amax, grad: Tensor) -> None:
    amax.grad = _larger(amax.grad, grad)


_NOTHING = torch.zeros(())


def _larger(amax: Tensor | None, seen: Tensor) -> Tensor:
    # the same operations each time: a checkpoint may compare those of a forward with those of its repetition
    return torch.maximum(seen.detach().abs().amax().float(), _NOTHING if amax is None else amax)
