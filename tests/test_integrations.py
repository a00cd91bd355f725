"""Trainer, accelerate and Lightning convert the model once it is placed, or train the original."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import te_transform
from te_transform import integrations
from te_transform.execution.attach import runner_of
from te_transform.integrations import ConvertCallback, prepare
from te_transform.integrations.planned_conversion import PlannedConversion
from tests.packages import BATCHES, LLAMA_IDS, close, llama, original, train, training_arguments, weights
from tests.ranks import spawn

ALMOST = {"rtol": 1e-3, "atol": 1e-5}  # after steps in float32
ROWS = [{"input_ids": ids, "labels": ids} for ids in LLAMA_IDS]
OF_GATED = {"merge_siblings": 2, "layernorm_mlp": 1}


class Lines(logging.Handler):
    """The messages of te_transform's loggers."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        self.infos: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        lines = {logging.WARNING: self.warnings, logging.INFO: self.infos}.get(record.levelno, [])
        lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[Lines]:
    logger, lines = logging.getLogger("te_transform"), Lines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def one_accelerator() -> Iterator[None]:
    """accelerate keeps the settings of the first Accelerator for all later ones."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def trainer(model: nn.Module, folder: Path, *callbacks: Any, **options: Any) -> transformers.Trainer:
    arguments = training_arguments(folder, **{"per_device_train_batch_size": 2} | options)
    return transformers.Trainer(
        model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], callbacks=[*callbacks]
    )


def logs(training: transformers.Trainer) -> list[float]:
    lines = training.state.log_history
    return [line[key] for line in lines for key in ("loss", "grad_norm", "eval_loss") if key in line]


def lora() -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_alpha=64)
    return peft.get_peft_model(llama(), config)


OPTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "evaluated": (llama, {"eval_strategy": "steps", "eval_steps": 2}),
    "accumulated": (llama, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}),
    "checkpointed": (llama, {"gradient_checkpointing": True}),
    "LoRA": (lora, {"save_strategy": "no"}),
}


@pytest.mark.integration
@pytest.mark.parametrize("case", OPTIONS)
def test_trainer_trains_as_the_original(case: str, tmp_path: Path, logged: Lines) -> None:
    make, options = OPTIONS[case]
    plain = trainer(make(), tmp_path / "plain", **options)
    plain.train()
    fused = trainer(make(), tmp_path / "fused", ConvertCallback(backend="torch"), **options)
    fused.train()
    close(logs(fused), logs(plain), **ALMOST)
    close(fused.model.state_dict(), plain.model.state_dict(), **ALMOST)
    converted = fused.model.get_base_model() if case == "LoRA" else fused.model
    assert te_transform.report(converted).counts["attention"] == 1
    assert logged.warnings == []
    assert [line.partition(":")[0] for line in logged.infos] == ["LlamaForCausalLM"]


@pytest.mark.integration
def test_trainer_resumes(tmp_path: Path) -> None:
    whole = trainer(llama(), tmp_path / "whole")
    whole.train()
    resumed = trainer(llama(), tmp_path / "resumed", ConvertCallback())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    close(logs(resumed), logs(whole), **ALMOST)
    close(resumed.model.state_dict(), whole.model.state_dict(), **ALMOST)
    assert runner_of(resumed.model) is not None


@pytest.mark.parametrize("late", [False, True], ids=["model_init", "added later"])
def test_trainer_says_what_it_trains_unconverted(late: bool, tmp_path: Path, logged: Lines) -> None:
    training = trainer(
        llama(), tmp_path, *[] if late else [ConvertCallback()], max_steps=1, save_strategy="no"
    )
    if late:
        training.add_callback(ConvertCallback())
    else:
        training.model_init = lambda: llama()
    training.train()
    told = "a callback that was added later" if late else "another model since"
    (line,) = logged.warnings
    assert line.startswith(
        "LlamaForCausalLM is trained unconverted: expected a model and ConvertCallback in "
    )
    assert f"got {told}; " in line
    assert runner_of(training.model) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_the_report_is_printed_on_a_terminal(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", screen)
    trainer(llama(), tmp_path, ConvertCallback())
    assert screen.getvalue().count("LlamaForCausalLM: ") == terminal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipie": "fp8-delayed"}, "expected one of the options .*; did you mean 'recipe'"),
        ({"recipe": "fp9"}, "expected None, a TE recipe or one of .*, got 'fp9'"),
        ({"compile": "auto"}, "expected example_inputs with compile='auto', which times calls on them"),
    ],
)
def test_options_are_checked_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(te_transform.OptionError, match=message):
        ConvertCallback(**options)
    with pytest.raises(te_transform.OptionError, match=message):
        prepare(accelerate.Accelerator(cpu=True), original(), **options)


def test_options_that_do_not_fit_the_model_raise(tmp_path: Path) -> None:
    with pytest.raises(te_transform.OptionError, match="got 'decoder', which names no module"):
        trainer(llama(), tmp_path, ConvertCallback(skip="decoder"))


def test_a_failed_conversion_is_logged(logged: Lines, tmp_path: Path) -> None:
    """The given example inputs are those of another model."""
    model = llama()
    training = trainer(model, tmp_path, ConvertCallback({"pixels": torch.ones(2, 2)}), max_steps=1)
    (line,) = logged.warnings
    assert line.startswith("LlamaForCausalLM is trained unconverted: ")
    assert "(pixels=float32[2, 2]" in line
    assert runner_of(model) is None
    training.train()


@pytest.mark.usefixtures("at_any_size")
def test_prepare_trains_as_accelerate_does(logged: Lines) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    found = []
    for door in (
        accelerator.prepare,
        lambda *objects: prepare(accelerator, *objects, example_inputs=BATCHES[0]),
    ):
        model = original()
        loader = torch.utils.data.DataLoader(BATCHES, batch_size=None)
        optimizer, model, loader = door(torch.optim.AdamW(model.parameters(), lr=1e-2), model, loader)
        found.append((train(model, optimizer, backward=accelerator.backward), weights(model)))
    close(found[1], found[0])
    te_transform.report(accelerator.unwrap_model(model)).expect(**OF_GATED)
    assert logged.warnings == []


def test_example_inputs_are_moved_to_the_model(logged: Lines) -> None:
    """A model on meta stands for one on a GPU, which the example inputs are not on."""
    model = llama().to("meta")
    PlannedConversion({"input_ids": LLAMA_IDS[:2]}, {}).apply(model)
    assert logged.warnings == []
    te_transform.report(model).expect(attention=1)


@pytest.mark.parametrize("count", [0, 2])
def test_prepare_takes_one_module(count: int) -> None:
    models = [nn.Linear(2, 2) for _ in range(count)]
    with pytest.raises(
        te_transform.OptionError, match=f"expected one torch.nn.Module .*, got {count}; convert each"
    ):
        prepare(accelerate.Accelerator(cpu=True), *models)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Callback'"):
        integrations.Callback  # noqa: B018


class Guarded(nn.Module):
    """A model that cannot be converted on rank 1."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.model = original()
        self.part = torch.jit.script(nn.Identity()) if fails else nn.Identity()

    def forward(self, *batch: Any) -> Any:
        return self.model(*batch)


def prepared(fails: bool) -> tuple[list[float], list[str], list[str], bool]:
    """Return the losses, the logged warnings and reports of rank 0 and 1, and whether they are converted."""
    lines = Lines()
    logging.getLogger("te_transform").addHandler(lines)
    logging.getLogger("te_transform").setLevel(logging.INFO)
    accelerator, model = accelerate.Accelerator(cpu=True), Guarded(fails and dist.get_rank() == 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fused, optimizer = prepare(accelerator, model, optimizer, example_inputs=BATCHES[0])
    assert isinstance(fused, DistributedDataParallel)
    losses = train(fused, optimizer, backward=accelerator.backward)
    return losses, lines.warnings, lines.infos, runner_of(model) is not None


@pytest.mark.integration
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_convert_together(fails: bool, tmp_path: Path) -> None:
    one, other = spawn(prepared, 2, tmp_path, fails)
    losses, warnings, reports, converted = one
    assert [converted, other[3]] == [not fails] * 2
    close(other[0], losses)
    assert len(reports) == 1
    assert other[2] == []
    told = [
        "Guarded is trained unconverted: ModelError: expected a Python module, got a ScriptModule"
    ] * fails
    assert [line.split(": its part")[0] for line in other[1]] == told
    assert [line.split(": its part")[0].replace("rank 1: ", "") for line in warnings] == told
    model = Guarded(False)
    close(losses, train(model, torch.optim.AdamW(model.parameters(), lr=1e-2)))


@pytest.mark.integration
def test_lightning_trains_as_the_original(tmp_path: Path, logged: Lines) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = original(), []

        def training_step(self, batch: Any, number: int) -> Any:
            self.losses.append(loss := self.model(*batch))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fitted(*callbacks: Any) -> Any:
        module = Module()
        training = lightning.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=[*callbacks],
        )  # fmt: skip
        training.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
        return module

    plain = fitted()
    fused = fitted(integrations.LightningConvertCallback("model", BATCHES[0]))
    close([loss.item() for loss in fused.losses], [loss.item() for loss in plain.losses])
    close(weights(fused.model), weights(plain.model))
    te_transform.report(fused.model).expect(**OF_GATED)
    assert logged.warnings == []
    with pytest.raises(
        te_transform.OptionError, match=r"of Module \(model, .*\), got 'net'; if configure_model"
    ):
        fitted(integrations.LightningConvertCallback("net"))
