"""The curriculum in transformers' Trainer and around accelerate's loaders."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Dataset

from te_transform import training
from te_transform.training import CurriculumError, SequenceCurriculum, TokenSchedule

SIZE, VOCAB = 32, 11
LENGTHS = [32, 8, 16, 24, 32, 32]  # of the steps 0 to 5
Batches = list[tuple[int, int]]  # the row that a batch begins with, and its length


class Numbered(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.full((SIZE,), index)
        return {"input_ids": row, "labels": row % VOCAB}


class Model(nn.Module):
    """One that remembers its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, VOCAB)
        self.seen: Batches = []

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        """[batch, sequence] -> a loss, the sum over tokens by their number in the whole step."""
        if self.training:
            self.seen.append((int(input_ids.min()), input_ids.shape[1]))
            assert num_items_in_batch is None or num_items_in_batch == 2 * labels.numel()
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def trainer(folder: Path, by: dict[str, int], **options: Any) -> tuple[transformers.Trainer, Model]:
    """Six steps of two batches of two rows, in one epoch, with a curriculum and a schedule of tokens."""
    torch.manual_seed(0)
    model = Model()
    curriculum = SequenceCurriculum(max_length=SIZE, bucket=8, **by)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = TokenSchedule(ExponentialLR(optimizer, 0.5), 4 * SIZE, source=curriculum, warmup_steps=2)
    settings = {"output_dir": str(folder), "max_steps": 6, "save_steps": 3, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True}
    settings |= {"report_to": "none", "disable_tqdm": True} | options
    made = transformers.Trainer(
        model, transformers.TrainingArguments(**settings), train_dataset=Numbered(), eval_dataset=Numbered(),
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    made.add_callback(training.CurriculumCallback(curriculum, made))
    return made, model


def logged(trained: transformers.Trainer, key: str) -> list[Any]:
    return [line[key] for line in trained.state.log_history if key in line]


@pytest.mark.parametrize("by", [{"total_steps": 4}, {"total_tokens": 4 * (32 + 8 + 16 + 24)}], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_trainer(by: dict[str, int], workers: int, tmp_path: Path) -> None:
    """All batches of a step have its length, in a run that goes on from a checkpoint within an epoch too."""
    whole, model = trainer(tmp_path / "whole", by, dataloader_num_workers=workers)
    whole.train()
    lengths = [length for _, length in model.seen]
    expected = LENGTHS if "total_steps" in by else [32, 16, 16, 24, 32, 32]
    assert lengths == [length for length in expected for _ in range(2)]
    assert logged(whole, "sequence_length") == expected
    assert whole.lr_scheduler.steps == 6
    assert whole.lr_scheduler.tokens == 4 * sum(expected)
    resumed, again = trainer(tmp_path / "again", by, dataloader_num_workers=workers)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert again.seen == model.seen[6:]
    assert torch.equal(again.table.weight, model.table.weight)
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")


def test_trainer_evaluates_whole_sequences_and_trains_anew(tmp_path: Path) -> None:
    made, model = trainer(tmp_path, {"total_steps": 4}, max_steps=2)
    made.train()
    assert made.evaluate()["eval_loss"] > 0
    assert made.predict(Numbered()).predictions.shape == (24, SIZE, VOCAB)
    before = model.seen.copy()
    made.train()
    assert model.seen == [*before, *before]
    made.remove_callback(training.CurriculumCallback)
    made.train()
    assert [length for _, length in model.seen[8:]] == [SIZE] * 4


def test_trainer_with_something_else(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, {"total_steps": 4})
    for curriculum, given, message in (
        (SequenceCurriculum(max_length=64, total_steps=4), made, "got one that has a CurriculumCallback"),
        (SequenceCurriculum([], max_length=64, total_steps=4), made, "leave loader and accumulation out"),
        (SequenceCurriculum(max_length=64, total_steps=4), Model(), "expected a transformers.Trainer, got"),
        (None, made, "expected a SequenceCurriculum, got a NoneType"),
    ):  # fmt: skip
        with pytest.raises(CurriculumError, match=message):
            training.CurriculumCallback(curriculum, given)


def test_a_checkpoint_without_tokens(tmp_path: Path) -> None:
    made, _ = trainer(tmp_path, {"total_tokens": 99}, max_steps=3)
    made.remove_callback(training.CurriculumCallback)
    made.train()
    other, _ = trainer(tmp_path, {"total_tokens": 99})
    with pytest.raises(
        CurriculumError, match="expected a checkpoint with the curriculum's tokens, got one of"
    ):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_accelerate() -> None:
    """A prepared loader fetches one batch ahead; its scheduler steps when gradients are synchronized."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Numbered(), batch_size=2))
    curriculum = SequenceCurriculum(loader, max_length=SIZE, bucket=8, total_steps=4, accumulation=2)
    inner = TokenSchedule(ExponentialLR(optimizer.optimizer, 0.5), 128, source=curriculum, warmup_steps=2)
    schedule = accelerator.prepare(inner)
    assert isinstance(schedule.scheduler, TokenSchedule)
    found = []
    for batch in curriculum:
        with accelerator.accumulate(model):
            found.append((batch["input_ids"].shape[1], optimizer.param_groups[0]["lr"]))
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert [length for length, _ in found] == [length for length in LENGTHS for _ in range(2)]
    # after 0, 128, 160, 224, 320, 448 tokens
    assert [rate for _, rate in found][::2] == pytest.approx([0.05, 0.05, 0.05, 0.05, 0.025, 0.0125])
    state = curriculum.state_dict()
    assert (state["step"], state["loader"]) == (6, None)
