"""Conversion inside Trainer, accelerate and Lightning, after the model is placed and before it is wrapped.

te_transform itself never imports these files. Each imports its package when its name is first read.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_transform.integrations.accelerate import prepare
    from te_transform.integrations.lightning import LightningConvertCallback
    from te_transform.integrations.trainer import ConvertCallback

__all__ = ["ConvertCallback", "LightningConvertCallback", "prepare"]

_MODULE_OF = {"ConvertCallback": "trainer", "LightningConvertCallback": "lightning", "prepare": "accelerate"}


def __getattr__(name: str) -> Any:
    """Import the file of a public name, and with it transformers, Lightning or accelerate."""
    if name in _MODULE_OF:
        return getattr(import_module(f"te_transform.integrations.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
