"""Load models and make inputs from the arguments of the command line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.config_file import LoadError
from te_transform.graph.errors import in_a_line, in_full, raised_at
from te_transform.graph.inputs import Inputs
from te_transform.graph.keywords import did_you_mean
from te_transform.plan.model import check_module
from te_transform.pretrained import from_config


def load(
    name: str,
    *,
    on_meta: bool = False,
    dtype: torch.dtype | None = None,
    layers: int | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model by its name.

    Args:
        name: "package.module:factory", a folder, or a config file. The factory returns the model and takes no
            arguments. The folder has a config.json of transformers, and may have weights.
        on_meta: True to build the model on the meta device, without weights. A factory that fails there runs
            normally.
        dtype: The dtype of the weights. None means the dtype of the config or the factory.
        layers: The number of layers of a transformers model. None means the number in its config.
        trust_remote_code: True to run Python code next to the config.

    Raises:
        LoadError: the model cannot be loaded; the message says what was expected.
        ModelError: a module or tensor of the model is not initialized.
    """
    path = Path(name)
    if path.exists():
        return from_config(path, on_meta, dtype, layers, trust_remote_code)
    if not all(name.partition(":")):
        raise LoadError(
            "expected a folder with a config.json, a config file, or package.module:factory, got "
            f"{name!r}, which is no file or folder; name one that exists, nothing is downloaded"
        )
    if layers is not None:
        raise LoadError(
            "expected a config for --layers, got package.module:factory; build fewer layers in the factory"
        )
    return _from_factory(name, on_meta).to(dtype)


def inputs_of(texts: Sequence[str], model: nn.Module) -> Inputs:
    """Make random example inputs from texts of the form [NAME=]SHAPE[:DTYPE[:HIGH]], on the model's device.

    "2x16x64" means normal floats in the dtype of the model's first floating point parameter.
    "ids=2x16:int64:1000" means integers below 1000 for the argument `ids`. "batch.ids=2x16:int64:1000" means
    an argument `batch` that is a dict with an entry `ids`.

    Raises:
        LoadError: a text is invalid, or the inputs do not fit the forward; the message says what is expected.
    """
    named = [each.rpartition("=") for each in texts]
    floats = filter(torch.is_floating_point, model.parameters())
    like = next(floats, torch.empty(0, dtype=torch.float32, device="cpu"))
    tensors = [_parse_tensor(shape, like) for _, _, shape in named]
    names = [name for name, _, _ in named]
    if any(equals and not name for name, equals, _ in named):
        raise LoadError(f"expected a name before each =, such as ids=2x16:int64:1000, got {', '.join(texts)}")
    if any(names) and not all(names):
        raise LoadError("expected names for all inputs or for none, got names for some; name all or none")
    inputs = Inputs((), _named_arguments(names, tensors)) if any(names) else Inputs(tuple(tensors))
    try:
        signature(model.forward).bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        takes = ", ".join(signature(model.forward).parameters)
        raise LoadError(
            f"expected inputs for {type(model).__name__}.forward({takes}), got {inputs} ({error}); pass "
            "--input once for each argument"
        ) from error
    return inputs


def _named_arguments(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the tensors by name; those with a dot in their name are entries of a dict."""
    arguments: dict[str, Any] = {}
    for name, tensor in zip(names, tensors, strict=True):
        argument, _, entry = name.partition(".")
        entries = arguments.setdefault(argument, {}) if entry else arguments
        if not isinstance(entries, dict) or (entry or name) in entries:
            raise LoadError(f"expected one input per name, got several for {name}")
        entries[entry or name] = tensor
    return arguments


def _parse_tensor(text: str, like: Tensor) -> Tensor:
    shape, dtype, high, *more = (*text.split(":"), "", "")
    kind, sizes = getattr(torch, dtype, None) if dtype else like.dtype, shape.split("x")
    if (
        any(more)
        or not isinstance(kind, torch.dtype)
        or not all(size.isdecimal() and int(size) for size in (*sizes, high or "2"))
    ):
        raise LoadError(
            f"expected an input such as 2x16x64 (floats) or 2x16:int64:1000 (ids below 1000), got {text!r}; "
            "join sizes by x, each at least 1, and name a dtype of torch"
        )
    sizes = [int(size) for size in sizes]
    try:
        if kind.is_floating_point:
            drawn = torch.randn(sizes, dtype=torch.float32, device="cpu")
        else:
            drawn = torch.randint(int(high or 2), sizes, dtype=torch.int64, device="cpu")
        return drawn.to(like.device, kind)
    except (RuntimeError, TypeError, ValueError) as error:  # out of memory, or HIGH is out of range
        raise LoadError(
            f"expected an input that can be created, got {text!r} ({in_a_line(error)}); pass a smaller one"
        ) from error


def imported(name: str) -> Any:
    """Import package.module:attribute and return the attribute.

    Raises:
        LoadError: the import failed.
    """
    home, _, attributes = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as with `python -m`
    try:
        target: Any = importlib.import_module(home)
        for attribute in attributes.split("."):
            target = getattr(target, attribute)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        if place := raised_at(error):
            raise LoadError(
                f"expected a module that can be imported, got an error from {home!r} ({in_full(error)})"
                f"{place}; correct its code"
            ) from error
        raise LoadError(
            f"expected package.module:factory that can be imported, got {name!r} ({in_full(error)}); name "
            f"the module as in an import statement, then a name that it defines{_similar(error)}"
        ) from error
    return target


def _similar(error: BaseException) -> str:
    """Return the closest existing name for an attribute that does not exist, or ""."""
    name = error.name if isinstance(error, AttributeError) else None
    return did_you_mean(name, dir(error.obj)) if name else ""


def _from_factory(name: str, on_meta: bool) -> nn.Module:
    attribute = imported(name)
    is_factory = callable(attribute) and not isinstance(attribute, nn.Module)
    model = _called(attribute, name, on_meta) if is_factory else attribute
    if not isinstance(model, nn.Module):
        returns = "name a model, or a function that returns one"
        hint = "pass inputs by --input" if isinstance(model, tuple) else returns
        raise LoadError(f"expected a torch.nn.Module from {name!r}, got {type(model).__name__}; {hint}")
    check_module(model, "load")
    return model


def _called(factory: Any, name: str, on_meta: bool) -> Any:
    if on_meta:
        try:
            with torch.device("meta"):
                return factory()
        except (Exception, SystemExit):  # the factory reads weights or values: build it on a real device
            pass
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise LoadError(
            "expected a factory that can be called without arguments, got an error from "
            f"{name!r} ({in_a_line(error)}){raised_at(error)}; correct it, or name another function"
        ) from error
