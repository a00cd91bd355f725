"""The first scales of delayed scaling, and those of calls that checkpoints make again.

It quantizes with the scales of earlier steps, and has none at first: numbers beyond 448 and gradients below
1e-5, which is most of them, would be lost. So a product runs in its own dtype until its input, its weight
and, where it is trained, its output's gradient have been seen in a whole forward; the scales are those that
these call for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.limits import Switch
from te_transform.backends.running import forward_number
from te_transform.backends.tracing import saving_hooks

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
    again: bool = False  # whether there were scales before

    def anew(self) -> Seen:
        """What is known of gradients alone, where inputs and weights have to be looked at anew."""
        products = [Amax(grad=product.grad) for product in self.products]
        return Seen(products, self.used - {"forward"}, again=True)

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


_NOTHING = torch.zeros((), dtype=torch.float32, device="cpu")


def _larger(amax: Tensor | None, seen: Tensor) -> Tensor:
    # the same operations each time: a checkpoint may compare those of a forward with those of its repetition
    return torch.maximum(seen.detach().abs().amax().float(), _NOTHING if amax is None else amax)


@dataclass
class Call:
    """How the calls of a product in one forward ran, which a checkpoint may make again."""

    in_fp8: bool
    calibrating: bool  # whether in its own dtype for want of scales
    scales: Tensor | None = None  # of delayed scaling
    forward: int | None = None
    moments: list[int] = field(default_factory=list)  # of autograd's count of operations, one for each call
    repeated: bool = False

    @property
    def in_recipe(self) -> bool:
        """Whether it was to be in FP8."""
        return self.in_fp8 or self.calibrating


class Calls:
    """The calls of a product that checkpoints may make again.

    Several forwards may come before a backward, each with scales of its own, and a backward may repeat them
    in any order. What a repetition knows is the node of the backward that it is for: one that the forward
    recorded after the call, or, where checkpoints are reentrant, the one that stands for the checkpoint, from
    before the call. The nodes of a thread are numbered.
    """

    MOST = 32  # forwards that no backward has come to; each keeps a few numbers on the GPU

    def __init__(self) -> None:
        self.noted: deque[Call] = deque(maxlen=self.MOST)

    def note(self, in_fp8: bool, calibrating: bool, scales: Callable[[], Tensor | None]) -> None:
        """Note the call that is made now; `scales` gives a copy of its own."""
        forward, last = forward_number(), self.noted[-1] if self.noted else None
        known = last is not None and forward is not None and last.forward == forward
        if not known or (last.in_fp8, last.calibrating) != (in_fp8, calibrating):
            waiting = [call for call in self.noted if not call.repeated]
            last = Call(in_fp8, calibrating, scales() if in_fp8 else None, forward)
            self.noted = deque([*waiting, last], self.MOST)
        last.moments.append(torch._C._autograd._get_sequence_nr())

    def again(self) -> Call | None:
        """The one that is made again within the backward that runs; None where nothing is noted."""
        moments = [(moment, call) for call in self.noted for moment in call.moments]
        if not moments:
            return None
        node = torch._C._current_autograd_node()._sequence_nr()
        if saving_hooks():
            found = [call for moment, call in reversed(moments) if moment <= node]
        else:
            found = [call for moment, call in moments if moment > node]
        call = found[0] if found else self.noted[-1]
        call.repeated = True
        return call
