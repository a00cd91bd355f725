"""The Python in the README and in docs/ runs as it stands there; scripts import what there is."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
import torch

import te_transform
from tests.packages import LLAMA_IDS, llama, tokenizer

ROOT = Path(__file__).parent.parent


def blocks(file: str) -> list[str]:
    """The Python of a page, without what needs a GPU or a download, which says so by its dots."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    return [block for block in found if "(...)" not in block]


@pytest.mark.usefixtures("as_given")
@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/index.md",
        "docs/json.md",
        "docs/page.md",
        "docs/rules.md",
        "docs/verify.md",
    ],
)
def test_examples_run(file: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ModuleType("page")  # a rule is found again by its name in its module
    page.__dict__.update(model=llama(), batch={"input_ids": LLAMA_IDS[:2], "labels": LLAMA_IDS[:2]})
    monkeypatch.setitem(sys.modules, "page", page)
    for block in blocks(file):
        exec(compile(block, file, "exec"), page.__dict__)


RECIPES = dict(
    re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/recipes.md").read_text("utf-8"), re.M | re.S)
)
PACKAGES = {
    "TRL": ["trl", "datasets"], "Lightning": ["lightning"], "DeepSpeed": ["deepspeed"],
    "torchao beside it": ["torchao"],
}  # fmt: skip
OF_PACKAGES = (
    "Trainer of transformers", "Trainer under torchrun", "accelerate", "accelerate with FSDP2", "PEFT",
    *PACKAGES,
)  # fmt: skip
LONG = (  # what they call has tests of its own
    "FSDP2", "FSDP2 on several hosts", "A model too large for one process", "Killed, and resumed",
    "Tensor and sequence parallel", "A check for CI", "generate(), and static caches",
)  # fmt: skip


TORCHTITAN = ModuleType("torchtitan.protocols.model_converter")  # its registry, as it is written in 0.2.2
TORCHTITAN._registry_model_converter_cls = {}
TORCHTITAN.register_model_converter = lambda cls, name: TORCHTITAN._registry_model_converter_cls.update(
    {name: cls}
)


@pytest.fixture
def given(working_folder: Path, monkeypatch: pytest.MonkeyPatch, process_group: None) -> dict[str, Any]:
    """Return the names that the recipes use, in a folder and a process group of their own."""
    ids = LLAMA_IDS[:2]
    batch = {"input_ids": ids, "labels": ids}
    dataset = [dict.fromkeys(batch, row) for row in LLAMA_IDS]
    if find_spec("torchtitan") is None:
        monkeypatch.setitem(sys.modules, TORCHTITAN.__name__, TORCHTITAN)
    model = llama()
    return {"torch": torch, "te_transform": te_transform, "model": model, "batch": batch, "dataset": dataset}


def marked(title: str) -> Any:
    return pytest.param(title, marks=pytest.mark.integration if title in OF_PACKAGES + LONG else ())


@pytest.mark.parametrize("title", [marked(title) for title in RECIPES])
def test_recipes_run_and_have_ten_lines_at_most(
    title: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES.get(title, []):
        pytest.importorskip(package)
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES[title], re.DOTALL)
    if title == "DeepSpeed":
        monkeypatch.setenv("LOCAL_RANK", "0")  # as torchrun does
    if title == "TRL":
        import datasets

        given["sentences"] = datasets.Dataset.from_dict({"input_ids": LLAMA_IDS.tolist()})
        given["tokenizer"] = tokenizer()
    if "graphs=True" in code and not torch.cuda.is_available():
        with pytest.raises(
            te_transform.OptionError, match="expected a GPU that PyTorch can use for graphs=True"
        ):
            exec(compile(code, title, "exec"), given)
    else:
        exec(compile(code, title, "exec"), given)
    assert len([line for line in code.splitlines() if line]) <= 10


def test_the_page_on_training_runs(given: dict[str, Any]) -> None:
    given["loader"] = torch.utils.data.DataLoader(given["dataset"], batch_size=2)
    given["converted"] = te_transform.convert(given["model"], given["batch"], verify=False)
    *code, with_accelerate = blocks("docs/training.md")
    for block in code:
        exec(compile(block, "docs/training.md", "exec"), given)
    with pytest.raises(te_transform.training.OneBitError, match="expected a DistributedDataParallel model"):
        exec(compile(with_accelerate, "docs/training.md", "exec"), given)  # one process has no DDP
    assert given["largest"] > 0
    assert given["state"]["state"]


def test_the_precision_plan_of_the_page_on_fp8_is_written_and_read(given: dict[str, Any]) -> None:
    planned, _ = blocks("docs/fp8.md")
    with pytest.raises(te_transform.OptionError, match="expected backend 'te' for the recipe 'fp8-delayed'"):
        exec(compile(planned, "docs/fp8.md", "exec"), given)  # the model is on the CPU
    assert given["plan"] == te_transform.PrecisionPlan.read("precision.toml")


def test_torchtitan_trains_what_its_converter_made(given: dict[str, Any]) -> None:
    """In the order of torchtitan's trainer: on meta, converted, then put into memory and initialized."""
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES["torchtitan"], re.DOTALL)
    exec(compile(code, "torchtitan", "exec"), given)
    registry = import_module(TORCHTITAN.__name__)._registry_model_converter_cls
    converter = registry["te_transform"](SimpleNamespace(training=SimpleNamespace(seq_len=10)), None)
    model, trained = given["model"], llama().to("meta")
    converter.convert(trained)
    te_transform.report(trained).expect(layernorm_mlp=1, attention=1)
    trained.to_empty(device="cpu").load_state_dict(model.state_dict())
    trained.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: converter.post_optimizer_hook([trained]))
    losses = [trained(**given["batch"]).loss, model(**given["batch"]).loss]
    torch.testing.assert_close(*losses)
    losses[0].backward()
    optimizer.step()
    assert trained(**given["batch"]).loss < losses[0]


def test_the_tour_runs() -> None:
    cells = json.loads((ROOT / "examples/tour.ipynb").read_text(encoding="utf-8"))["cells"]
    tour: dict[str, Any] = {"__name__": "tour"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), tour)
            assert cell["outputs"] == []  # a reader makes them
    assert '<table class="sites fused">' in tour["report"]._repr_html_()
    assert tour["profile"].seconds > 0
    assert tour["result"]


def test_the_index_of_errors_is_what_the_code_says() -> None:
    spec = spec_from_file_location("errors", ROOT / "docs/errors.py")
    errors = module_from_spec(spec)
    spec.loader.exec_module(errors)
    assert errors.page() == (ROOT / "docs/errors.md").read_text(encoding="utf-8"), "run docs/errors.py"
    assert "failed on the example inputs" in errors.page()  # made by a function, for others to raise


@pytest.mark.integration  # `make site` builds it as strictly
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    interface = (tmp_path / "api.html").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r'id="(te_transform\.[\w.]+)"', interface)}
    assert set(te_transform.__all__) - {"PIPELINE"} <= shown
    assert (tmp_path / "search/search_index.js").exists()
    for page in tmp_path.glob("*.html"):
        _works_from_disk(page)


def _works_from_disk(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|link rel="stylesheet")[^>]* (?:src|href)="?([^" >]+)', text)
    followed = re.findall(r'<a [^>]*href="?([^" >#]+)', text)
    assert any("iframe-worker" in file for file in loaded), "the search needs it"
    for file in (*loaded, *followed):
        is_ours = not file.startswith(("https://", "http://"))
        assert is_ours or file in followed, f"{page.name} loads {file}"
        if is_ours and page.name != "404.html":  # which a server shows at any path
            assert (page.parent / unquote(file)).is_file(), f"{page.name} leads to {file}"


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(file: str) -> None:
    page = ROOT / file
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("file", ["README.md", "docs/index.md"])
def test_the_number_of_tested_models_is_told(file: str) -> None:
    rows = re.findall(r"^\| ([\w, ]+) \| \d", (ROOT / "docs/models.md").read_text(encoding="utf-8"), re.M)
    tested = {name for names in rows for name in names.split(", ")}
    assert f"fused sites of {len(tested)} models" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "most"), [("README.md", 900), ("docs/benchmarks.md", 3000)])
def test_pages_stay_short(file: str, most: int) -> None:
    assert len((ROOT / file).read_text(encoding="utf-8").split()) <= most


def test_contributing_lists_every_make_target() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [target for target in targets.split() if f"`make {target}" not in page] == []


SCRIPTS = [path for part in ("examples", "benchmarks", "docs") for path in sorted((ROOT / part).glob("*.py"))]


WITH_OPTIONS = [
    path
    for path in SCRIPTS
    if {"argparse", "__main__"} <= {*re.findall(r"\w+", path.read_text(encoding="utf-8"))}
]


@pytest.mark.parametrize("file", WITH_OPTIONS, ids=lambda file: file.name)
def test_scripts_explain_their_options(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU and without Transformer Engine, as they are called: by a path, from the root."""
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    monkeypatch.setattr(sys, "path", [str(file.parent), *sys.path])
    before = {*sys.modules}
    try:
        with suppress(SystemExit):
            runpy.run_path(str(file), run_name="__main__")
    finally:  # scripts of other folders import other modules of these names
        for name in {*sys.modules} - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(file.parent)):
                del sys.modules[name]
    assert "usage: " + file.name in capsys.readouterr().out


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_scripts_import_what_there_is(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("te_transform", "tests")):
            module = import_module(node.module)
            absent = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            # the name may be a module that nothing has imported yet
            assert [name for name in absent if find_spec(f"{node.module}.{name}") is None] == []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("te_transform"):
                    import_module(alias.name)
