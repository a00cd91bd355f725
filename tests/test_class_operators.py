"""Operators of classes and enums that Python code defines: dynamo folds them while it traces."""

import collections
import enum
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.attacks import differ
from tests.reading import ABSENT, reads

pytestmark = pytest.mark.usefixtures("at_any_size")

answers = {"now": 1.0}  # what the Python code of these classes reads


class Registers(type):
    def __getitem__(cls, name: str) -> float:
        return answers["now"]

    def __add__(cls, other: Any) -> float:
        return answers["now"]

    def __radd__(cls, other: Any) -> float:
        return answers["now"]

    def __bool__(cls) -> bool:
        return answers["now"] > 1

    def __eq__(cls, other: object) -> bool:
        return answers["now"] > 1

    def __hash__(cls) -> int:
        return int(answers["now"])

    def __float__(cls) -> float:
        return answers["now"]

    def __str__(cls) -> str:
        return str(answers["now"])


class Registry(metaclass=Registers):
    pass


class Items:
    def __class_getitem__(cls, name: str) -> float:
        return answers["now"]


class Choice(enum.Enum):
    ONE, OTHER = 1, 2

    def __bool__(self) -> bool:
        return answers["now"] > 1

    def __str__(self) -> str:
        return str(answers["now"])

    @classmethod
    def _missing_(cls, value: object) -> enum.Enum:
        return cls.ONE if answers["now"] > 1 else cls.OTHER


class Equal(enum.Enum):
    ONE, OTHER = 1, 2

    def __eq__(self, other: object) -> bool:
        return answers["now"] > 1

    __hash__ = enum.Enum.__hash__


class Name(str):
    def __format__(self, how: str) -> str:
        return str(answers["now"])


class Table(collections.OrderedDict[str, float]):
    def __repr__(self) -> str:
        return str(answers["now"])


class Scale(float):
    def __float__(self) -> float:
        return answers["now"]


name_of_users, table_of_users, scale_of_users = Name("a"), Table(a=1.0), Scale(3.0)

READS: dict[str, Callable[[], float]] = {
    "an item of a class": lambda: Items["a"],
    "an item by a metaclass": lambda: Registry["a"],
    "a sum": lambda: Registry + 1,
    "a reflected sum": lambda: 1 + Registry,
    "a sum of a list": lambda: sum([Registry], 0.0),
    "truth": lambda: 2.0 if Registry else 3.0,
    "no truth": lambda: 2.0 if not Registry else 3.0,
    "equality": lambda: 2.0 if Registry == Items else 3.0,
    "a hash": lambda: hash(Registry),
    "a number": lambda: float(Registry),
    "a text": lambda: float(f"{Registry}"),
    "truth of an enum": lambda: 2.0 if Choice.ONE else 3.0,
    "a text of an enum": lambda: float(f"{Choice.ONE}"),
    "a text of an enum by %": lambda: float("%s" % Choice.ONE),  # noqa: UP031
    "a value that an enum lacks": lambda: float(Choice(5).value),
    "a text of a str": lambda: float(f"{name_of_users}"),
    "a text of an OrderedDict": lambda: float(repr(table_of_users)),
    "a number of a float": lambda: float(scale_of_users),
    "an equal enum": lambda: 2.0 if Equal.ONE in (Equal.OTHER,) else 3.0,
}


@pytest.mark.parametrize("name", READS)
def test_an_operator_of_a_class_may_answer_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = READS[name]
    pair = reads(lambda model, x: read(), ABSENT)
    before = pair.agree()
    monkeypatch.setitem(answers, "now", 2.0)
    assert differ(before, pair.agree())


def test_a_python_module_may_answer_for_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, float] = {}

    def look_up(name: str) -> float:
        try:
            return known[name]
        except KeyError as error:
            raise AttributeError(name) from error

    module = types.ModuleType("answers")
    vars(module)["__getattr__"] = look_up
    monkeypatch.setitem(sys.modules, "answers", module)
    pair = reads(lambda model, x: getattr(module, "scale", math.pi), ABSENT)
    before = pair.agree()
    known["scale"] = 2.0
    assert differ(before, pair.agree())
