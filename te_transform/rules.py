"""The building blocks of rules: graph patterns, canonical ops and forms, and the base class of fused ops."""

from te_transform.backends.op import FusedOp
from te_transform.canonicalize.op import Forms, Spelling
from te_transform.graph import ops
from te_transform.graph.pattern import (
    AnyOrder,
    Call,
    Each,
    Linear,
    Maybe,
    Near,
    Norm,
    OneOf,
    Read,
    Siblings,
    Var,
)
from te_transform.plan.rule import Operation, Outcome, Rule

__all__ = [
    "AnyOrder",
    "Call",
    "Each",
    "Forms",
    "FusedOp",
    "Linear",
    "Maybe",
    "Near",
    "Norm",
    "OneOf",
    "Operation",
    "Outcome",
    "Read",
    "Rule",
    "Siblings",
    "Spelling",
    "Var",
    "ops",
]
