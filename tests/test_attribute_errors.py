"""Exceptions that a forward catches: dynamo raises others, with other texts, or none."""

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.attacks import Pair, odd

pytestmark = pytest.mark.usefixtures("at_any_size")

HELD: dict[str, Any] = {
    "list": [1.0], "dict": {"a": 1.0}, "tuple": (1.0,), "set": {1.0}, "deque": collections.deque([1.0]),
    "range": range(3),
}  # fmt: skip


def deletes(model: Any, x: Tensor) -> None:
    del model.late


FAILS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a deleted attribute": deletes,
    **{f"an attribute of a {kind}": lambda model, x, held=held: held.late for kind, held in HELD.items()},
}


@pytest.mark.parametrize("name", FAILS)
def test_an_attribute_that_is_missing_raises(name: str) -> None:
    fail = FAILS[name]

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        try:
            fail(self, y)
        except AttributeError:
            return 2 * y
        return y

    Pair.of(odd(forward)).agree()


def test_an_attribute_that_dynamo_does_not_find_raises_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        try:
            larger = copy.copy(self.larger)
        except AttributeError:
            return 2 * y
        return y * larger(2.0)

    Pair.of(odd(forward, larger=functools.partial(max, 1.0))).agree()


@pytest.mark.parametrize("read", [str, repr, "{}".format, lambda error: error.args])
@pytest.mark.parametrize(
    "fail", [lambda: {}["a"], lambda: {}.pop("a"), lambda: [1].index(2), lambda: None.late]
)
def test_an_exception_has_the_text_of_python(
    read: Callable[[Exception], Any], fail: Callable[[], Any]
) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Any]:
        y = self.mlp(self.norm(x))
        try:
            fail()
        except Exception as error:
            return y, read(error)
        return y, None

    pair = Pair.of(odd(forward))
    assert pair.original(pair.x)[0][1] == pair.converted(pair.x)[0][1]
    pair.agree()
