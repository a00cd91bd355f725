"""The Python in the README and in docs/ runs as it stands there, from top to bottom."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def blocks(file: str) -> list[str]:
    """The Python of a page, without what needs a GPU or a download, which says so by its dots."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in found if "(...)" not in block]


@pytest.mark.parametrize("file", ["README.md", "docs/rules.md"])
def test_examples_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ModuleType("page")  # a rule is found again by its name in its module
    monkeypatch.setitem(sys.modules, "page", page)
    monkeypatch.chdir(tmp_path)
    for block in blocks(file):
        exec(compile(block, file, "exec"), page.__dict__)


@pytest.mark.parametrize(
    "file", ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(file: str) -> None:
    page = ROOT / file
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link
