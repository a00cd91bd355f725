"""Find what stops the CPU from running ahead: host syncs, recompilations, and a GPU that waits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from te_transform.profile.analysis import Analysis
from te_transform.profile.classes import IDLE
from te_transform.profile.steps import TIMED
from te_transform.profile.trials import Suspect

_WAITING_OPS = ("item", "nonzero", "is_nonzero", "masked_select", "equal")
_MOST_IDLE_SHARE = 0.1  # share of the step that a GPU may wait without a finding
_ASK_SYNC = "keep the value in a tensor, or read it outside of the forward: on a GPU, the CPU waits here"
_ASK_COMPILE = "pass the values that change as tensors, and inputs of few shapes"
_ASK_LAUNCH = (
    "launch fewer kernels: a larger batch, te_transform.convert(compile=True) or convert(graphs=True)"
)


def host_sync(analysis: Analysis) -> Iterator[Suspect]:
    """Yield calls that wait for the GPU. On a CPU they cost nothing, and are reported for a later GPU."""
    costs: Counter[int] = Counter()
    for op in analysis.forward():
        if op.outer is op and op.name in _WAITING_OPS:
            costs[op.label] += (op.event.end - op.event.start) * analysis.on_gpu
    if analysis.recording.watch is None:
        for label, taken in costs.items():
            yield Suspect("host sync", label, "item() or nonzero() runs in the forward", _ASK_SYNC, taken)
        return
    for line, number in analysis.watch.waits.items():
        evidence = f"{line.called.strip('_')} at {line.place} runs {number} time{'s' * (number > 1)} a step"
        yield Suspect("host sync", line.label, evidence, _ASK_SYNC, costs.pop(line.label, 0))


def recompilation(analysis: Analysis) -> Iterator[Suspect]:
    """Yield code that dynamo compiled again in a timed step."""
    for each in analysis.recording.recompiled:
        taken = int((each.entire_frame_compile_time_s or 0.0) / TIMED / analysis.scale)
        reason = re.split(r"\s+# |\s*\(HINT|\s*User stack", each.recompile_reason or "")[0]
        why = f": {reason}" if reason else ""
        evidence = (
            f"{each.co_name} ({each.co_filename}:{each.co_firstlineno}) was compiled in a later step{why}"
        )
        yield Suspect("recompilation", analysis.root, evidence, _ASK_COMPILE, taken)


def launches(analysis: Analysis) -> Iterator[Suspect]:
    """Yield the idle time of a GPU that waits for the CPU's launches."""
    idle = analysis.cost(kind=IDLE)
    if idle > _MOST_IDLE_SHARE * analysis.total:
        evidence = f"the GPU waits for the CPU in {idle / analysis.total:.0%} of the step"
        yield Suspect("launches", analysis.root, evidence, _ASK_LAUNCH, idle)
