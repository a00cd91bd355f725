"""One conversion inside another package's training: checked early, the same on all ranks, never fatal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from te_transform.backends import BackendError
from te_transform.backends.ranks import gathered, is_first_rank
from te_transform.check_ranks import RanksError, check_ranks
from te_transform.convert import convert, revert
from te_transform.execution.attach import runner_of
from te_transform.execution.console import on_terminal
from te_transform.graph.errors import in_a_line
from te_transform.pipeline import PIPELINE
from te_transform.plan.options import OptionError, Options
from te_transform.reporting import report

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedConversion:
    """The example inputs and the options of a conversion that another package's training will ask for.

    Raises:
        OptionError, BackendError: an option is misspelled, or cannot be used on this machine.
    """

    example_inputs: Any
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        checked = Options.of(nn.Module(), PIPELINE, inplace=True, **self.options)
        if checked.compile == "auto" and self.example_inputs is None:
            raise OptionError(
                "expected example_inputs with compile='auto', which times calls on them, got none; pass "
                "example_inputs of the sizes that the model will run on"
            )

    def apply(self, model: nn.Module) -> None:
        """Convert `model` in place on all ranks, and show the report on rank 0's terminal.

        If a rank cannot convert, all ranks keep the original model, and a warning is logged with the reason.
        A PEFT model is converted without its wrapper, which has no code of its own to fuse.

        Raises:
            OptionError, BackendError: an option does not fit the model or its device.
        """
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        if runner_of(model) is not None:
            return
        why = self._failure(model)
        if why is not None:
            log.warning("%s is trained unconverted: %s", type(model).__name__, why)
        elif is_first_rank() and not log.isEnabledFor(logging.INFO):  # convert() logs it at this level
            on_terminal(report(model))

    def _failure(self, model: nn.Module) -> str | None:
        """Convert `model`, and return why a rank could not, or None."""
        why = None
        device = next((parameter.device for parameter in model.parameters()), None)
        try:
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.example_inputs)
            convert(model, inputs, inplace=True, **self.options)
        except (OptionError, BackendError):
            raise
        except Exception as error:
            why = in_a_line(error)
        why = _failure_of_ranks(model, why)
        if why is not None and runner_of(model) is not None:
            revert(model)
        return why


def _failure_of_ranks(model: nn.Module, own: str | None) -> str | None:
    """Return why this rank or another one could not convert, or in what the ranks' conversions differ.

    FP8 scales are exchanged in collectives of converted models: a rank without them would hang the others.
    """
    failures = gathered(own)
    if len(failures) == 1:
        return own
    if failed := [f"rank {rank}: {why}" for rank, why in enumerate(failures) if why is not None]:
        return own or failed[0]
    try:
        check_ranks(model)
    except RanksError as error:
        return str(error)
    return None
