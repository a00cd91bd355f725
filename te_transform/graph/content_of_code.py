"""Snapshots of classes, functions and Python modules, and the code that a forward may reach."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import types
from typing import Any

from torch import nn

from te_transform.graph.content import Named, home_of

# Modules of the standard library and PyTorch whose objects hold a user's values. Loggers lead to streams;
# optimizers and data loaders lead to tensors as large as the model. A forward seldom changes them.
_HOLDERS = frozenset(
    (
        "types", "argparse", "collections", "queue", "threading", "weakref", "_weakrefset", "unittest.mock",
        "configparser", "contextlib", "tempfile", "functools", "multiprocessing.sharedctypes",
        "asyncio.queues", "graphlib", "sched", "string", "torch.quasirandom", "torch.storage", "fractions",
        "concurrent.futures._base",
    )
)  # fmt: skip
_HOLDING_PACKAGES = "torch.amp.", "torch.distributions."
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# Methods that Python calls before or after a forward. Constructors run in a forward that mentions the class.
_OF_ANOTHER_TIME = frozenset(
    (
        *_CONSTRUCTORS, "__init_subclass__", "__class_getitem__", "__reduce__", "__reduce_ex__", "__copy__",
        "__deepcopy__", "__getstate__", "__setstate__", "__repr__", "__dir__", "__del__",
    )
)  # fmt: skip
_NOT_STATIC = object()
_Globals = dict[str, Any]  # the variables of a Python module by name


def is_of_a_user(home: Any) -> bool:
    """Return True if a module is not from the standard library, PyTorch or this package."""
    package = str(home).partition(".")[0]
    return package not in ("torch", "te_transform") and package not in sys.stdlib_module_names


def users_function(value: Any) -> Any:
    """Return the user's function in the wrappers that libraries make, as torch.no_grad() around a method."""
    while isinstance(value, types.FunctionType) and not is_of_a_user(home_of(value)):
        if not isinstance(wrapped := vars(value).get("__wrapped__"), types.FunctionType):
            break
        value = wrapped
    return value


def holds_values(kind: type) -> bool:
    """Return True if objects of a class may have a user's values as attributes."""
    home = home_of(kind)
    return home in _HOLDERS or home.startswith(_HOLDING_PACKAGES) or is_of_a_user(home)


class OfClass(Named):
    """The class attributes of a class."""

    __slots__ = ("methods", "root")

    def __init__(self, value: type):
        super().__init__(value)
        self.root = f"{value.__module__}.{value.__qualname__}"
        self.names = self.now()
        self.inside = [*self.names.values(), *value.__mro__, *type(value).__mro__]
        attributes = vars(value).items()
        self.methods = [(name, function) for name, x in attributes for function in _attribute_functions(x)]

    def now(self) -> dict[str, Any]:
        attributes = vars(self.value).items()
        return {name: x for name, x in attributes if name[:2] != "__" and not hasattr(type(x), "__get__")}

    def put(self, name: str, item: Any) -> None:
        type.__setattr__(self.value, name, item)

    def drop(self, name: str) -> None:
        type.__delattr__(self.value, name)


def constructors_of(kind: type) -> list[types.FunctionType]:
    """Return the functions that construct objects of a class."""
    made_by = (vars(each).get(name) for each in kind.__mro__ for name in _CONSTRUCTORS)
    return [function for attribute in made_by for function in _attribute_functions(attribute)]


def _attribute_functions(attribute: Any) -> list[types.FunctionType]:
    """Return the functions of a class attribute: a method, or the accessors of a property."""
    if isinstance(attribute, property):
        functions = [attribute.fget, attribute.fset, attribute.fdel]
    elif isinstance(attribute, (classmethod, staticmethod)):
        functions = [attribute.__func__]
    else:
        functions = [getattr(attribute, "func", attribute)]  # of functools.cached_property
    return [users_function(each) for each in functions if isinstance(each, types.FunctionType)]


class OfFunction(Named):
    """The closure variables of a function, its defaults and attributes."""

    __slots__ = ("cells", "root")

    def __init__(self, value: types.FunctionType):
        super().__init__(value)
        self.root = f"{value.__module__}.{value.__qualname__}"
        self.cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        self.names = self.now()
        self.inside = [*self.names.values(), value.__dict__, value.__defaults__, value.__kwdefaults__]

    def now(self) -> dict[str, Any]:
        contents = {}
        for name, cell in self.cells.items():
            with contextlib.suppress(ValueError):  # the variable has no value
                contents[name] = cell.cell_contents
        return contents

    def put(self, name: str, item: Any) -> None:
        self.cells[name].cell_contents = item

    def drop(self, name: str) -> None:
        del self.cells[name].cell_contents


class OfModule(Named):
    """The variables of a Python module that a forward may reach, including those that the forward creates."""

    __slots__ = ("root",)

    def __init__(self, value: _Globals):
        super().__init__(value)
        self.root = str(value.get("__name__"))
        self.names = {}

    def note(self, name: str) -> Any:
        """Record a variable, and return its value, or None if it has none or is recorded already."""
        if name in self.names or (name not in self.value and hasattr(builtins, name)):
            return None
        item = self.names[name] = self.value.get(name, _NOT_STATIC)
        return None if item is _NOT_STATIC else item

    def now(self) -> dict[str, Any]:
        return {name: self.value.get(name, _NOT_STATIC) for name in self.names}

    def put(self, name: str, item: Any) -> None:
        if isinstance(self.value.get(name), types.ModuleType):  # imported by the forward
            return
        if item is _NOT_STATIC:
            del self.value[name]
        else:
            self.value[name] = item


class Code:
    """The code that a forward may reach, found by the names that code mentions.

    It includes the code of the modules' classes, and all code that is not an installed package. Installed
    libraries are assumed to keep no state in variables. A method may be called if code mentions its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mentioned = {"forward"}
        self._waiting: dict[str, list[types.FunctionType | _Globals]] = {}
        self._modules: set[int] = set()
        classes = {kind for module in model.modules() for kind in type(module).__mro__}
        self._is_followed = {home: is_of_a_user(home) for home in map(home_of, classes)}

    def follows(self, home: Any) -> bool:
        """Return True if variables of a Python module are recorded."""
        if home not in self._is_followed:
            file = getattr(sys.modules.get(home), "__file__", None) or ""
            is_installed = "site-packages" in file or "dist-packages" in file
            self._is_followed[home] = is_of_a_user(home) and not is_installed
        return self._is_followed[home]

    def add_method(self, name: str, function: types.FunctionType) -> bool:
        """Return True if the method may be called; otherwise queue it until mention() finds its name."""
        is_called_by_python = name[:2] == "__" and name not in _OF_ANOTHER_TIME
        if name in self.mentioned or is_called_by_python:
            return True
        self._waiting.setdefault(name, []).append(function)
        return False

    def add_module(self, module: types.ModuleType) -> list[tuple[_Globals, str]]:
        """Return the variables of a module that code has mentioned; queue the others for mention()."""
        if id(module) in self._modules or not self.follows(module.__name__):
            return []
        self._modules.add(id(module))
        for name in vars(module).keys() - self.mentioned:
            self._waiting.setdefault(name, []).append(vars(module))
        return [(vars(module), name) for name in vars(module).keys() & self.mentioned]

    def mention(self, function: types.FunctionType) -> list[types.FunctionType | tuple[_Globals, str]]:
        """Return the module variables and methods that a function may read and call."""
        mentioned: list[Any] = []
        if not self.follows(home_of(function)):
            return mentioned
        for name in _mentioned_names(function.__code__):
            mentioned.append((function.__globals__, name))
            if name in _OF_ANOTHER_TIME:  # of the mentioned class, or of a base class
                continue
            if name not in self.mentioned:
                self.mentioned.add(name)
                waiting = self._waiting.pop(name, ())
                mentioned += ((each, name) if isinstance(each, dict) else each for each in waiting)
        return mentioned


@functools.lru_cache(maxsize=10_000)
def _mentioned_names(code: types.CodeType) -> tuple[str, ...]:
    """Return all names that code mentions: variables, attributes, and identifiers in strings."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_mentioned_names(constant))
        elif isinstance(constant, str) and constant.isidentifier():
            names[constant] = None
    return tuple(names)
