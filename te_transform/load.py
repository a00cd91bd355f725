"""Models and inputs by what the command line is given."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.config_file import LoadError
from te_transform.execution.console import in_a_line, raised_at
from te_transform.graph.inputs import Inputs
from te_transform.pretrained import from_config


def load(
    name: str,
    *,
    on_meta: bool = False,
    dtype: torch.dtype | None = None,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A model by its name.

    Args:
        name: "package.module:factory", what is called without arguments and returns the model; a folder with
            a config.json of transformers, whose weights are read if there are any; or such a file.
        on_meta: build it in no memory, without weights. A factory that cannot be run so is run as it is.
        dtype: of the weights; None: as the config says, or the factory makes them.
        layers: how many a transformers model has; None: what its config says.
        trust_remote_code: run Python code that lies beside the config.

    Raises:
        LoadError: what was given, what is needed.
    """
    path = Path(name)
    if path.exists():
        return from_config(path, on_meta, dtype, layers, trust_remote_code)
    if not all(name.partition(":")):
        raise LoadError(
            f"there is no file or folder {name!r}, and nothing is downloaded: a folder with a config.json, a "
            "config file, or package.module:factory is needed"
        )
    if layers is not None:
        raise LoadError(
            "--layers are for configs, got package.module:factory; let the factory build as many layers"
        )
    return _from_factory(name, on_meta).to(dtype)


def inputs_of(told: Sequence[str], device: torch.device) -> Inputs:
    """Example inputs of random numbers, each told as [NAME=]SHAPE[:DTYPE[:HIGH]].

    "2x16x64" are normal floats, "ids=2x16:int64:1000" integers below 1000 for an argument of that name.

    Raises:
        LoadError: what was given, what is needed.
    """
    named = [each.rpartition("=") for each in told]
    tensors = [_tensor(shape, device) for _, _, shape in named]
    names = [name for name, _, _ in named]
    if any(equals and not name for name, equals, _ in named):
        raise LoadError(
            f"inputs are {', '.join(told)}, a name is needed before each =, for instance ids=2x16:int64:1000"
        )
    if any(names) and not all(names):
        raise LoadError("some inputs have names and some have none, name all or none")
    if any(names) and (twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]):
        raise LoadError(f"there are several inputs of the name {', '.join(twice)}, one of each is needed")
    return Inputs((), dict(zip(names, tensors, strict=True))) if any(names) else Inputs(tuple(tensors))


def _tensor(told: str, device: torch.device) -> Tensor:
    shape, dtype, high, *more = (*told.split(":"), "", "")
    kind, sizes = getattr(torch, dtype or "float32", None), shape.split("x")
    if (
        any(more)
        or not isinstance(kind, torch.dtype)
        or not all(size.isdecimal() and int(size) for size in (*sizes, high or "2"))
    ):
        raise LoadError(f"an input is {told!r}, for instance 2x16:int64:1000 is needed")
    sizes = [int(size) for size in sizes]
    try:
        if kind.is_floating_point:
            drawn = torch.randn(sizes, dtype=torch.float32, device="cpu")
        else:
            drawn = torch.randint(int(high or 2), sizes, dtype=torch.int64, device="cpu")
        return drawn.to(device, kind)
    except (RuntimeError, TypeError) as error:  # no memory for it, or no such number
        raise LoadError(
            f"an input of {told!r} cannot be made ({in_a_line(error)}), a smaller one is needed"
        ) from error


def imported(name: str) -> Any:
    """What package.module:attribute names.

    Raises:
        LoadError: it cannot be imported.
    """
    home, _, attributes = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as `python -m` has it
    try:
        found: Any = importlib.import_module(home)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:  # a file of Python does what it likes while it is imported
        raise LoadError(
            f"{name!r} cannot be imported ({type(error).__name__}: {error}){raised_at(error)}: "
            "package.module:factory is needed, the module as import names it"
        ) from error
    return found


def _from_factory(name: str, on_meta: bool) -> nn.Module:
    found = imported(name)
    is_factory = callable(found) and not isinstance(found, nn.Module)
    model = _called(found, name, on_meta) if is_factory else found
    if not isinstance(model, nn.Module):
        hint = ": inputs are told by --input" if isinstance(model, tuple) else ""
        raise LoadError(f"{name!r} gave a {type(model).__name__}, a torch.nn.Module is needed{hint}")
    return model


def _called(factory: Any, name: str, on_meta: bool) -> Any:
    if on_meta:
        try:
            with torch.device("meta"):
                return factory()
        except (Exception, SystemExit):  # it reads weights, or looks at numbers: then it is built as it is
            pass
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise LoadError(
            f"{name!r} failed ({in_a_line(error)}){raised_at(error)}, a factory that can be called without "
            "arguments is needed"
        ) from error
