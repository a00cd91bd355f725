"""Find Python loops where kernels exist: recurrences and loops over experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from te_transform.profile.analysis import Analysis
from te_transform.profile.classes import PRODUCT
from te_transform.profile.trials import Suspect
from te_transform.profile.watch import Line, Watch

_LEAST_REPETITIONS = 48  # runs of a line in one call of its module from which it is a loop over positions
_INDEXED_SUMS = ("index_add_", "index_add", "index_put_", "scatter_add_", "__setitem__")
# functions in plain PyTorch for which packages have kernels
_KERNELS = (
    (r"delta_?(?:rule|net)", "flash-linear-attention (fla)"),
    (r"selective_(?:scan|state)|chunk_scan|ssd|segment_sum|mamba", "mamba-ssm"),
    (r"wkv|rwkv|retention|gated_?linear|gla_|hgrn", "flash-linear-attention (fla)"),
)
_ASK_EXPERTS = (
    "compute all experts by grouped products: a model of transformers does with "
    'experts_implementation="grouped_mm"'
)
_ASK_SCAN = "write the loop as a scan over chunks, or compile the module"


def recurrence(analysis: Analysis) -> Iterator[Suspect]:
    """Yield recurrences in plain PyTorch: functions with such names, and loops over positions."""
    watch = analysis.watch
    advice_by_label: dict[int, tuple[str, str]] = {}
    sizes = Counter((line.label, line.function) for line in watch.most)
    for line, number in sorted(
        _loops(watch.most, 1), key=lambda each: sizes[each[0].label, each[0].function]
    ):
        packages = (package for pattern, package in _KERNELS if re.search(pattern, line.function, re.I))
        if (package := next(packages, None)) is not None:
            ran = f"{line.function}() in {line.place.rpartition(':')[0]} ran in plain PyTorch"
            if number >= _LEAST_REPETITIONS:
                ran = f"{ran}, {line.place} {number} times a call"
            advice_by_label[line.label] = ran, f"install {package}, whose kernels run it on a GPU"
    for line, number in _loops(watch.most, _LEAST_REPETITIONS):
        advice_by_label.setdefault(line.label, (f"{line.place} runs {number} times in one call", _ASK_SCAN))
    for label, (evidence, advice) in advice_by_label.items():
        taken = analysis.cost({label})
        if label and label not in _labels_of_experts(watch) and taken:
            yield Suspect("recurrence in PyTorch", label, evidence, advice, taken)


def _labels_of_experts(watch: Watch) -> dict[int, Line]:
    """Return the labels of modules that repeatedly choose rows and add results into a tensor in one call."""
    choosing = {line.label for line in watch.waits if line.called in ("nonzero", "where", "__getitem__")}
    summing = {
        line.label: line for line, number in watch.most.items() if line.called in _INDEXED_SUMS and number > 1
    }
    return {label: line for label, line in summing.items() if label in choosing}


def expert_loop(analysis: Analysis) -> Iterator[Suspect]:
    """Yield loops over experts. Grouped products save at most the time outside of products."""
    for label, line in _labels_of_experts(analysis.watch).items():
        inside = analysis.under(analysis.labels[label].path)
        taken = analysis.cost(inside)
        products = analysis.cost(inside, PRODUCT)
        times = analysis.watch.most[line]
        evidence = f"a loop at {line.place} runs {times} experts one by one"
        yield Suspect("expert loop", label, evidence, _ASK_EXPERTS, taken, most=taken - products)


def _loops(most: Mapping[Line, int], least: int) -> Iterator[tuple[Line, int]]:
    """Yield each function's most frequent line, if it ran often enough in one call of its module."""
    best: dict[tuple[int, str, str], tuple[Line, int]] = {}
    for line, number in most.items():
        key = line.label, line.function, line.file
        if number >= least and number > best.get(key, (line, 0))[1]:
            best[key] = line, number
    yield from best.values()
