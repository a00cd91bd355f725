"""Read the config.json of a model, but only the entries that cannot name code, a file or a repository."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_ATTENTION = ("eager", "sdpa", "flex_attention")  # other values may load a kernel from the hub
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_CHOICES = {
    "attn_implementation": _ATTENTION,
    "_attn_implementation": _ATTENTION,
    "experts_implementation": _EXPERTS,
    "_experts_implementation": _EXPERTS,
}
_NUMBERS_ONLY = ("model_args", "detectron2_config_args")  # arguments for functions of timm and detectron2
_ORIGIN_ENTRIES = ("name_or_path", "_name_or_path", "_commit_hash")  # where the config came from
_ANY_TEXT = ("id2label", "label2id")  # names of classes
# entries that transformers reads for many configs, though they are not fields of the class
_LEGACY = {"torch_dtype", "rope_scaling", "rope_parameters", "layer_types", "per_layer_config", "model_type"}
_PLACE = re.compile(r"[\w.~][/:\\]|[/:\\][\w.~]")  # part of a path, of a URL or of a repository's name


class LoadError(ValueError):
    """The error for a model or an input that does not exist or cannot be built."""


@dataclass
class ConfigFile:
    """The entries read from a config.json.

    `unread` lists the paths of skipped entries. `quantized` is the quantization method of the weights
    according to the config, or "".
    """

    file: Path
    entries: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    quantized: str = ""

    def notes(self) -> Iterator[str]:
        """Yield a sentence on skipped entries, if there are any."""
        if self.unread:
            yield (
                f"{self.file.name} has entries that were skipped, because they could name code or files "
                f"({', '.join(self.unread)}): pass --trust-remote-code to read them"
            )


def read_config(file: Path, trust_remote_code: bool = False) -> ConfigFile:
    """Read a config; read all of it if `trust_remote_code`.

    Raises:
        LoadError: the file is not a config, or an entry names code.
    """
    try:
        entries = _json(file)
        if trust_remote_code:
            return ConfigFile(file, entries, quantized=_method(entries.get("quantization_config")))
        if "pretrained_cfg" in entries:  # as timm writes it
            entries.setdefault("model_type", "timm_wrapper")
        config = ConfigFile(file)
        config.entries = dict(_config_entries(config, entries, "", _config_class(entries), set()))
    except RecursionError as error:
        raise LoadError(
            f"expected a config in {file}, got JSON that is nested too deeply; pass another config"
        ) from error
    return config


def _json(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise LoadError(
            f"expected a config in {file}, got no JSON ({error}); to pass code, use package.module:factory, "
            "and to pass weights, name their folder"
        ) from error
    if not isinstance(entries, dict):
        raise LoadError(f"expected a JSON object in {file}, got a {type(entries).__name__}")
    return entries


def _config_entries(
    config: ConfigFile, entries: dict[str, Any], path: str, kind: Any, known: set[str] | None
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config that are read.

    Args:
        known: The names to read besides the fields of the class; None to read all names.
    """
    known = None if known is None else known | _LEGACY | _names_of(kind)
    for name, value in entries.items():
        at = f"{path}.{name}" if path else name
        if name == "auto_map":
            _refuse_code(config.file, value, entries)
        elif name == "quantization_config":
            config.quantized = config.quantized or _method(value)
        elif name in _ORIGIN_ENTRIES:
            continue
        elif known is None or name in known or _is_numbers(value) or _names_code(name):
            yield name, _read_entry(config, name, value, at, kind)
        else:
            config.unread.append(at)


def _read_entry(config: ConfigFile, name: str, value: Any, path: str, kind: Any) -> Any:
    """Return the value of an entry of a config of class `kind`, after the checks that its name needs."""
    if _is_numbers(value) or name in _ANY_TEXT:
        return value
    if _names_code(name):
        _check_text(config.file, path, name, value, kind)
        return value
    return _read_value(config, value, path, _part_of(kind, name))


def _names_code(name: str) -> bool:
    """Return True if transformers turns the text of this entry into a function, a dtype or a model."""
    return name in _CHOICES or name.endswith("dtype") or name in _NUMBERS_ONLY or name == "backbone"


def _read_value(config: ConfigFile, value: Any, path: str, part: Any) -> Any:
    """Return a value with the entries that are read of each config in it; `part` is its class, if known."""
    if isinstance(value, list):
        return [_read_value(config, each, f"{path}.{index}", part) for index, each in enumerate(value)]
    if isinstance(value, dict):
        part = _config_class(value) or part
        return dict(_config_entries(config, value, path, part, None if part is None else set()))
    _check_place(config.file, path, value)
    return value


def _refuse_code(file: Path, code: Any, entries: dict[str, Any]) -> None:
    if code:
        names = ", ".join(sorted(code)) if isinstance(code, dict) else repr(code)
        raise LoadError(
            f"expected a config without code, got {file}, which names Python code ({names}); pass "
            f"--trust-remote-code if you trust it{_or_without(entries)}"
        )


def _or_without(entries: dict[str, Any]) -> str:
    """Return an alternative to running code, if transformers has a class for the model."""
    import transformers

    named = entries.get("architectures") or ["AutoModel"]
    if (
        _config_class(entries) is None
        or not isinstance(named, list)
        or not hasattr(transformers, str(named[0]))
    ):
        return ""
    return f", or pass a config without auto_map: transformers itself supports {entries['model_type']}"


def _check_text(file: Path, at: str, name: str, value: Any, kind: Any) -> None:
    """Check an entry that transformers turns into a function, a dtype or a model.

    Raises:
        LoadError: the entry has a value that could name code or a repository.
    """
    for text in _texts(value):
        if name in _CHOICES:
            is_right, needed = text in _CHOICES[name], f"one of {', '.join(_CHOICES[name])}"
        elif name.endswith("dtype"):
            is_right, needed = _is_dtype(text), "the name of a torch.dtype, such as bfloat16"
        elif name == "backbone":  # any other name is looked up at the hub
            is_right = getattr(kind, "model_type", "") == "timm_backbone" and not _PLACE.search(text)
            needed = "a backbone_config in its place"
        else:
            is_right, needed = False, "numbers alone"
        if not is_right:
            raise LoadError(f"{_refusal_text(file, at, needed, text)}")


def _check_place(file: Path, at: str, value: Any) -> None:
    if isinstance(value, str) and _PLACE.search(value):
        raise LoadError(f"{_refusal_text(file, at, 'a name without path or repository', value)}")


def _refusal_text(file: Path, at: str, needed: str, text: str) -> str:
    return (
        f"expected {needed} for {at} in {file}, got {text!r}; change it, or pass --trust-remote-code if you "
        "trust it"
    )


def _is_numbers(value: Any) -> bool:
    """Return True if a value consists of numbers, flags and nulls, which cannot name anything."""
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return not value or isinstance(value, (bool, int, float))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def _method(quantization: Any) -> str:
    """Return the method of a quantization_config, or "" if the entry is empty."""
    named = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return str(named or "by no named method") if quantization else ""


def _config_class(entries: dict[str, Any]) -> Any:
    """Return the transformers class of a config, or None."""
    from transformers import CONFIG_MAPPING

    kind = entries.get("model_type")
    return CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in CONFIG_MAPPING else None


def _part_of(kind: Any, name: str) -> Any:
    """Return the class of a nested config by its name, or None if the class is unknown."""
    part = getattr(kind, "sub_configs", {}).get(name)
    return part if hasattr(part, "__dataclass_fields__") else None


def _names_of(kind: Any) -> set[str]:
    """Return the entries that a config class reads: its fields, and the names used in its __post_init__."""
    if kind is None:
        return set()
    names = {each.name for each in fields(kind)} | set(kind.attribute_map) | set(kind.sub_configs)
    code = getattr(inspect.unwrap(kind.__post_init__), "__code__", None)
    return names | {each for each in getattr(code, "co_consts", ()) if isinstance(each, str)}
