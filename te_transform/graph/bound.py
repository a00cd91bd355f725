"""Bind generated graph code to the functions of its nodes, so that later monkey patches have no effect.

fx generates code that calls PyTorch's functions by name, such as torch.nn.functional.softmax. A model may
hold the original function while another library replaces the function under that name. Generated code would
then call the replacement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen, PythonCode, _is_from_torch
from torch.fx.node import _get_qualified_name

# The functional API for ops and backends: a copy of torch.nn.functional, made at the first import.
F = ModuleType(torch.nn.functional.__name__)
vars(F).update(vars(torch.nn.functional))


class _Bound(CodeGen):
    """A code generator whose global `torch` resolves to the functions of the nodes."""

    def _gen_python_code(self, nodes: Iterable[fx.Node], *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        functions = (node.target for node in nodes if node.op == "call_function")
        code.globals["torch"] = _torch_with(frozenset(filter(_is_from_torch, functions)))
        return code


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """Return an executable module for the graph, with the submodules from `root`."""
    graph.set_codegen(_Bound())
    return fx.GraphModule(root, graph)


def bind(gm: fx.GraphModule) -> None:
    """Bind an existing GraphModule to the functions of its nodes."""
    gm.graph.set_codegen(_Bound())
    gm.recompile()


@cache  # dynamo keeps the code of deleted graphs: equal graphs share one module
def _torch_with(functions: frozenset[Any]) -> ModuleType:
    """Return a module that looks like torch and has these functions under their qualified names."""
    top = _like(torch)
    for function in functions:
        *path, name = _get_qualified_name(function).split(".")[1:]
        at = top
        for part in path:
            attribute = getattr(at, part)
            if not isinstance(attribute, ModuleType):
                break  # a class, or an operator with overloads: these are not monkey-patched
            at = vars(at).setdefault(part, _like(attribute))
        else:
            setattr(at, name, function)
    return top


def _like(module: ModuleType) -> ModuleType:
    """Return a module that looks up missing attributes in `module`.

    Attributes of modules have the lowest lookup cost.
    """
    twin = ModuleType(module.__name__)
    twin.__getattr__ = partial(getattr, module)
    return twin
