"""te_transform: any PyTorch transformer on fused ops, with the same weights and the same answers."""

from te_transform.accumulate import Accumulation, AccumulationError, accumulate
from te_transform.backends import BackendError
from te_transform.check_ranks import RanksError, check_ranks
from te_transform.convert import convert, revert
from te_transform.graph.inputs import InputError, TraceError
from te_transform.inspect import inspect
from te_transform.parallelize import parallelize
from te_transform.passes import PIPELINE
from te_transform.plan.model import ModelError
from te_transform.plan.options import OptionError
from te_transform.plan.precision_plan import PrecisionError, PrecisionPlan
from te_transform.plan.rule import Outcome, Rule
from te_transform.quantize import QuantizationError, Quantized, quantize_weights
from te_transform.report.report import ExpectationError, Report
from te_transform.reporting import report
from te_transform.runtime.parallel import ParallelError
from te_transform.scaling_state import load_scaling_state, scaling_state
from te_transform.trace import trace
from te_transform.verify.verification import Verification
from te_transform.verify.verify import verify

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
    "QuantizationError",
    "Quantized",
    "RanksError",
    "Report",
    "Rule",
    "TraceError",
    "Verification",
    "accumulate",
    "check_ranks",
    "convert",
    "inspect",
    "load_scaling_state",
    "parallelize",
    "quantize_weights",
    "report",
    "revert",
    "scaling_state",
    "trace",
    "verify",
]
