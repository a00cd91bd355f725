"""transformers' Trainer trains a converted model like the original, and goes on from either's checkpoint."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import te_transform
from te_transform.backends.fp8.registry import state_of
from tests.packages import LLAMA_IDS, close, converted_llama, llama, training_arguments

pytestmark = [
    pytest.mark.integration,
    pytest.mark.xdist_group("trainer"),  # `runs` once a process
    pytest.mark.usefixtures("at_any_size"),
]

MODELS: dict[str, Callable[[], nn.Module]] = {"original": llama, "converted": converted_llama}
ALMOST = {"rtol": 1e-3, "atol": 1e-5}  # after steps in float32


class Sentences(Dataset):
    """Some of them padded."""

    def __len__(self) -> int:
        return len(LLAMA_IDS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, mask = LLAMA_IDS[i], (torch.arange(10) < 7 + i % 4).long()
        return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def trainer(model: nn.Module, folder: Path, **options: Any) -> transformers.Trainer:
    arguments = training_arguments(folder, **options)
    return transformers.Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())


class Run(NamedTuple):
    folder: Path
    losses: list[float]
    weights: dict[str, Tensor]


def run(model: nn.Module, folder: Path, resume: Path | None = None, **options: Any) -> Run:
    training = trainer(model, folder, **options)
    training.train(resume_from_checkpoint=resume and str(resume))
    logged = training.state.log_history
    losses = [line[key] for line in logged for key in ("loss", "grad_norm", "eval_loss") if key in line]
    return Run(folder, losses, model.state_dict())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {name: run(make(), tmp_path_factory.mktemp(name)) for name, make in MODELS.items()}


def test_training(runs: dict[str, Run]):
    close(runs["converted"][1:], runs["original"][1:], **ALMOST)
    for name in ("config.json", "generation_config.json"):
        files = [(run.folder / "checkpoint-2" / name).read_text() for run in runs.values()]
        assert files[0] == files[1]


def test_fp8_where_trainer_computes_in_bf16(te: ModuleType, tmp_path: Path):
    """The weights stay in float32, products run in FP8 within Trainer's autocast."""
    inputs = {"input_ids": LLAMA_IDS, "labels": LLAMA_IDS}
    fused = te_transform.convert(llama(), inputs, backend="te", recipe="fp8-delayed")
    losses, moves = [], []
    for name, model in (("original", llama()), ("converted", fused)):
        training = trainer(model, tmp_path / name, bf16=True)
        training.train()
        losses.append([line["loss"] for line in training.state.log_history if "loss" in line])
        pairs = zip(model.parameters(), llama().parameters(), strict=True)
        moves.append(torch.cat([(now - before).detach().flatten() for now, before in pairs]))
    close(losses[1], losses[0], rtol=1e-2, atol=0)
    # E4M3 rounds by 2^-4 at most; a step in the wrong direction would be off by as much as it is long
    assert (moves[1] - moves[0]).norm() < 2**-3 * moves[0].norm()
    assert losses[1] != losses[0]
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.float32}
    kernels = [kernel for p in fused.parameters() for kernel in state_of(p).kernels.values()]
    assert sum(kernel.in_fp8 for kernel in kernels) == 3 * fused.config.num_hidden_layers


@pytest.mark.parametrize(("saved", "loaded"), [("original", "converted"), ("converted", "original")])
def test_resuming(saved: str, loaded: str, runs: dict[str, Run], tmp_path: Path):
    model = MODELS[loaded]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    resumed = run(model, tmp_path, runs[saved].folder / "checkpoint-2")
    close(resumed[1:], runs["original"][1:], **ALMOST)


def test_options(tmp_path: Path):
    """Accumulation, checkpointing, clipping, label smoothing, evaluation, the best weights at the end."""
    options = {
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.5,
        "label_smoothing_factor": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "optim": "adafactor",
    }
    trained = [run(make(), tmp_path / name, **options) for name, make in MODELS.items()]
    close(trained[1][1:], trained[0][1:], **ALMOST)
