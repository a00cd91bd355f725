"""1-bit optimizers and dropped layers in transformers' Trainer and accelerate, on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from te_transform import training
from te_transform.training import OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.onebit import are_equal, flat
from tests.packages import LLAMA_IDS, converted_llama, llama

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "OneBitAdam": (OneBitAdam, {"lr": 1e-3, "freeze_step": 3}),
    "OneBitLamb": (OneBitLamb, {"lr": 1e-2, "freeze_step": 3}),
    "ZeroOneAdam": (
        ZeroOneAdam,
        {"lr": 1e-3, "var_freeze_step": 3, "local_step_scaler": 2, "local_step_clipper": 4},
    ),
}


class Dropping(transformers.TrainerCallback):
    """The callback of docs/training.md."""

    def __init__(self, schedule: training.LayerDropping) -> None:
        self.schedule = schedule

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the step of Trainer, also the step of a checkpoint."""
        self.schedule.load_state_dict({**self.schedule.state_dict(), "steps": state.global_step})


def trainer(folder: Path, name: str, drops: bool = False, **options: Any) -> transformers.Trainer:
    """Return a Trainer of ten steps of Llama that saves after five; it drops layers if asked."""
    model = converted_llama(2) if drops else llama(2)
    settings = transformers.TrainingArguments(
        str(folder), max_steps=10, save_steps=5, eval_strategy="steps", per_device_train_batch_size=2,
        use_cpu=True, report_to="none", disable_tqdm=True, weight_decay=0.1, **{"eval_steps": 4, **options},
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in [*LLAMA_IDS] * 8]
    made = transformers.Trainer(
        model, settings, train_dataset=rows, eval_dataset=rows[:2], optimizer_cls_and_kwargs=OPTIMIZERS[name]
    )
    made.add_callback(training.OneBitCallback(made))
    if drops:
        schedule = training.drop_layers(model, total_steps=10, gamma=1.0)
        made.add_callback(Dropping(schedule))
    return made


def losses(made: transformers.Trainer) -> list[float]:
    return [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]


def by_trainer(folder: Path) -> dict[str, dict[str, Any]]:
    """Train with each optimizer, resume from the checkpoint in the middle, and drop layers."""
    found: dict[str, dict[str, Any]] = {}
    for name in OPTIMIZERS:
        made = trainer(folder / name, name)
        made.train()
        again = trainer(folder / name, name)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoint-5"))
        optimizer = made.optimizer.optimizer
        found[name] = {
            "is_ddp": isinstance(made.model_wrapped, DistributedDataParallel),
            "frozen": optimizer.frozen,
            "steps": optimizer.steps,
            "decays": [group["weight_decay"] for group in optimizer.param_groups],
            "are_equal": are_equal(flat(made.model)),
            "losses": losses(made),
            "is_resumed": torch.equal(flat(made.model), flat(again.model)),
        }
    dropped = trainer(folder / "dropped", "OneBitAdam", drops=True)
    dropped.train()
    again = trainer(folder / "dropped", "OneBitAdam", drops=True)
    again.train(resume_from_checkpoint=str(folder / "dropped" / "checkpoint-5"))
    found["dropped"] = {
        "are_equal": are_equal(flat(dropped.model)),
        "losses": losses(dropped),
        "is_resumed": torch.equal(flat(dropped.model), flat(again.model)),
    }
    return found


class Stopping(transformers.TrainerCallback):
    """The end of training between two exchanges of local steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after nine steps."""
        control.should_training_stop = state.global_step == 9


def best_of_trainer(folder: Path) -> dict[str, bool]:
    """Return whether Trainer ends with the best model, by whether it stops before or after OneBitCallback."""
    found = {}
    for is_before in (True, False):
        made = trainer(folder / str(is_before), "ZeroOneAdam", load_best_model_at_end=True, eval_steps=5)
        ours = made.pop_callback(training.OneBitCallback)
        for callback in (Stopping(), ours) if is_before else (ours, Stopping()):
            made.add_callback(callback)
        made.train()
        best = type(made.model).from_pretrained(made.state.best_model_checkpoint)
        found[str(is_before)] = torch.equal(flat(best), flat(made.model))
    return found


def by_accelerate() -> dict[str, Any]:
    """Train in the loop of accelerate's documentation, with accumulation, clipping and a scheduler."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = llama(2)
    optimizer: Any = OneBitAdam(model.parameters(), lr=1e-3, freeze_step=3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    is_ddp = isinstance(model, DistributedDataParallel)
    if is_ddp:
        optimizer.optimizer.register(model)
    seen = []
    for step in range(16):
        with accelerator.accumulate(model):
            ids = LLAMA_IDS[(step + dist.get_rank()) % len(LLAMA_IDS)][None]
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append(loss.item())
    return {
        "is_ddp": is_ddp,
        "are_equal": are_equal(flat(model)),
        "losses": seen,
        "frozen": optimizer.optimizer.frozen,
        "steps": optimizer.optimizer.steps,
    }


def everything(folder: Path) -> dict[str, Any]:
    # Trainer loads optimizer.pt to args.device, which is "cpu:0" here: torch.load() knows "cpu" alone
    torch.serialization.register_package(5, lambda _: None, lambda s, place: s if place == "cpu:0" else None)
    return {
        "accelerate": by_accelerate(),
        "trainer": by_trainer(folder),
        "best": best_of_trainer(folder / "best"),
    }
