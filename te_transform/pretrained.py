"""Build a transformers model from its config.json, and from the weights in the same folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from te_transform.config_file import ConfigFile, LoadError, read_config
from te_transform.graph.errors import in_full, message_of

_WEIGHT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)


def from_config(
    path: Path, on_meta: bool, dtype: torch.dtype | None, layers: int | None, trust_remote_code: bool
) -> nn.Module:
    """Build the model of a folder with a config.json, or of a config file; load() documents the arguments.

    Raises:
        LoadError: the model cannot be built; the message says what was expected.
    """
    try:
        import transformers
    except ImportError as error:
        raise LoadError(f"expected transformers to read {path}, got none; pip install it") from error
    file = config_of(path)
    config_file = read_config(file, trust_remote_code)
    weights = _weights_in(path) if not on_meta and layers is None else None
    if weights is not None:
        _check_weights(path, config_file)
    home = _as_it_lies(file) if trust_remote_code else _copied(path, config_file, weights is not None)
    try:
        with home as folder:
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
            config.name_or_path = str(path)
            if layers is not None:
                _set_layers(config, layers)
            kind = _model_class(config, config_file.entries.get("auto_map"))
            own: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
            if weights is not None:
                own["trust_remote_code"] = trust_remote_code
                return _with_weights(folder, path, kind, config, **weights, **own)
            with torch.device("meta") if on_meta else nullcontext():
                return _build_from_config(kind, config, trust_remote_code, own)
    except LoadError:
        raise
    except UnpicklingError as error:
        raise LoadError(
            f"expected weights without code in {path}, got a pickle of more than tensors, which would run "
            "code; save safetensors"
        ) from error
    except Exception as error:
        raise LoadError(
            f"expected a config from which transformers {transformers.__version__} can build a model, got "
            f"{file} ({_first_paragraph(error)}); pass such a config, or package.module:factory"
        ) from error


def _first_paragraph(error: Exception) -> str:
    """Return the class of an error and the first paragraph of its message: transformers adds more."""
    paragraph, *_ = in_full(error).partition("\n\n")
    return " ".join(paragraph.split())


def config_of(path: Path) -> Path:
    """Return the config.json of a folder, or the file itself.

    Raises:
        LoadError: the folder has no config.json.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise LoadError(
            "expected a folder with a config.json, a config file, or package.module:factory, got "
            f"{path} without a config.json; name a folder as save_pretrained() writes it"
        )
    return file


@contextmanager
def _as_it_lies(file: Path) -> Iterator[Path]:
    """Yield the path that transformers reads if it may run the code next to a config."""
    yield file.parent if file.name == "config.json" else file


@contextmanager
def _copied(path: Path, config_file: ConfigFile, with_weights: bool) -> Iterator[Path]:
    """Yield a folder that contains only the accepted entries of a config, and the weights.

    The hub is set offline meanwhile, so that defaults of the config cannot download anything.
    """
    from huggingface_hub import constants

    was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        with TemporaryDirectory() as folder:
            home = Path(folder)
            (home / "config.json").write_text(json.dumps(config_file.entries), "utf-8")
            for pattern in _WEIGHT_FILES if with_weights else ():
                for file in path.glob(pattern):
                    (home / file.name).symlink_to(file.resolve())
            yield home
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def _check_weights(path: Path, config_file: ConfigFile) -> None:
    """Raise unless the weights in a folder belong to a whole model and are in floating point.

    Raises:
        LoadError: the weights are quantized, or belong to an adapter.
    """
    if config_file.quantized:
        raise LoadError(
            f"expected floating-point weights in {path}, got quantized ones ({config_file.quantized}); save "
            "the dequantized model, or pass only the config.json, for random weights"
        )
    if (path / "adapter_config.json").exists():
        raise LoadError(
            f"expected the weights of a whole model in {path}, got an adapter (adapter_config.json); merge "
            "it into its base model and save that, or load both in package.module:factory"
        )


def _with_weights(folder: Path, path: Path, kind: Any, config: Any, **how: Any) -> nn.Module:
    import transformers

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        model = kind.from_pretrained(folder, config=config, local_files_only=True, **how)
    except UnpicklingError:
        raise
    except Exception as error:
        raise LoadError(
            f"expected a config and weights that transformers {transformers.__version__} can load, got "
            f"{path} ({_first_paragraph(error)}); pass such a folder, or only its config"
        ) from error
    model.name_or_path = model.config.name_or_path = str(path)
    return model


def _weights_in(path: Path) -> dict[str, bool] | None:
    """Return the loading options for the weights next to a config, or None without weights.

    safetensors are preferred; files of torch.save() may contain only tensors.
    """
    if any(path.glob("*.safetensors")):
        return {"use_safetensors": True}
    return {"use_safetensors": False, "weights_only": True} if any(path.glob("pytorch_model*.bin")) else None


def _model_class(config: Any, code: Any) -> Any:
    """Return the model class that a config names, or AutoModel if it names none.

    If the config names code, return the auto class of transformers that loads the model class from the code.
    """
    import transformers

    name = (config.architectures or ["AutoModel"])[0]
    if isinstance(code, dict):
        loading = [auto for auto in code if auto.startswith("AutoModel") and hasattr(transformers, auto)]
        fitting = [auto for auto in loading if str(code[auto]).endswith(f".{name}")]
        return getattr(transformers, [*fitting, *loading, "AutoModel"][0])
    if not hasattr(transformers, name):
        raise LoadError(
            f"expected under architectures a class of transformers {transformers.__version__}, got {name}; "
            "name another class, or install a newer transformers"
        )
    kind = getattr(transformers, name)
    if not (hasattr(kind, "_from_config") or hasattr(kind, "from_config")):
        raise LoadError(f"expected a model class under architectures in the config, got {name}")
    return kind


def _build_from_config(kind: Any, config: Any, trust_remote_code: bool, own: dict[str, Any]) -> nn.Module:
    if hasattr(kind, "_from_config"):
        return kind._from_config(config, **own)
    return kind.from_config(config, trust_remote_code=trust_remote_code, **own)


def _set_layers(config: Any, layers: int) -> None:
    text = config.get_text_config()
    if not hasattr(text, "num_hidden_layers"):
        raise LoadError(f"expected a config with num_hidden_layers, got a {type(config).__name__} without")
    if layers > text.num_hidden_layers:
        raise LoadError(
            f"expected at most {text.num_hidden_layers} layers, as in the config, got {layers}; pass fewer, "
            "or another config"
        )
    try:
        text.num_hidden_layers = layers
    except NotImplementedError as error:  # the config has several numbers of layers
        raise LoadError(
            f"expected a config with one number of layers, got a {type(config).__name__} "
            f"({message_of(error)}); edit the config"
        ) from error
    for name in ("decoder_layers", "num_decoder_layers"):
        if hasattr(text, name):
            setattr(text, name, layers)
    if vars(text).get("layer_types"):  # otherwise computed from the number of layers
        text.layer_types = text.layer_types[:layers]
