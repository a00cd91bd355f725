"""The first rule of the house's language: how docstrings begin."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FILES = sorted(
    file
    for folder in ("te_transform", "passes", "examples", "benchmarks", "docs")
    for file in (ROOT / folder).rglob("*.py")
)
NEVER = {"As", "How", "Let", "Of", "That", "Those", "What", "Where", "Whether", "Which", "Who", "Why"}
# a function does something: its docstring begins with an imperative verb
NO_VERBS = {
    "A", "All", "An", "Each", "It", "None", "One", "Returns", "The", "There", "These", "This", "Yields",
}  # fmt: skip


def beginnings(file: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the first word of each docstring, and True if a function has it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
            told := ast.get_docstring(node)
        ):
            properties = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]
            is_value = any(name.endswith("property") for name in properties)
            line = getattr(node, "lineno", 1)
            yield line, told.split()[0].strip(",.:;`"), isinstance(node, ast.FunctionDef) and not is_value


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(file: Path) -> None:
    wrong = [
        f"{file}:{line} begins with {word!r}"
        for line, word, is_function in beginnings(file)
        if word in NEVER or (is_function and word in NO_VERBS)
    ]
    assert not wrong, "\n".join(wrong)
