"""Training techniques, each separate and off by default. The core of te_transform never imports them."""

from typing import Any

from te_transform.training.curriculum import SequenceCurriculum
from te_transform.training.drop import LayerDropping, drop_layers
from te_transform.training.length_schedule import CurriculumError
from te_transform.training.one_bit import OneBitAdam, OneBitError, OneBitLamb, ZeroOneAdam
from te_transform.training.token_schedule import TokenSchedule
from te_transform.training.variance_norms import VarianceNorms, variance_norms

__all__ = [
    "CurriculumCallback",
    "CurriculumError",
    "LayerDropping",
    "OneBitAdam",
    "OneBitCallback",
    "OneBitError",
    "OneBitLamb",
    "SequenceCurriculum",
    "TokenSchedule",
    "VarianceNorms",
    "ZeroOneAdam",
    "drop_layers",
    "variance_norms",
]


def __getattr__(name: str) -> Any:
    """Import the names that need transformers when they are first read."""
    if name in ("CurriculumCallback", "OneBitCallback"):
        from te_transform.training import trainer_callback

        return getattr(trainer_callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
