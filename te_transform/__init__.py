"""te_transform: any PyTorch transformer on fused modules, with the same weights and the same answers."""

from pathlib import Path

if not (Path(__file__).parent / "passes").is_dir():  # a checkout: the catalogue lies beside the package
    __path__.append(str(Path(__file__).parent.parent))

from te_transform.accumulate import AccumulationError, accumulate
from te_transform.backends import BackendError
from te_transform.config import OptionError
from te_transform.convert import convert, inspect, report
from te_transform.emit import revert
from te_transform.fp8_weights import QuantizationError, Quantized, quantize_weights
from te_transform.inputs import InputError
from te_transform.model import ModelError
from te_transform.optimizer import OptimizerError, move_optimizer
from te_transform.passes import PIPELINE
from te_transform.precision import PrecisionError, PrecisionPlan
from te_transform.rule import Outcome, Rule
from te_transform.trace import TraceError, trace
from te_transform.verify import Verification, verify

__all__ = [
    "PIPELINE",
    "AccumulationError",
    "BackendError",
    "InputError",
    "ModelError",
    "OptimizerError",
    "OptionError",
    "Outcome",
    "PrecisionError",
    "PrecisionPlan",
    "QuantizationError",
    "Quantized",
    "Rule",
    "TraceError",
    "Verification",
    "accumulate",
    "convert",
    "inspect",
    "move_optimizer",
    "quantize_weights",
    "report",
    "revert",
    "trace",
    "verify",
]
