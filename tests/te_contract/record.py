"""Write down what te_transform relies on in Transformer Engine, as the TE that is installed here has it.

    python tests/te_contract/record.py

writes contract.json beside this file; it needs TE, and no GPU. tests/test_te_contract.py holds the torch
backend and backends/te.py to that file, on any machine: record a new TE, and `git diff` is what it changed.
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
from te_transform.backends import torch as plain

FILE = Path(__file__).with_name("contract.json")

MODULES = (
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
)
FUNCTIONS = (
    "transformer_engine.pytorch.Linear.init_fp8_metadata",
    "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb",
    "transformer_engine.pytorch.autocast",
    "transformer_engine.pytorch.checkpoint",
    "transformer_engine.pytorch.fp8_autocast",  # before TE 2.8
    "transformer_engine.pytorch.is_fp8_available",
    "transformer_engine.pytorch.is_fp8_block_scaling_available",
    "transformer_engine.pytorch.is_mxfp8_available",
    "transformer_engine.pytorch.make_graphed_callables",
    "transformer_engine.pytorch.parallel_cross_entropy",
    "transformer_engine.pytorch.quantized_model_init",
)
RECIPES = ("DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling")
_STATE = "transformer_engine.pytorch.quantization.FP8GlobalStateManager"
ASKED_FOR = (  # by te.py, in strings, because not every TE has them
    f"{_STATE}.quantization_state.autocast_depth",
    f"{_STATE}.FP8_AUTOCAST_DEPTH",
)
FUSED = ("Linear", "LayerNormLinear", "LayerNormMLP")  # what backends/te.py has subclasses of

IN, OUT = 32, 48  # two sizes, so that a transposed weight shows
_NORMS = [
    {"eps": 1e-5, "normalization": normalization, "zero_centered_gamma": gamma}
    for normalization, gamma in product(("LayerNorm", "RMSNorm"), (False, True))
]
_ACTIVATIONS = sorted({*plain.ACTIVATIONS.values(), *plain.GATED_ACTIVATIONS.values()})


def argument_sets() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of modules, and arguments as the rules give them, for each of the forms that a module has."""
    for dtype, bias in product((torch.bfloat16, torch.float32), (True, False)):
        rest = {"bias": bias, "params_dtype": dtype}
        yield "Linear", {"in_features": IN, "out_features": OUT, **rest}
    rest = {"params_dtype": torch.bfloat16}
    for norm, bias in product(_NORMS, (True, False)):
        yield "LayerNormLinear", {"in_features": IN, "out_features": OUT, "bias": bias, **norm, **rest}
    for norm, bias, activation in product(_NORMS, (True, False), _ACTIVATIONS):
        form = {"activation": activation, "bias": bias, **norm, **rest}
        yield "LayerNormMLP", {"hidden_size": IN, "ffn_hidden_size": OUT, **form}


def title(name: str, arguments: dict[str, Any]) -> str:
    """An argument set as it is written in Python: its key in the file."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def built(backend: Any, name: str, arguments: dict[str, Any]) -> nn.Module:
    """The backend's module of this name, on meta, as the rules build it."""
    # TE's modules ask for a GPU before they look at where they are to be
    with mock.patch("torch.cuda.is_available", return_value=True):
        return getattr(backend, name)(**arguments, device="meta")


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
    """What has this name in TE, or None."""
    try:
        return pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return None


# What backends/te.py uses, read off its source


def source(name: str) -> ast.Module:
    """The parsed text of te_transform/backends/NAME.py."""
    return ast.parse(Path(backends.__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))


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


def read_of_modules() -> dict[str, set[str]]:
    """TE's module -> the attributes that te.py, and the forward it borrows from torch.py, read of it."""
    own, borrowed = source("te"), source("torch")
    of_any = {node.attr for node in _attributes(own, "fused", "m", "module")}  # in functions of any module
    found = {}
    for name in FUSED:
        parts = [_class(own, "_Fused"), _class(own, name), *_methods(borrowed, name)]
        read = {node.attr for part in parts for node in _attributes(part, "self")} | of_any
        found[name] = read - given_to_modules(name) - set(dir(nn.Module()))
    return found


def given_to_modules(name: str) -> set[str]:
    """What te.py's own class has: methods, variables, and what it sets on itself."""
    found = set()
    for part in (_class(source("te"), "_Fused"), _class(source("te"), name)):
        for node in part.body:
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        found |= {node.attr for node in _attributes(part, "self") if isinstance(node.ctx, ast.Store)}
    return found


def _methods(tree: ast.Module, name: str) -> Iterator[ast.FunctionDef]:
    """All but __init__ of a class of torch.py, and of its base: te.py's classes have TE's __init__."""
    part = _class(tree, name)
    bases = [base.id for base in part.bases if isinstance(base, ast.Name)]
    for owner in (part, *(_class(tree, base) for base in bases)):
        yield from (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name != "__init__")


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _attributes(tree: ast.AST, *of: str) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in of:
            yield node


# The file


def contract() -> dict[str, Any]:
    """Everything, from the TE that can be imported here."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # defaults are read from there
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.module import layernorm_mlp

    forms = {title(name, given): built(te, name, given) for name, given in argument_sets()}
    examples = {type(module).__name__: module for module in forms.values()}
    read = {
        f"{name}().{attribute}": hasattr(examples[name], attribute)
        for name, attributes in read_of_modules().items()
        for attribute in attributes
    }
    homes = {home for homes in read_of_te(source("te")).values() for home in homes}
    read |= {home: find(home) is not None for home in (*homes, *ASKED_FOR)}
    return {
        "transformer_engine": version("transformer_engine"),
        "modules": {
            name: {"__init__": signature(getattr(te, name)), "forward": signature(getattr(te, name).forward)}
            for name in MODULES
        },
        "functions": {name: signature(find(name)) for name in FUNCTIONS},
        "recipes": {name: _fields(find(f"transformer_engine.common.recipe.{name}")) for name in RECIPES},
        "activations": sorted(layernorm_mlp._get_act_func_supported_list()),
        "parameters": {form: tensors(module) for form, module in forms.items()},
        "state_dict": {form: " ".join(module.state_dict()) for form, module in forms.items()},
        "read": dict(sorted(read.items())),
        "overridden": {name: sorted(_overridden(module)) for name, module in sorted(examples.items())},
    }


def _overridden(module: nn.Module) -> set[str]:
    """What te.py gives to a class of its own, and TE's module has too: one that is new may be an accident."""
    plain_module = nn.Module()
    given = given_to_modules(type(module).__name__)
    return {name for name in given if hasattr(module, name) and not hasattr(plain_module, name)}


def _fields(recipe: type) -> dict[str, str]:
    made = recipe()
    return {field.name: _text(getattr(made, field.name)) for field in dataclasses.fields(made)}


def text(found: dict[str, Any]) -> str:
    """The contract as it stands in the file: a line for each argument, form of a module, and name."""
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(contract()), encoding="utf-8")
    print(f"wrote {os.path.relpath(FILE)}")
