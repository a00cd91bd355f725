"""The package as it is published: a wheel that is built from the sdist has all of it, and runs."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# In a process that has no other te_transform: where it comes from, the rules that it fuses by, and whether
# Python draws the same random numbers as without it.
FIRST_USE = """
import random, torch, te_transform
from torch import nn
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
state = random.getstate()
converted = te_transform.convert(model, torch.randn(2, 16))
print(te_transform.__file__)
print(dict(te_transform.report(converted).counts))
print(random.getstate() == state)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is unpacked to. Files that git does not have are in neither archive."""
    folder = tmp_path_factory.mktemp("package")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    source = folder / "source"
    for name in filter(None, listed.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    _build("sdist", source, folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    _build("wheel", next((folder / "unpacked").iterdir()), folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def _build(what: str, source: Path, target: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)


def test_the_package_has_every_file(installed: Path) -> None:
    found = {str(file.relative_to(installed)) for file in (installed / "te_transform").rglob("*")}
    wanted = {
        str(file.relative_to(ROOT))
        for folder in ("", *(part.name for part in (ROOT / "te_transform").iterdir() if part.is_dir()))
        for file in (ROOT / "te_transform" / folder).iterdir()
        if file.suffix in (".py", ".css", ".js") or file.name in ("py.typed", "models.md", "explained.md")
    }
    assert wanted <= found
    assert not any(name.startswith(("tests", "benchmarks")) for name in found)


def test_runs(installed: Path, tmp_path: Path) -> None:
    """Found before the installation that the tests run in."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USE],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    home, counts, is_same_random = ran.stdout.splitlines()
    assert Path(home).is_relative_to(installed)
    assert counts == "{'layernorm_linear': 1}"
    assert is_same_random == "True"


def test_each_recipe_names_the_extra_that_installs_what_it_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    told = {}
    for title, recipe in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.M | re.S):
        extras = re.findall(r"^Extra: `(\w+)`\.$", recipe, re.M)
        needed = [line for extra in extras for line in project["optional-dependencies"][extra]]
        told[title] = {re.split(r"\W", line)[0] for line in needed}
        code = "".join(re.findall(r"```python\n(.*?)```", recipe, re.S))
        imported = {name.partition(".")[0] for name in imports(code)} - {
            "te_transform",
            "torch",
            "torchtitan",
        }
        assert bool(extras) == bool(imported), title
        assert imported <= told[title], title
    assert told["PEFT"] >= {"peft", "transformers"}


def imports(code: str) -> Iterator[str]:
    """Yield the modules that the code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
