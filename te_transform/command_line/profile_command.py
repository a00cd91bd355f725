"""The command that profiles a step."""

from __future__ import annotations

import argparse
import sys

import torch

from te_transform.backends.ranks import is_first_rank
from te_transform.command_line.commands import loaded, printing_aside, show
from te_transform.execution.console import status
from te_transform.execution.timing import duration
from te_transform.plan.options import OptionError
from te_transform.profile.profile import profile


def run_profile(asked: argparse.Namespace) -> int:
    """Print a profile on rank 0, and return 1 if a step of any rank exceeds the budget."""
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("expected a GPU for --device cuda, got none; pass --device cpu, or leave it out")
    model, inputs = loaded(asked, on_meta=False)
    with printing_aside(), status("profiling"):
        step_profile = profile(model, inputs, plan=not asked.no_plan)
    if is_first_rank():
        if asked.html:
            step_profile.to_html(asked.html)
        show(step_profile.to_json() if asked.json else step_profile)
    slowest = max([step_profile.seconds, *(rank.seconds for rank in step_profile.ranks)])
    if asked.budget is None or slowest <= asked.budget:
        return 0
    if is_first_rank():
        why = f"expected a step of at most {duration(asked.budget)}, got {duration(slowest)}"
        print(f"te-transform: {why}", file=sys.stderr)
    return 1
