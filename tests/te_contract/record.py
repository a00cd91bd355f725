"""Write down what te_transform relies on in Transformer Engine, as the TE that is installed here has it.

    python tests/te_contract/record.py

writes contract.json beside this file; it needs TE, and no GPU. tests/test_te_contract.py holds
backends/te/, and the stand-in that it is tested on, to that file, on any machine: record a new TE, and
`git diff` is what it changed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script finds what lies beside it, and no more

from te_transform import backends
from te_transform.backends import plain

FILE = Path(__file__).with_name("contract.json")

FUSED = ("Linear", "LayerNormLinear", "LayerNormMLP")  # whose modules backends/te/ builds
FUNCTIONS = (
    "transformer_engine.pytorch.Linear.init_fp8_metadata",
    "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb",
    "transformer_engine.pytorch.autocast",
    "transformer_engine.pytorch.cpp_extensions.fused_attn.fused_attn_bwd",
    "transformer_engine.pytorch.cpp_extensions.fused_attn.fused_attn_fwd",
    "transformer_engine.pytorch.is_fp8_available",
    "transformer_engine.pytorch.is_fp8_block_scaling_available",
    "transformer_engine.pytorch.is_mxfp8_available",
    "transformer_engine.pytorch.module.layernorm_mlp._act_func",
    "transformer_engine.pytorch.parallel_cross_entropy",
    "transformer_engine.pytorch.tensor.float8_tensor.Float8Quantizer",
    "transformer_engine.pytorch.tensor.float8_tensor.Float8Tensor",
)
RECIPES = ("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
_STATE = "transformer_engine.pytorch.quantization.FP8GlobalStateManager"
ASKED_FOR = (  # by te/, in strings, because not every TE has them
    f"{_STATE}.quantization_state.autocast_depth",
    f"{_STATE}.FP8_AUTOCAST_DEPTH",
    f"{_STATE}.quantization_state.global_amax_buffer",
    f"{_STATE}.quantization_state.global_amax_history_buffer",
    f"{_STATE}.quantization_state.global_scale_buffer",
)
WRITTEN = {
    "fuse_wgrad_accumulation",
    "primary_weights_in_fp8",
}  # to a module's attributes, by te/, in a call's keywords

IN, OUT = 32, 48  # two sizes, so that a transposed weight shows
_NORMS = [
    {"eps": 1e-5, "normalization": normalization, "zero_centered_gamma": gamma}
    for normalization, gamma in product(("LayerNorm", "RMSNorm"), (False, True))
]
_ACTIVATIONS = sorted({*plain.ACTIVATIONS.values(), *plain.GATED_ACTIVATIONS.values()})


def argument_sets() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of modules, and arguments as te/ gives them, for each of the forms that a module has."""
    for dtype, bias in product((torch.bfloat16, torch.float32), (True, False)):
        rest = {"bias": bias, "params_dtype": dtype}
        yield "Linear", {"in_features": IN, "out_features": OUT, **rest}
    rest = {"params_dtype": torch.bfloat16}
    for norm, bias in product(_NORMS, (True, False)):
        yield "LayerNormLinear", {"in_features": IN, "out_features": OUT, "bias": bias, **norm, **rest}
    returned = {**_NORMS[0], "return_layernorm_output": True, "bias": True, **rest}
    yield "LayerNormLinear", {"in_features": IN, "out_features": OUT, **returned}
    yield "LayerNormMLP", {"hidden_size": IN, "ffn_hidden_size": OUT, "activation": "gelu", **returned}
    for norm, bias, activation in product(_NORMS, (True, False), _ACTIVATIONS):
        form = {"activation": activation, "bias": bias, **norm, **rest}
        yield "LayerNormMLP", {"hidden_size": IN, "ffn_hidden_size": OUT, **form}


def title(name: str, arguments: dict[str, Any]) -> str:
    """An argument set as it is written in Python: its key in the file."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def built(name: str, arguments: dict[str, Any]) -> nn.Module:
    """TE's module of this name, on meta, as te/ builds it."""
    import transformer_engine.pytorch as te

    # TE's modules ask for a GPU before they look at where they are to be
    with mock.patch("torch.cuda.is_available", return_value=True):
        return getattr(te, name)(**arguments, device="meta")


def tensors(module: nn.Module) -> str:
    """The module's parameters, in its order: `weight bfloat16[48, 32], bias bfloat16[48]`."""
    found = module.named_parameters()
    return ", ".join(f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for name, p in found)


def signature(function: Callable[..., Any] | None) -> dict[str, str] | None:
    """Parameter -> its default, in order; None where there is no such function."""
    if function is None:
        return None
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not any(name.startswith("*") for name in found):
            found["*"] = "by name only"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "any" if stars else "required"
        if parameter.default is not parameter.empty:
            default = _text(parameter.default)
        found[stars + parameter.name] = default
    return found


def _text(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def find(dotted: str) -> Any:
    """Return the object of this name in TE, or None."""
    try:
        return pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return None


# What backends/te/ uses, read off its source


def source() -> ast.Module:
    """The parsed files of te_transform/backends/te/, one below the other."""
    files = sorted(Path(backends.__file__).with_name("te").glob("*.py"))
    parsed = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return ast.Module([statement for file in parsed for statement in file.body], type_ignores=[])


def imported(tree: ast.Module) -> dict[str, list[str]]:
    """Name in the file -> what it is in TE; several where an import stands in for one that fails."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            if f"{inside}{name.name}".startswith("transformer_engine."):
                found.setdefault(name.asname or name.name, []).append(f"{inside}{name.name}")
    return found


def read_of_te(tree: ast.Module) -> dict[str, list[str]]:
    """What the file reads of the names it imports, `te.autocast` -> the names in TE it may be."""
    names = imported(tree)
    found = dict(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            homes = names[node.value.id]
            found[f"{node.value.id}.{node.attr}"] = [f"{home}.{node.attr}" for home in homes]
    return found


def read_of_modules(tree: ast.Module) -> set[str]:
    """The attributes of TE's modules that te/ reads and writes, beside parameters."""
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {
        n.attr for n in holders if isinstance(n.value, ast.Attribute) and n.value.attr in ("module", "built")
    }
    return (read | WRITTEN) - set(dir(nn.Module()))


# The file


def contract() -> dict[str, Any]:
    """Everything, from the TE that can be imported here."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # defaults are read from there
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module import layernorm_mlp

    forms = {title(name, given): built(name, given) for name, given in argument_sets()}
    examples = {type(module).__name__: module for module in forms.values()}
    read = {
        f"{name}().{attribute}": hasattr(module, attribute)
        for name, module in examples.items()
        for attribute in read_of_modules(source())
    }
    homes = {home for homes in read_of_te(source()).values() for home in homes}
    read |= {home: find(home) is not None for home in (*homes, *ASKED_FOR)}
    return {
        "transformer_engine": version("transformer_engine"),
        "modules": {
            name: {"__init__": signature(getattr(te, name)), "forward": signature(getattr(te, name).forward)}
            for name in FUSED
        },
        "functions": {name: signature(find(name)) for name in FUNCTIONS},
        "recipes": {name: _fields(find(f"transformer_engine.common.recipe.{name}")) for name in RECIPES},
        "activations": sorted(layernorm_mlp._get_act_func_supported_list()),
        "parameters": {form: tensors(module) for form, module in forms.items()},
        "read": dict(sorted(read.items())),
    }


def _fields(recipe: type) -> dict[str, str]:
    made = recipe()
    return {field.name: _text(getattr(made, field.name)) for field in dataclasses.fields(made)}


def text(found: dict[str, Any]) -> str:
    """The contract as it stands in the file: a line for each argument, form of a module, and name."""
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(contract()), encoding="utf-8")
    print(f"wrote {os.path.relpath(FILE)}")
