"""Graphs that run call the very functions of their nodes, whatever stands under the names of these later.

fx writes a graph down as code, in which PyTorch's functions are called by name: torch.nn.functional.softmax.
Where a model holds the function itself, and somebody puts another one in its place, such code would call the
other one.
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

# What ops and backends, which stand in graphs for such functions, call: they are those of the first import.
F = ModuleType(torch.nn.functional.__name__)
vars(F).update(vars(torch.nn.functional))


class _Bound(CodeGen):
    """Prints the code that fx prints, for which `torch` leads to the functions of the nodes."""

    def _gen_python_code(self, nodes: Iterable[fx.Node], *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        functions = (node.target for node in nodes if node.op == "call_function")
        code.globals["torch"] = _torch_with(frozenset(filter(_is_from_torch, functions)))
        return code


def module_of(root: Any, graph: fx.Graph) -> fx.GraphModule:
    """The graph as a module that runs, with the modules that it calls from `root`."""
    graph.set_codegen(_Bound())
    return fx.GraphModule(root, graph)


def bind(gm: fx.GraphModule) -> None:
    """Let a module that fx has made already run so."""
    gm.graph.set_codegen(_Bound())
    gm.recompile()


@cache  # dynamo keeps the code of graphs that are gone: equal ones are to keep one module
def _torch_with(functions: frozenset[Any]) -> ModuleType:
    """A module that is torch for all that reads it, and has these functions where they were found."""
    top = _like(torch)
    for function in functions:
        *path, name = _get_qualified_name(function).split(".")[1:]
        at = top
        for part in path:
            found = getattr(at, part)
            if not isinstance(found, ModuleType):
                break  # a class, or an operator that has overloads: nobody puts others in the place of these
            at = vars(at).setdefault(part, _like(found))
        else:
            setattr(at, name, function)
    return top


def _like(module: ModuleType) -> ModuleType:
    """A module that looks up in another what it does not have; modules are what attributes are read of at no
    cost."""
    made = ModuleType(module.__name__)
    made.__getattr__ = partial(getattr, module)
    return made
