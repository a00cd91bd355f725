"""Write docs/errors.md: every error and every refusal, from the code.

python docs/errors.py
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import te_transform
from te_transform.command_line.sentences import literal_text, refused, yielded
from te_transform.plan import assign, refusals

HEAD = """# Errors and refusals

`python docs/errors.py` writes this page from the code; "..." stands for values of a model or a call. Each
sentence says what was given, what is needed, and what to do, or that no kernel supports it. `te-transform
explain RULE` prints the refusals of a rule, and what the rule rewrites.
"""


def main() -> None:
    (Path(__file__).parent / "errors.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *_errors(), *_refusals()])


def _errors() -> Iterator[str]:
    yield "## Errors\n\nRaised before any change: `convert()` leaves the model bitwise unchanged.\n"
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for file in sorted(Path(te_transform.__file__).parent.rglob("*.py")):
        for error, sentence in _raised(file.read_text(encoding="utf-8")):
            found[error][sentence] = None
    for error, sentences in sorted(found.items()):
        yield from (f"### {error}\n", *_listed(sentences))


def _raised(source: str) -> Iterator[tuple[str, str]]:
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
        if is_error and any(map(str.isalpha, literal_text(error.args[0]))):
            yield name, literal_text(error.args[0])


def _refusals() -> Iterator[str]:
    yield "## Refusals\n\nIn the report. Refused operations stay unchanged, and the conversion continues.\n"
    yield from ("### Of any rule\n", *_listed(yielded(refusals)))
    for rule in te_transform.PIPELINE:
        if sentences := refused(rule):
            yield from (f"### {rule.name}\n", *_listed(sentences))
    yield "### In a recipe\n\nFor fused products that do not run in FP8.\n"
    yield from _listed(yielded(assign))


def _listed(sentences: Iterator[str] | list[str] | dict[str, None]) -> Iterator[str]:
    yield from (f"- {' '.join(sentence.split())}" for sentence in sentences)
    yield ""


if __name__ == "__main__":
    main()
