"""Read the sentences of refusals from the source code."""

from __future__ import annotations

import ast
import inspect as python
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
    texts = (literal_text(node.value) for node in nodes if isinstance(node, ast.Yield))
    return list(dict.fromkeys(filter(None, texts)))


def literal_text(node: ast.expr | None) -> str:
    """Return a text with "..." for values known only at run time, or "" if the expression is not a text."""
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else "..." for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return literal_text(node.left) + (literal_text(node.right) or "...")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _tree(module: ModuleType | None) -> ast.Module:
    try:
        return ast.parse(python.getsource(module))
    except (OSError, TypeError):  # code without a file, for example from exec()
        return ast.parse("")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and bool(literal_text(node.value))
