"""The conversion inside Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from te_transform.integrations.planned_conversion import PlannedConversion
from te_transform.plan.options import OptionError


class LightningConvertCallback(Callback):
    """Converts a module inside a LightningModule in place, on its device, before a strategy wraps it.

        trainer = lightning.Trainer(callbacks=[LightningConvertCallback("model")])

    If the module cannot be converted, Lightning runs the original, and a warning is logged with the reason.
    """

    def __init__(self, path: str, example_inputs: Any = None, **options: Any) -> None:
        """Check the options of te_transform.convert(); `inplace` is always True.

        Args:
            path: Of the module that the steps of the LightningModule call, such as "model".
            example_inputs: As in te_transform.convert().
            options: Of te_transform.convert().

        Raises:
            OptionError, BackendError: an option is misspelled, or cannot be used on this machine.
        """
        self._path = path
        self._conversion = PlannedConversion(example_inputs, options)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move the LightningModule to its device and dtype, as the strategy will, and convert the module.

        Raises:
            OptionError: the LightningModule has no module at the path.
        """
        inside = {path: module for path, module in pl_module.named_modules() if path}
        if self._path not in inside:
            raise OptionError(
                f"expected the path of a module of {type(pl_module).__name__} "
                f"({', '.join([*inside][:5])}), got {self._path!r}; if configure_model() builds it, call "
                "te_transform.convert() there"
            )
        if isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):  # others shard the model first
            if isinstance(trainer.precision_plugin, HalfPrecision):
                trainer.precision_plugin.convert_module(pl_module)
            pl_module.to(trainer.strategy.root_device)
        self._conversion.apply(inside[self._path])
