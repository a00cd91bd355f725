"""te_transform: any PyTorch transformer on fused ops, with the same weights and the same answers."""

from te_transform.convert import convert, inspect, report, revert
from te_transform.graph.inputs import InputError, TraceError
from te_transform.passes import PIPELINE
from te_transform.plan.model import ModelError
from te_transform.plan.options import OptionError
from te_transform.plan.rule import Outcome, Rule
from te_transform.trace import trace

__all__ = [
    "PIPELINE",
    "InputError",
    "ModelError",
    "OptionError",
    "Outcome",
    "Rule",
    "TraceError",
    "convert",
    "inspect",
    "report",
    "revert",
    "trace",
]
