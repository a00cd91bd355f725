"""The conversion inside accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from te_transform.integrations.planned_conversion import PlannedConversion
from te_transform.plan.options import OptionError

_PLACED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *objects: Any, example_inputs: Any = None, **options: Any) -> Any:
    """Call accelerator.prepare(*objects), with the model among them moved and converted in place before.

        model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

    If the model cannot be converted, the original is prepared, and a warning is logged with the reason.
    Parameters stay the same objects, so the optimizer may be made before.

    Args:
        accelerator: An accelerate.Accelerator.
        objects: The arguments of accelerator.prepare(), with one module among them.
        example_inputs: As in te_transform.convert().
        options: Of te_transform.convert(); `inplace` is always True.

    Returns:
        The prepared objects, in the same order.

    Raises:
        OptionError, BackendError: an option is misspelled, or cannot be used here; or not one of the objects
            is a module.
    """
    conversion = PlannedConversion(example_inputs, options)
    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1:
        raise OptionError(
            f"expected one torch.nn.Module among the objects to prepare, got {len(models)}; convert each by "
            "te_transform.convert(model, inplace=True) and call accelerator.prepare()"
        )
    (model,) = models
    if (
        accelerator.device_placement
        and accelerator.distributed_type in _PLACED
        and not accelerator.verify_device_map(model)
    ):
        model.to(accelerator.device)  # as prepare() does; otherwise wrappers place the parameters
    conversion.apply(model)
    return accelerator.prepare(*objects)
