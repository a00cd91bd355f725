"""Write docs/errors.md: every error and every refusal, as the code says it.

python docs/errors.py
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import te_transform
from te_transform.command_line.sentences import raised, refused, yielded
from te_transform.plan import assign, refusals

HEAD = """# Errors and refusals

Written from the code by `python docs/errors.py`; "..." stands for what is only known of a model or a call.
Each sentence says what was given, what is needed, and what to do, or that no kernel has it. `te-transform
explain RULE` has those of a rule, with what it rewrites.
"""


def main() -> None:
    (Path(__file__).parent / "errors.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_errors(), *_refusals()])


def _errors() -> Iterator[str]:
    yield "## Errors\n\nRaised before anything is changed; `convert()` leaves the model bitwise as it was.\n"
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for file in sorted(Path(te_transform.__file__).parent.rglob("*.py")):
        for error, sentence in raised(file.read_text(encoding="utf-8")):
            found[error][sentence] = None
    for error, sentences in sorted(found.items()):
        yield from (f"### {error}\n", *_listed(sentences))


def _refusals() -> Iterator[str]:
    yield "## Refusals\n\nIn the report, for a place that stays as it is while conversion goes on.\n"
    yield from ("### Whatever the rule\n", *_listed(yielded(refusals)))
    for rule in te_transform.PIPELINE:
        if sentences := refused(rule):
            yield from (f"### {rule.name}\n", *_listed(sentences))
    yield "### In a recipe\n\nFor a product that is fused, and stays out of FP8.\n"
    yield from _listed(yielded(assign))


def _listed(sentences: Iterator[str] | list[str] | dict[str, None]) -> Iterator[str]:
    yield from (f"- {' '.join(sentence.split())}" for sentence in sentences)
    yield ""


if __name__ == "__main__":
    main()
