"""Models and inputs by what the command line is given."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.inputs import Inputs
from te_transform.runtime.console import in_a_line


class LoadError(ValueError):
    """There is no such model or input, or it cannot be built."""


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
        dtype: of a transformers model; None: what its config says.
        layers: how many a transformers model has; None: what its config says.
        trust_remote_code: run Python code that lies beside the config.

    Raises:
        LoadError: what was given, what is needed.
    """
    path = Path(name)
    if path.exists():
        return _from_config(path, on_meta, dtype, layers, trust_remote_code)
    if not all(name.partition(":")):
        raise LoadError(
            f"there is no file or folder {name!r}, and nothing is downloaded: a folder with a config.json, a "
            "config file, or package.module:factory is needed"
        )
    if layers is not None or dtype is not None:
        raise LoadError("a number of layers and a dtype are for configs: let the factory build them")
    return _from_factory(name, on_meta)


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
        drawn = torch.randn(sizes) if kind.is_floating_point else torch.randint(int(high or 2), sizes)
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
            f"{name!r} cannot be imported ({type(error).__name__}: {error}): package.module:factory is "
            "needed, the module as import names it"
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
            f"{name!r} failed ({in_a_line(error)}), a factory that can be called without arguments is needed"
        ) from error


def _from_config(
    path: Path, on_meta: bool, dtype: torch.dtype | None, layers: int | None, trust_remote_code: bool
) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise LoadError(f"{path} is read by transformers: pip install transformers") from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise LoadError(
            f"{path} has no config.json, a folder with one, a config file, or package.module:factory is "
            "needed"
        )
    told = _told(file, trust_remote_code)
    try:
        # by its folder, in which code is looked for; from elsewhere nothing is loaded
        home = file.parent if file.name == "config.json" else file
        config = transformers.AutoConfig.from_pretrained(
            home, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if layers is not None:
            _set_layers(config, layers)
        kind = _class_of(config, told.get("auto_map"))
        own: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        weights = _weights_in(path) if not on_meta and layers is None else None
        if weights is not None:
            own["trust_remote_code"] = trust_remote_code
            return _with_weights(path, kind, config, **weights, **own)
        with torch.device("meta") if on_meta else nullcontext():
            return _built(kind, config, trust_remote_code, own)
    except LoadError:
        raise
    except UnpicklingError as error:
        raise LoadError(
            f"{path} has weights that are more than tensors, to read them would run code: safetensors are "
            "needed"
        ) from error
    except Exception as error:
        said = " ".join(str(error).partition("\n\n")[0].split())  # transformers goes on in paragraphs
        raise LoadError(
            f"{file} gives no model ({type(error).__name__}: {said}): a config that transformers "
            f"{transformers.__version__} builds a model of is needed, or package.module:factory"
        ) from error


def _told(file: Path, trust_remote_code: bool) -> dict[str, Any]:
    """What a config says, if no code has to be run for it that is not trusted."""
    try:
        told = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise LoadError(
            f"{file} is no JSON ({error}), a config is needed: code is named as package.module:factory"
        ) from error
    if not isinstance(told, dict):
        raise LoadError(f"{file} has a {type(told).__name__}, the object of a config is needed")
    if "auto_map" in told and not trust_remote_code:
        raise LoadError(
            f"{file} names Python code of its own ({_names(told['auto_map'])}), which would be run: pass "
            f"--trust-remote-code if you trust it{_or_without(told)}"
        )
    return told


def _with_weights(path: Path, kind: Any, config: Any, **how: Any) -> nn.Module:
    import transformers

    if method := quantized_by(config):
        raise LoadError(
            f"{path} has weights that are quantized ({method}), floating point ones are needed: save the "
            "dequantized model, or give the config.json alone, for random weights"
        )
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    return kind.from_pretrained(path, config=config, local_files_only=True, **how)


def quantized_by(config: Any) -> str:
    """The method that a config of transformers says its weights are quantized by; "" where it says none."""
    told = getattr(config, "quantization_config", None)
    told = told if isinstance(told, dict) or told is None else vars(told)
    return str(told.get("quant_method", "by no named method")) if told else ""


def _weights_in(path: Path) -> dict[str, bool] | None:
    """How those beside a config are read: safetensors, else files of torch.save(), of tensors alone."""
    if any(path.glob("*.safetensors")):
        return {"use_safetensors": True}
    return {"use_safetensors": False, "weights_only": True} if any(path.glob("pytorch_model*.bin")) else None


def _names(code: Any) -> str:
    return ", ".join(sorted(code)) if isinstance(code, dict) else repr(code)


def _or_without(told: dict[str, Any]) -> str:
    """What else may be done where transformers has the kind of model itself, as it has most by now."""
    import transformers

    kind = told.get("model_type")
    named = told.get("architectures") or ["AutoModel"]
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if not known or not isinstance(named, list) or not hasattr(transformers, str(named[0])):
        return ""
    return f", or give a config without auto_map: transformers has {kind} itself"


def _class_of(config: Any, code: Any) -> Any:
    """The class that a config names, or what transformers makes of it where it names none; where it names
    code, the one of transformers' that loads that class from there."""
    import transformers

    name = (config.architectures or ["AutoModel"])[0]
    if isinstance(code, dict):
        loading = [auto for auto in code if auto.startswith("AutoModel") and hasattr(transformers, auto)]
        fitting = [auto for auto in loading if str(code[auto]).endswith(f".{name}")]
        return getattr(transformers, [*fitting, *loading, "AutoModel"][0])
    if not hasattr(transformers, name):
        raise LoadError(
            f"the config names the class {name}, which transformers {transformers.__version__} does not "
            "have: the name of one that it has is needed under architectures, or a newer transformers"
        )
    kind = getattr(transformers, name)
    if not (hasattr(kind, "_from_config") or hasattr(kind, "from_config")):
        raise LoadError(f"the config names {name} under architectures, the class of a model is needed there")
    return kind


def _built(kind: Any, config: Any, trust_remote_code: bool, own: dict[str, Any]) -> nn.Module:
    if hasattr(kind, "_from_config"):
        return kind._from_config(config, **own)
    return kind.from_config(config, trust_remote_code=trust_remote_code, **own)


def _set_layers(config: Any, layers: int) -> None:
    text = config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        raise LoadError(f"a {type(config).__name__} has no number of layers to set")
    if layers > text.num_hidden_layers:
        raise LoadError(
            f"the config has {text.num_hidden_layers} layers, {layers} are asked for: as many or fewer are "
            "needed, or another config"
        )
    try:
        text.num_hidden_layers = layers
    except NotImplementedError as error:  # there are several numbers
        raise LoadError(
            f"a {type(config).__name__} has no one number of layers to set ({error}): edit the config"
        ) from error
    for name in ("decoder_layers", "num_decoder_layers"):
        if hasattr(text, name):
            setattr(text, name, layers)
    if vars(text).get("layer_types"):  # else it follows from the number
        text.layer_types = text.layer_types[:layers]
