"""examples/train_gpt.py, in one process and under torchrun, and options of examples/train_fsdp.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples/train_gpt.py"
SIZES = {"steps": 6, "batch": 4, "length": 128, "layers": 2, "width": 64, "warmup": 2, "every": 4}
TINY = [f"--{name}={value}" for name, value in SIZES.items()]
SHORT = ["--curriculum", "--curriculum-steps=4"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import train_gpt

    return train_gpt


@pytest.mark.usefixtures("process_group")
def test_in_one_process(example: Any, tmp_path: Path) -> None:
    """With the curriculum, steps are shorter and the budget of tokens lasts longer; the curves are drawn."""
    found = example.Run(example.arguments([*TINY, *SHORT]), 0, 1).train()
    assert [step["length"] for step in found["train"]] == [128, 64, 64, 64, 128, 128, 128, 128]
    assert [point["tokens"] for point in found["eval"]] == [512 + 3 * 256, 5 * 512 + 3 * 256]
    assert found["eval"][-1]["loss"] < found["train"][0]["loss"]
    (tmp_path / "short.json").write_text(json.dumps(found))
    drawn = ["--read", str(tmp_path / "short.json"), "--plot", str(tmp_path / "loss.svg")]
    example.main(drawn)
    picture = (tmp_path / "loss.svg").read_text()
    assert picture.count("<polyline") == 2
    assert "short: " in picture


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--read", "missing.json"], "expected a file that --json wrote after a run, got missing.json"),
        (["--read", "other.json"], "expected a file that --json wrote after a run, got other.json"),
        (["--json", "missing/loss.json"], "expected a file in an existing folder, got missing/loss.json"),
        (["--plot", "."], "expected a file in an existing folder, got ."),
        (["--steps", "0"], "expected a whole number of at least 1, got 0"),
        (["--every", "few"], "expected a whole number of at least 1, got few"),
        (["--width", "200"], "expected a --width that is a multiple of 3 heads, got 200"),
        (["--reshape"], "expected --curriculum with --reshape, got --reshape alone"),
    ],
)
def test_unusable_options_are_errors(
    given: list[str], error: str, example: Any, working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (working_folder / "other.json").write_text('{"eval": []}')
    with pytest.raises(SystemExit):
        example.arguments(given)
    assert error in capsys.readouterr().err


def test_train_fsdp_names_torchrun(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_fsdp

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_fsdp.py"])
    with pytest.raises(SystemExit):
        train_fsdp.arguments()
    assert "expected torchrun to start this script, got python" in capsys.readouterr().err


@pytest.mark.usefixtures("process_group")
def test_a_recipe_that_cannot_run_here_is_an_error_in_one_line(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(example, "GPU", False)
    with pytest.raises(SystemExit) as ended:
        example.Run(example.arguments([*TINY, "--fp8"]), 0, 1)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "error: expected backend 'te' for the recipe 'fp8-delayed', got backend 'torch'" in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("process_group")
def test_the_techniques_together(example: Any) -> None:
    """Dropped layers are left out of the graphs of all lengths."""
    run = example.Run(example.arguments([*TINY, *SHORT, "--drop-layers", "--one-bit"]), 0, 1)
    found = run.train()
    assert [step["length"] for step in found["train"]] == [128, 64, 64, 64, 128, 128, 128, 128]
    assert run.drops.steps == len(found["train"])
    assert 0 < found["eval"][-1]["loss"] < 8


@pytest.mark.integration
@pytest.mark.xdist_group("torchrun")
def test_on_two_ranks(tmp_path: Path) -> None:
    """Both take their part of each batch; nothing but the result is printed where nobody watches."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLE),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, *TINY, *SHORT, "--reshape"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("loss: ")
    assert ran.stdout.count("\n") == 1
    assert "\r" not in ran.stderr
    found = json.loads((tmp_path / "loss.json").read_text())
    assert found["ranks"] == 2
    assert [step["tokens"] for step in found["train"]] == [512 * step for step in range(1, 7)]
    assert found["eval"][-1]["loss"] < found["train"][0]["loss"]
