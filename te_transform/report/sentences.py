"""The sentences that the code refuses with and raises, read from the code itself."""

from __future__ import annotations

import ast
import inspect as python
from collections.abc import Iterator
from types import ModuleType

from te_transform.plan.rule import Rule

PLAN = "te_transform.plan"  # where rules ask for reasons


def told_by(rule: Rule) -> list[str]:
    """What the file of a rule says of it: its docstring, and the texts that stand between its parts."""
    home = python.getmodule(rule.refuse)
    texts = [node.value.value for node in _tree(home).body if _is_text(node)]
    return [python.cleandoc(text) for text in texts]


def refused(rule: Rule) -> list[str]:
    """The sentences that the `refuse` of a rule yields, or a module that it asks."""
    home = python.getmodule(rule.refuse)
    asked = [held for held in vars(home).values() if python.ismodule(held) and held.__package__ == PLAN]
    return yielded(home, *asked)


def yielded(*modules: ModuleType) -> list[str]:
    """The texts that functions of the modules yield, "..." for what is only known of a model."""
    nodes = (node for module in modules for node in ast.walk(_tree(module)))
    found = (_text(node.value) for node in nodes if isinstance(node, ast.Yield))
    return list(dict.fromkeys(filter(None, found)))


def raised(source: str) -> Iterator[tuple[str, str]]:
    """The errors that a file raises, or makes to be raised: the name of the class, and the sentence where it
    is written there."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    homes = {inner: outer.name for outer in classes for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        made = node.value if isinstance(node, ast.Return) else None
        error = node.exc if isinstance(node, ast.Raise) else made
        if not isinstance(error, ast.Call) or not error.args:
            continue
        called = ast.unparse(error.func)
        name = homes.get(node, called) if called == "cls" else called
        is_error = not name.startswith("_") and (made is None or name.endswith("Error"))
        if is_error and any(map(str.isalpha, _text(error.args[0]))):
            yield name, _text(error.args[0])


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(python.getsource(module))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and bool(_text(node.value))


def _text(node: ast.expr | None) -> str:
    """A text with "..." for what is only known later; "" where that is none."""
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + (_text(node.right) or "...")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
