"""The conversion inside transformers' Trainer."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback

from te_transform.integrations.planned_conversion import PlannedConversion

log = logging.getLogger(__name__)


class ConvertCallback(TrainerCallback):
    """Converts the model of a Trainer in place, on its device, before Trainer wraps it in DDP or FSDP.

        trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[ConvertCallback()])

    If the model cannot be converted, Trainer trains the original, and a warning is logged with the reason.
    """

    def __init__(self, example_inputs: Any = None, **options: Any) -> None:
        """Check the options of te_transform.convert(); `inplace` is always True.

        Raises:
            OptionError, BackendError: an option is misspelled, or cannot be used on this machine.
        """
        self._conversion = PlannedConversion(example_inputs, options)
        self._model: nn.Module | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Convert the model, which Trainer has placed and not yet wrapped."""
        self._conversion.apply(model)
        self._model = model

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Warn if Trainer trains another model than the one that it was made with."""
        if all(module is not self._model for module in model.modules()):
            log.warning(
                "%s is trained unconverted: expected a model and ConvertCallback in Trainer(model, "
                "callbacks=[...]), got %s; convert the model in model_init, if you use it",
                type(model).__name__,
                "a callback that was added later" if self._model is None else "another model since",
            )
