"""Read the sentences of refusals and errors from the source code."""

from __future__ import annotations

import ast
import inspect as python
from collections.abc import Iterator
from types import ModuleType

from te_transform.plan.rule import Rule

PLAN = "te_transform.plan"  # the package whose modules share reasons among rules


def told_by(rule: Rule) -> list[str]:
    """Return the texts in the file of a rule: its docstring, and the strings between its definitions."""
    home = python.getmodule(rule.refuse)
    texts = [node.value.value for node in _tree(home).body if _is_text(node)]
    return [python.cleandoc(text) for text in texts]


def refused(rule: Rule) -> list[str]:
    """Return the sentences yielded in the file of a rule, and in the modules of plan/ that it imports."""
    home = python.getmodule(rule.refuse)
    read = [each for each in getattr(home, "__dict__", {}).values() if python.ismodule(each)]
    return yielded(home, *(module for module in read if module.__package__ == PLAN))


def yielded(*modules: ModuleType | None) -> list[str]:
    """Return the texts that functions of the modules yield, with "..." for values known only at run time."""
    nodes = (node for module in modules for node in ast.walk(_tree(module)))
    texts = (_text(node.value) for node in nodes if isinstance(node, ast.Yield))
    return list(dict.fromkeys(filter(None, texts)))


def raised(source: str) -> Iterator[tuple[str, str]]:
    """Yield the errors that a file raises or returns: the class name, and the sentence if it is a literal."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    homes = {inner: outer.name for outer in classes for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        returned = node.value if isinstance(node, ast.Return) else None
        error = node.exc if isinstance(node, ast.Raise) else returned
        if not isinstance(error, ast.Call) or not error.args:
            continue
        called = ast.unparse(error.func)
        name = homes.get(node, called) if called == "cls" else called
        is_error = not name.startswith("_") and (returned is None or name.endswith("Error"))
        if is_error and any(map(str.isalpha, _text(error.args[0]))):
            yield name, _text(error.args[0])


def _tree(module: ModuleType | None) -> ast.Module:
    try:
        return ast.parse(python.getsource(module))
    except (OSError, TypeError):  # code without a file, for example from exec()
        return ast.parse("")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and bool(_text(node.value))


def _text(node: ast.expr | None) -> str:
    """Return a text with "..." for values known only at run time, or "" if the expression is not a text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + (_text(node.right) or "...")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
