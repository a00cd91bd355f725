"""The package as it is published: a wheel that is built from the sdist has all of it, and runs."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("package")  # built once
ROOT = Path(__file__).parent.parent
LIGHT = (["--help"], ["inspect", "--help"], ["explain"], ["explain", "attention"], ["models", "bert"], [])
# All that is tested of a process that has imported nothing, in one: torch takes seconds to import.
FIRST_USE = """
import contextlib, io, json, random, sys
import te_transform
from te_transform.command_line.main import main

found = {"home": te_transform.__file__, "heavy": {}}
with contextlib.redirect_stdout(io.StringIO()) as printed:
    for command in json.loads(sys.argv[1]):
        with contextlib.suppress(SystemExit):
            main(command)
        found["heavy"][" ".join(command)] = [*{"torch", "transformers", "networkx"} & {*sys.modules}]
found["printed"] = printed.getvalue()

from te_transform import Report, convert, inspect
found["is_torch_imported"] = "torch" in sys.modules
import te_transform.report.report
found["is_report_a_function"] = callable(te_transform.report)

import torch
from torch import nn
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
state = random.getstate()
converted = te_transform.convert(model, torch.randn(2, 16))
found["counts"] = dict(te_transform.report(converted).counts)
found["is_same_random"] = random.getstate() == state

from te_transform import training
training.SequenceCurriculum
found["modules"] = [*sys.modules]
print(json.dumps(found))
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


@pytest.fixture(scope="module")
def first_use(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the process found; it finds the package before the one that the tests run in."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_USE, json.dumps(LIGHT)],
        cwd=tmp_path_factory.mktemp("folder"), env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout)


def test_runs(installed: Path, first_use: dict[str, Any]) -> None:
    assert Path(first_use["home"]).is_relative_to(installed)
    assert first_use["counts"] == {"layernorm_linear": 1}
    assert first_use["is_same_random"]


def test_commands_without_a_model_do_not_import_torch(first_use: dict[str, Any]) -> None:
    assert first_use["heavy"] == {" ".join(command): [] for command in LIGHT}
    assert "usage: te-transform inspect" in first_use["printed"]
    assert first_use["is_torch_imported"], "by the names of the package"
    assert first_use["is_report_a_function"], "and not the folder of that name"


def test_transformers_is_imported_by_neither_convert_nor_a_curriculum(first_use: dict[str, Any]) -> None:
    """Until CurriculumCallback is read; that te_transform never imports the techniques is test_house.py's."""
    assert "te_transform.training.curriculum" in first_use["modules"]
    assert "transformers" not in first_use["modules"]


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
