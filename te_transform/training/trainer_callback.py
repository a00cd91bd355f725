"""Callbacks for transformers' Trainer. No other file of te_transform.training imports transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from te_transform.training.curriculum import COUNTS, SequenceCurriculum
from te_transform.training.length_schedule import CurriculumError
from te_transform.training.one_bit.checks import OneBitError
from te_transform.training.one_bit.optimizer import OneBitOptimizer

SAVED_AS = "SequenceCurriculum"  # the key of the curriculum's state in Trainer's state and checkpoints


class CurriculumCallback(TrainerCallback):
    """The callback that cuts the training batches of a Trainer, with any dataset, collator and workers.

        curriculum = SequenceCurriculum(max_length=1024, total_steps=3000)
        trainer.add_callback(CurriculumCallback(curriculum, trainer))

    Batches are cut when Trainer collects the batches of an optimizer step, before it counts labels. Trainer
    counts the steps. Checkpoints contain the curriculum's state, and logs contain `sequence_length`.
    """

    def __init__(self, curriculum: SequenceCurriculum, trainer: Any) -> None:
        """Cut the training batches of `trainer` as long as it has this callback.

        Raises:
            CurriculumError: the curriculum has its own loader, belongs to another trainer, or accumulates.
        """
        if not isinstance(curriculum, SequenceCurriculum):
            raise CurriculumError(
                f"expected a SequenceCurriculum, got a {type(curriculum).__name__}; pass "
                "SequenceCurriculum(max_length=..., total_steps=...)"
            )
        if curriculum.loader is not None or curriculum.accumulation != 1:
            raise CurriculumError(
                f"expected a curriculum for the loader and the accumulation of Trainer, got {curriculum!r} "
                "with its own; leave loader and accumulation out"
            )
        if not hasattr(trainer, "get_batch_samples"):
            raise CurriculumError(
                f"expected a transformers.Trainer, got a {type(trainer).__name__}; wrap its loader: "
                "SequenceCurriculum(loader, ...)"
            )
        if any(isinstance(callback, CurriculumCallback) for callback in trainer.callback_handler.callbacks):
            raise CurriculumError(
                "expected a Trainer without a curriculum, got one that has a CurriculumCallback; use that"
            )
        self.curriculum = curriculum
        self._handler, self._collect = trainer.callback_handler, trainer.get_batch_samples
        trainer.get_batch_samples = self._get_batch_samples

    def _get_batch_samples(self, iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Return the batches of one optimizer step, cut, with the number of their labels."""
        if self not in self._handler.callbacks:  # removed, or not added yet
            return self._collect(iterator, num_batches, device)
        self.curriculum.accumulation = num_batches
        collected = self._collect(map(self.curriculum.cut, iterator), num_batches, device)
        self.curriculum.end_step()
        return collected

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start at the first step, or at the step of a checkpoint."""
        self.curriculum.load_state_dict(dict.fromkeys(COUNTS, 0))
        if saved := state.stateful_callbacks.get(SAVED_AS):
            self.curriculum.load_state_dict(saved)
        elif state.global_step and self.curriculum.schedule.by_tokens:
            raise CurriculumError(
                f"expected a checkpoint with the curriculum's tokens, got one of step {state.global_step} "
                "without; resume from one of a run with CurriculumCallback, or pass total_steps"
            )
        self.curriculum.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the curriculum's state for the next checkpoint."""
        self.curriculum.step = state.global_step
        state.stateful_callbacks[SAVED_AS] = self.curriculum.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the length of the last batches beside the loss."""
        if logs and "loss" in logs and state.log_history:
            state.log_history[-1]["sequence_length"] = logs["sequence_length"] = self.curriculum.length


class OneBitCallback(TrainerCallback):
    """The callback that registers a Trainer's 1-bit optimizer.

    It synchronizes the ranks before a checkpoint or an evaluation.

        trainer = Trainer(model, arguments, optimizer_cls_and_kwargs=(OneBitAdam, {"lr": 1e-4}), ...)
        trainer.add_callback(OneBitCallback(trainer))

    Trainer makes its DistributedDataParallel in train(), so register() cannot run earlier.
    """

    def __init__(self, trainer: Any) -> None:
        """Store the trainer. Its optimizer and its wrapped model exist from train() on."""
        self._trainer = trainer
        self._registered: nn.Module | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the optimizer, if Trainer wrapped the model in DistributedDataParallel.

        Raises:
            OneBitError: the trainer has another optimizer.
        """
        model = self._trainer.model_wrapped
        optimizer = self._optimizer()
        if isinstance(model, DistributedDataParallel) and model is not self._registered:
            optimizer.register(model)
            self._registered = model

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Share weights and errors among ranks before a save, an evaluation or the end of training.

        At the end of training, Trainer loads the best model, which a later exchange would overwrite.
        """
        is_last = control.should_training_stop or control.should_epoch_stop
        if control.should_save or control.should_evaluate or is_last:
            self._optimizer().synchronize()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Share weights and errors among ranks, as after a step."""
        self.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Share weights and errors among ranks, unless Trainer has loaded the best model."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            self._optimizer().synchronize()

    def _optimizer(self) -> OneBitOptimizer:
        given = self._trainer.optimizer
        optimizer = getattr(given, "optimizer", given)  # in accelerate's AcceleratedOptimizer
        if not isinstance(optimizer, OneBitOptimizer):
            raise OneBitError(
                f"expected a Trainer with a 1-bit optimizer, got a {type(optimizer).__name__}; pass Trainer "
                "optimizer_cls_and_kwargs=(OneBitAdam, {'lr': ...})"
            )
        return optimizer
