"""The first scales of delayed scaling.

Delayed scaling quantizes with the scales of earlier steps and has none at first. Without scales, values
above 448 and most gradients, which are below 1e-5, would be lost. A product therefore runs in its own dtype
until a whole forward has recorded the amax of its input and its weight. If its output needs a gradient, the
amax of this gradient must be recorded too. The first scales are computed from these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.fp8.current_model import running_forward
from te_transform.backends.limits import Switch
from te_transform.backends.repeated_forwards import ForwardNodes
from te_transform.backends.tensor_version import writable

calibrating = Switch()
"""True if all products run in their own dtype and record amax, even if they have scales."""


@dataclass
class Amax:
    """The amax of the tensors of one product, as 0-dim tensors; None before the first call.

    `used` has the directions, "forward" and "backward", that have scales.
    """

    input: Tensor | None = None
    weight: Tensor | None = None
    grad: Tensor | None = None
    used: set[str] = field(default_factory=set)


@dataclass
class RecordedAmax:
    """The amax values that the products of one fused op have recorded.

    Attributes:
        products: of each product.
        forward: the last forward that recorded.
        again: True if there were scales before.
    """

    products: Sequence[Amax]
    forward: ForwardNodes | None = None
    again: bool = False

    def anew(self) -> RecordedAmax:
        """Return a copy that keeps only the gradients, to record inputs and weights again."""
        products = [Amax(grad=product.grad, used=product.used - {"forward"}) for product in self.products]
        return RecordedAmax(products, again=True)

    @classmethod
    def of(cls, products: int) -> RecordedAmax:
        """Return an empty record for this number of products."""
        return cls([Amax() for _ in range(products)])

    @property
    def has_scales(self) -> bool:
        """True if a product has scales in a direction."""
        return any(product.used for product in self.products)

    def knows(self, trained: Sequence[bool]) -> bool:
        """Return True if scales can be computed for a call whose products need these gradients.

        A product needs no amax of a gradient that it does not get, as the first product of an MLP whose
        second product alone is trained.

        The forward that records must have ended. A model such as ALBERT calls one layer several times with
        different inputs, and the scales must fit all of them.
        """
        needed = zip(self.products, trained, strict=True)
        known = all(
            p.input is not None and (p.grad is not None or not is_trained) for p, is_trained in needed
        )
        forward = running_forward()
        return known and not calibrating and (forward is None or forward is not self.forward)

    def missing_scales(self, trained: Sequence[bool]) -> list[tuple[int, str]]:
        """Return the scales that a call needs and that are not computed yet: product and direction."""
        return [
            (number, direction)
            for number, (product, is_trained) in enumerate(zip(self.products, trained, strict=True))
            for direction in ("forward", "backward")[: 1 + is_trained]
            if direction not in product.used
        ]

    def product(self) -> plain.Product:
        """Return plain.product with recording, for the products of one call in order."""
        products, self.forward = iter(self.products), running_forward()

        def recording(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            amax = next(products)
            amax.input, amax.weight = _larger(amax.input, x), _larger(amax.weight, weight)
            out = writable(plain.product(x, weight, bias))
            if out.requires_grad:
                out.register_hook(lambda grad: _record_gradient(amax, grad))
            return out

        return recording


def _record_gradient(amax: Amax, grad: Tensor) -> None:
    amax.grad = _larger(amax.grad, grad)


_ZERO = torch.zeros((), dtype=torch.float32, device="cpu")


def _larger(amax: Tensor | None, seen: Tensor) -> Tensor:
    # always the same operations, because a checkpoint may compare those of a forward and its repetition
    return torch.maximum(seen.detach().abs().amax().float(), _ZERO if amax is None else amax)
