"""benchmarks/node.py: what it counts, contenders in one process, and failures on one of two ranks."""

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
TINY = [
    "--config=tiny",
    "--device=cpu",
    "--parallel=none",
    "--tokens=256",
    "--steps=8",
    "--learning-rate=0.01",
]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.mark.usefixtures("process_group")
def test_contenders_train_on_the_same_weights_and_batches() -> None:
    import node
    from node_job import measured
    from node_model import built, config_of

    one, other = (built(config_of("tiny", None, {}), torch.device("cpu")).state_dict() for _ in range(2))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    asked = node.arguments([*TINY, "--convert=verify=True"])
    contenders = node.chosen(asked)
    names = ("te_transform verify=True", "eager")
    assert next(iter(contenders)) == names[0], "what was asked for comes first"
    rows = [measured(asked, name, contenders[name], torch.device("cpu")) for name in names]
    assert rows[0].first_loss == pytest.approx(rows[1].first_loss, rel=1e-3)
    for row in rows:
        assert row.loss < row.first_loss
        assert 0 < row.low <= row.tokens_per_second <= row.high
        assert f"tokens/s/GPU  MFU      -      - GiB  first step after {row.first:.0f}" in node.line(row)


def test_flops_of_a_token() -> None:
    """Embeddings count if they are tied to the head; windows are shorter than sequences."""
    from node_model import config_of, flops_per_token

    def flops(*told: Any, length: int = 64, **changes: Any) -> float | None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(*told, changes))
        return flops_per_token(model, length)

    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    llama = 6 * (2 * layer + 64 + 256 * 64) + 12 * 2 * 64 * 32
    assert flops("tiny", None) == llama
    assert flops("tiny", None, tie_word_embeddings=True) == llama
    assert flops("tiny", 1) == llama - 6 * layer - 12 * 64 * 32
    gpt2 = flops("gpt2", None, length=1024)
    assert gpt2 == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 512
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    window = flops("mistral", 1, **small, head_dim=16, vocab_size=8, sliding_window=16)
    whole = flops("mistral", 1, **small, head_dim=16, vocab_size=8, sliding_window=None)
    assert whole - window == 12 * 64 * (64 / 2 - (16 - 16 * 16 / (2 * 64)))
    assert flops("mixtral", 1, **small, vocab_size=8) is None


def test_configs(tmp_path: Path) -> None:
    from node_model import config_of

    told = {"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(told | {"attention_dropout": 0.1}))
    for name in (tmp_path, tmp_path / "config.json"):
        config = config_of(str(name), 2, {"hidden_size": 32})
        found = config.num_hidden_layers, config.layer_types, config.hidden_size, config.attention_dropout
        assert found == (2, ["full_attention"] * 2, 32, 0.0)
    assert config_of("gpt2", 2, {}).n_layer == 2


def test_batches_are_a_chain_that_only_the_rank_changes() -> None:
    from node_model import batches

    torch.manual_seed(7)
    data = batches(1000, rows=4, length=64, steps=16, rank=0)
    torch.manual_seed(8)
    assert torch.equal(data, batches(1000, rows=4, length=64, steps=16, rank=0))
    other = batches(1000, rows=4, length=64, steps=16, rank=1)
    assert not torch.equal(data, other)
    followers: dict[int, set[int]] = {}
    for row in torch.cat((data, other)).flatten(0, 1).tolist():
        for one, next_one in pairwise(row):
            followers.setdefault(one, set()).add(next_one)
    assert max(map(len, followers.values())) == 4
    assert data.max() < 256


@pytest.mark.parametrize(
    ("parallel", "ranks", "why"),
    [
        ("hsdp:2x4", 4, "expected 8 ranks for --parallel hsdp:2x4, got 4; start 8"),
        ("none", 2, "expected 1 ranks for --parallel none, got 2; start 1"),
        ("hsdp", 2, "expected --parallel fsdp2, ddp, hsdp:2x4 or none, got hsdp; pass one"),
        ("hsdp:2x", 2, "got hsdp:2x; pass one"),
        ("fsdp", 2, "got fsdp; pass one"),
        ("fsdp2:2", 2, "got fsdp2:2; pass one"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit_raise(parallel: str, ranks: int, why: str) -> None:
    import node

    with pytest.raises(ValueError, match=why):
        node.check(parallel, ranks)


@pytest.mark.parametrize(
    ("given", "got"),
    [((1, 1, None), "1, 1 and fsdp2"), ((4, 2, None), "4, 2 and fsdp2"), ((4, 1, "ddp"), "4, 1 and ddp")],
)
def test_ranks_that_no_process_can_pretend_raise(given: tuple[int, int, str | None], got: str) -> None:
    import node

    assert node.pretended(4, 1, "hsdp:2x2") == node.pretended(4, 1, None) == 4
    with pytest.raises(ValueError, match=f"in one process, with fsdp2 or hsdp, got {got}; leave it out"):
        node.pretended(*given)


@pytest.mark.integration
@pytest.mark.parametrize("parallel", ["fsdp2", "hsdp:2x2"])
def test_one_process_pretends_to_be_one_of_four(parallel: str, tmp_path: Path) -> None:
    asked = ["--config=tiny", "--device=cpu", "--tokens=256", "--steps=3", f"--json={tmp_path}/rows.jsonl"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    ran = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/node.py"), *asked),
            *("--pretend-ranks=4", f"--parallel={parallel}", "--only=eager"),
        ],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert f"tiny, 4 x 256 tokens a step, {parallel}" in ran.stdout
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (row["why"], row["loss"], row["parameters"]) == ("", 0.0, 106_816)
    assert row["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--tokens=0"], "expected a whole number of at least 1, got 0"),
        (["--json=missing/rows.jsonl"], "expected a file in an existing folder, got missing/rows.jsonl"),
        (["--set", "layers"], "expected key=value, got layers"),
        (["--steps=2"], "expected --steps of at least 3, got 2"),
    ],
)
def test_unusable_options_are_errors(
    given: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import node

    with pytest.raises(SystemExit):
        node.arguments(given)
    assert error in capsys.readouterr().err


def test_files_that_are_not_json_are_errors(tmp_path: Path) -> None:
    import command_line

    (tmp_path / "rows.jsonl").write_text('{"ms": 1}\n{"ms": 2}\n')
    assert command_line.json_lines(str(tmp_path / "rows.jsonl")) == [{"ms": 1}, {"ms": 2}]
    for read in (command_line.json_file, command_line.json_lines):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected a .*, got missing\.json"):
            read("missing.json")


def test_the_first_error_counts_and_processes_without_a_word() -> None:
    import node

    told = [
        ("1", "no memory", "of 1"),
        ("2", "exit code -9", ""),
        ("3", "closed", "of 3"),
        ("0", "no memory", "of 0"),
    ]
    lines = (json.dumps(dict(zip(("rank", "why", "traceback"), each, strict=True))) for each in told)
    row = node.failed("eager", "\n".join(lines))
    assert row.why == "rank 0, 1: no memory; rank 2: exit code -9"
    assert row.traceback == "of 1"


@pytest.mark.integration
@pytest.mark.xdist_group("torchrun")
def test_a_failure_on_one_rank_ends_the_contender_on_all(tmp_path: Path) -> None:
    """Others wait in a collective; the next contender has its turn."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    asked = ["--config=tiny", "--device=cpu", "--tokens=256", "--steps=3", f"--json={tmp_path}/rows.jsonl"]
    path = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    ran = subprocess.run(
        [*command, str(ROOT / "tests/failing_contenders.py"), *asked],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    raised, killed, last = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert raised["why"] == "rank 1: RuntimeError: raised on one rank"
    assert "raise RuntimeError" in raised["traceback"]
    assert "rank 1: the process ended with exit code -9" in killed["why"]
    assert last["name"] == "eager"
    assert last["loss"] > 0
    assert [line.split()[0] for line in ran.stdout.splitlines()] == [
        "tiny,",
        "raised",
        "killed",
        "eager",
        "106,816",
    ]
