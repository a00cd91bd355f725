"""The findings of a profile: where a slow fallback ran, and what the change would gain."""

from __future__ import annotations

from te_transform.graph.grouped import grouped
from te_transform.profile.analysis import NS, Analysis, alike, where
from te_transform.profile.attentions import math_attention, needless_mask, written_out_attention
from te_transform.profile.dense_experts import dense_experts
from te_transform.profile.loops import expert_loop, recurrence
from te_transform.profile.precision import single_precision, single_precision_norms
from te_transform.profile.result import Finding
from te_transform.profile.trials import Replacements, Suspect
from te_transform.profile.waits import host_sync, launches, recompilation

FINDERS = (
    math_attention,
    written_out_attention,
    needless_mask,
    recurrence,
    expert_loop,
    dense_experts,
    single_precision,
    single_precision_norms,
    host_sync,
    recompilation,
    launches,
)


_LEAST_IDEAL_SHARE = 0.01  # the share of the step from which operations get a finding without a gain
_LEAST_GAIN_SHARE = 0.001  # the share of the step from which a measured gain is a finding


def findings(analysis: Analysis, trials: Replacements) -> tuple[Finding, ...]:
    """Return all findings, the largest gain first. The most expensive operations are tried first."""
    suspects = [suspect for finder in FINDERS for suspect in finder(analysis)]
    groups = grouped((_key_of(analysis, suspect), suspect) for suspect in suspects)
    costly_first = sorted(groups.values(), key=lambda group: -sum(each.taken for each in group))
    results = [_finding(analysis, group, trials) for group in costly_first]
    step = analysis.scale * analysis.total
    kept = [
        each for each in results
        if each.basis == "upper bound"
        or each.gain > _LEAST_GAIN_SHARE * step
        or each.seconds > _LEAST_IDEAL_SHARE * step
    ]  # fmt: skip
    return tuple(sorted(kept, key=lambda finding: -finding.gain))


def _key_of(analysis: Analysis, suspect: Suspect) -> tuple[object, ...]:
    layer = () if suspect.together else alike(analysis.labels[suspect.label])
    return suspect.what, layer, suspect.advice


def _finding(analysis: Analysis, group: list[Suspect], trials: Replacements) -> Finding:
    costly_first = sorted(group, key=lambda suspect: -suspect.taken)
    layers = grouped((alike(analysis.labels[suspect.label]), suspect) for suspect in costly_first)
    gains = [_gain(analysis, layer, trials) for layer in layers.values()]
    largest = costly_first[0]
    labels = {suspect.label: analysis.labels[suspect.label] for suspect in group}
    return Finding(
        largest.what,
        where(labels.values()),
        len(labels),
        largest.evidence,
        largest.advice,
        analysis.scale * sum(suspect.taken for suspect in group),
        sum(gain for gain, _ in gains),
        "measured" if all(is_measured for _, is_measured in gains) else "upper bound",
    )


def _gain(analysis: Analysis, layer: list[Suspect], trials: Replacements) -> tuple[float, bool]:
    """Return the gain in equal layers, and True if it was measured, on the most expensive layer."""
    largest = layer[0]
    if largest.trial is not None and (share := trials.share(largest.trial, NS * largest.taken)) is not None:
        return max(0.0, analysis.scale * sum(suspect.taken for suspect in layer) * (1 - share)), True
    most = sum(suspect.taken if suspect.most is None else suspect.most for suspect in layer)
    return analysis.scale * most, False
