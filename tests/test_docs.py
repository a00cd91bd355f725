"""The Python in the README and in docs/ runs as it stands there; scripts import what there is."""

import ast
import re
import sys
from importlib import import_module
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


SCRIPTS = [path for part in ("examples", "benchmarks", "docs") for path in sorted((ROOT / part).glob("*.py"))]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_import_what_there_is(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("te_transform", "tests")):
            module = import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("te_transform"):
                    import_module(alias.name)
