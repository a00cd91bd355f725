"""Write docs/explained.md: what `te-transform explain` prints of each rule.

python docs/explained.py
"""

from pathlib import Path

from te_transform.command_line.explain import explanation
from te_transform.pipeline import PIPELINE
from te_transform.plan.rule import Rule

HEAD = """# Each rule

Written from the code by `python docs/explained.py`; "..." stands for what is only known of a model or a call.
`te-transform explain RULE` prints the text of a rule.
"""


def main() -> None:
    page = "\n".join([HEAD, *map(section, PIPELINE)])
    (Path(__file__).parent / "explained.md").write_text(page, encoding="utf-8")


def section(rule: Rule) -> str:
    """Return the section of a rule, as the command line finds it again."""
    text = "\n".join(explanation(rule))
    return f"## {rule.name}\n\n````text\n{text}\n````\n"


if __name__ == "__main__":
    main()
