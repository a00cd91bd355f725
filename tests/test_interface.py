"""What users may write stays: the interface of the last version is there, or warns that it goes.

tests/interface.txt has it, a line for each name, parameter and attribute. `python tests/test_interface.py`
writes it, with each release: what a version deprecates is in the record of that version no longer.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import te_transform
from te_transform import rules, training

RECORD = Path(__file__).parent / "interface.txt"
PUBLIC = {"te_transform": te_transform, "te_transform.rules": rules, "te_transform.training": training}


def interface(public: dict[str, ModuleType]) -> Iterator[str]:
    """A line for each public name, for each parameter of what is called, and each attribute of classes."""
    for home, module in public.items():
        for name in module.__all__:
            yield from _lines(f"{home}.{name}", getattr(module, name))


def _lines(name: str, held: Any) -> Iterator[str]:
    yield name
    if inspect.ismodule(held):
        own = {n: f for n, f in vars(held).items() if getattr(f, "__module__", "") == held.__name__}
        yield from (line for n, f in own.items() if n[0] != "_" for line in _lines(f"{name}.{n}", f))
    if inspect.isclass(held):
        foreign = {
            n
            for base in (*held.__mro__[1:], nn.Module)
            if base.__module__ != held.__module__
            for n in dir(base)
        }
        fields = {f.name for f in dataclasses.fields(held)} if dataclasses.is_dataclass(held) else set()
        for attribute in sorted({*dir(held), *fields} - foreign):
            if attribute[0] != "_":
                yield from _lines(f"{name}.{attribute}", getattr(held, attribute, None))
    if inspect.isroutine(held) or dataclasses.is_dataclass(held):
        for place, p in enumerate(inspect.signature(held).parameters.values()):
            if p.name == "self":
                continue
            where = "by name" if p.kind is p.KEYWORD_ONLY else place
            yield f"{name}({where}: {p.name}{' needed' if _is_needed(p) else ''})"


def _is_needed(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not several


def broken(recorded: Iterable[str], public: dict[str, ModuleType]) -> list[str]:
    """Return what is gone from a recorded interface without a warning, and new required arguments."""
    recorded, now = [*recorded], [*interface(public)]
    gone = [line for line in recorded if line not in now and not _warns(line.partition("(")[0], public)]
    calls = {line.partition("(")[0] for line in recorded}
    new = [line for line in now if line not in recorded and line.endswith(" needed)")]
    return [*gone, *(line for line in new if line.partition("(")[0] in calls)]


def _warns(name: str, public: dict[str, ModuleType]) -> bool:
    """Return True if a removed name can still be read, with a DeprecationWarning."""
    home = max((home for home in public if name.startswith(f"{home}.")), key=len)
    held: Any = public[home]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for part in name.removeprefix(f"{home}.").split("."):
            held = getattr(held, part, None)
    return held is not None and any(issubclass(each.category, DeprecationWarning) for each in seen)


def test_the_last_versions_interface_is_there_or_warns() -> None:
    why = (
        "users of the last version write this: keep it for one version, with a DeprecationWarning that says "
        "what to write instead (docs/promises.md)"
    )
    assert not broken(RECORD.read_text("utf-8").splitlines(), PUBLIC), why


def module(**held: Any) -> dict[str, ModuleType]:
    made = ModuleType("made")
    made.__dict__.update(held, __all__=[name for name in held if name[0] != "_"])
    return {"made": made}


def one(x: int, y: int = 0) -> None: ...
def more(x: int, y: int = 0, *, z: int = 0) -> None: ...
def needs_more(x: int, y: int = 0, *, z: int) -> None: ...
def renamed(x: int, w: int = 0) -> None: ...


def old_name(name: str) -> Any:
    warnings.warn(f"{name} is called more now", DeprecationWarning, stacklevel=2)
    return more


CHANGES = {
    "the same": (module(one=one), []),
    "an optional parameter more": (module(one=more), []),
    "a parameter that is needed": (module(one=needs_more), ["made.one(by name: z needed)"]),
    "a parameter renamed": (module(one=renamed), ["made.one(1: y)"]),
    "gone": (module(), ["made.one", "made.one(0: x needed)", "made.one(1: y)"]),
    "gone, with a warning": (module(more=more, __getattr__=old_name), []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_breaks_is_seen(change: str) -> None:
    changed, found = CHANGES[change]
    assert broken(interface(module(one=one)), changed) == found


if __name__ == "__main__":
    RECORD.write_text("\n".join(interface(PUBLIC)) + "\n", encoding="utf-8")
