"""Models that read a value of the user's own in their forward."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.attacks import Block, Pair
from tests.zoo import seeded


class Reads(Block):
    """A block whose MLP's result is scaled by what a function reads; each case has a subclass of its own."""

    scale = 1.0
    read: Callable[[Any, Tensor], Any]

    def __init__(self):
        super().__init__()
        self.register_module("child", None)
        self.register_buffer("buffer", None)
        self.register_parameter("parameter", None)
        self.doubled = self.norm.late = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * self.read(x)

    def method(self) -> float:
        return 1.0

    @property
    def half(self) -> float:
        return self.doubled / 2

    @property
    def own_class(self) -> type:
        """Return the class of the case; a conversion swaps it for a subclass."""
        return next(c for c in type(self).__mro__ if c.__mro__[1] is Reads)


class Options:
    """An object of the user's own, with truth, length and items."""

    def __init__(self, scale: float = 1.0):
        self.scale, self.items = scale, [1]

    def __bool__(self) -> bool:
        return self.scale == 1.0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, key: str) -> float:
        return getattr(self, key)


ABSENT = object()


def reads(read: Callable[[Any, Tensor], Any], first: Any) -> Pair:
    def build() -> nn.Module:
        model = type("Reads", (Reads,), {"read": read})()
        if first is not ABSENT:
            model.late = first()
        return model

    return Pair.of(seeded(build))
