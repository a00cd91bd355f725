"""te_transform: run any PyTorch transformer on fused ops, with the same weights and the same results."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from te_transform.accumulate import Accumulation, AccumulationError, accumulate
    from te_transform.backends import BackendError
    from te_transform.check_ranks import RanksError, check_ranks
    from te_transform.convert import convert, revert
    from te_transform.fp8_only.quantize import QuantizationError, Quantized, quantize_weights
    from te_transform.graph.inputs import InputError, TraceError
    from te_transform.inspect import inspect
    from te_transform.parallel.divided import ParallelError
    from te_transform.parallel.parallelize import parallelize
    from te_transform.pipeline import PIPELINE
    from te_transform.plan.model import ModelError
    from te_transform.plan.options import OptionError
    from te_transform.plan.precision_plan import PrecisionError, PrecisionPlan
    from te_transform.plan.rule import Outcome, Rule
    from te_transform.profile.profile import profile
    from te_transform.profile.result import Profile
    from te_transform.report.report import ExpectationError, Report
    from te_transform.reporting import report
    from te_transform.scaling_state import load_scaling_state, scaling_state
    from te_transform.trace import trace
    from te_transform.verify.verification import Verification
    from te_transform.verify.verify import assert_same, verify

__all__ = [
    "PIPELINE",
    "Accumulation",
    "AccumulationError",
    "BackendError",
    "ExpectationError",
    "InputError",
    "ModelError",
    "OptionError",
    "Outcome",
    "ParallelError",
    "PrecisionError",
    "PrecisionPlan",
    "Profile",
    "QuantizationError",
    "Quantized",
    "RanksError",
    "Report",
    "Rule",
    "TraceError",
    "Verification",
    "accumulate",
    "assert_same",
    "check_ranks",
    "convert",
    "inspect",
    "load_scaling_state",
    "parallelize",
    "profile",
    "quantize_weights",
    "report",
    "revert",
    "scaling_state",
    "trace",
    "verify",
]

_PUBLIC_NAMES = {
    "te_transform.accumulate": ("Accumulation", "AccumulationError", "accumulate"),
    "te_transform.backends": ("BackendError",),
    "te_transform.check_ranks": ("RanksError", "check_ranks"),
    "te_transform.convert": ("convert", "revert"),
    "te_transform.graph.inputs": ("InputError", "TraceError"),
    "te_transform.inspect": ("inspect",),
    "te_transform.parallel.parallelize": ("parallelize",),
    "te_transform.pipeline": ("PIPELINE",),
    "te_transform.plan.model": ("ModelError",),
    "te_transform.plan.options": ("OptionError",),
    "te_transform.plan.precision_plan": ("PrecisionError", "PrecisionPlan"),
    "te_transform.plan.rule": ("Outcome", "Rule"),
    "te_transform.profile.profile": ("profile",),
    "te_transform.profile.result": ("Profile",),
    "te_transform.fp8_only.quantize": ("QuantizationError", "Quantized", "quantize_weights"),
    "te_transform.report.report": ("ExpectationError", "Report"),
    "te_transform.reporting": ("report",),
    "te_transform.parallel.divided": ("ParallelError",),
    "te_transform.scaling_state": ("load_scaling_state", "scaling_state"),
    "te_transform.trace": ("trace",),
    "te_transform.verify.verification": ("Verification",),
    "te_transform.verify.verify": ("assert_same", "verify"),
}
_HOME_OF = {name: home for home, names in _PUBLIC_NAMES.items() for name in names}


class _Package(ModuleType):
    """The package module. It imports torch when a public name is first read, so --help works without torch.

    A public name such as te_transform.convert never becomes the submodule of the same name.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        state = random.getstate()
        attribute = getattr(import_module(_HOME_OF[name]), name)
        random.setstate(state)  # importing rich draws random numbers
        setattr(self, name, attribute)
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME_OF or not isinstance(value, ModuleType):  # an import binds the submodule here
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME_OF})


sys.modules[__name__].__class__ = _Package
# The page is imported when a report is first drawn.
import_module("te_transform.report.renderer").register_renderer("te_transform.page.render")
