"""Print the tables of docs/models.md: convert each model of the tests, verify it, and count its sites.

    python docs/models.py [NAME ...]

With names, only the lines of these models are printed. If the package of a model is not installed, or an
older version, its cells stay unchanged.

Each model has two layers, or two encoder and two decoder layers, with random weights. The classes are those
of the authors. transformers models with experts are converted in bfloat16, in which experts are grouped
products, unless their own code fails in it.
"""

import copy
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # to import the models of the tests

import torch
from torch import nn

import te_transform
from te_transform.report.report import Report
from tests.conversions import cast
from tests.families import FAMILIES, NEWEST
from tests.others import OTHERS
from tests.zoo import CASES, EXTRA, Case, Inputs

RULES = ("merge_siblings", "attention", "experts", "layernorm_mlp", "layernorm_linear", "linear")
WHY = {  # the obstacle, by a part of the reason; the first match counts
    "reads a norm through": "calls after a norm",
    "exact (erf) GELU": "exact GELU",
    "the activation is": "another activation",
    "a dropout of": "dropout inside the MLP",
    "the first linear is merged with": "another product merged with the MLP's first",
    "of the layer_norm is also read by": "norm read twice",
    "of the rms_norm is also read by": "norm read twice",
    "are also read by": "scores that are read",
    "are multiplied by a tensor": "a tensor as scale",
    "between its two products": "attention of its own kind",
    "in the middle of the attention": "attention of its own kind",
    "after its softmax": "attention of its own kind",
    "is over another dimension": "attention of its own kind",
    "than scaled_dot_product_attention": "attention of its own kind",
    "have a bias and some have none": "some of q, k and v have a bias and are frozen",
    "is computed at every call": "computed weights",
    "is cast to": "computed weights",
    "is a view of a parameter": "computed weights",
    "has sinks": "sinks, without TE",
    "the indices of topk": "another router",
    "copy of its expert's weights": "copied experts",
    "a supported activation between them": "experts of their own kind",
    "with only these columns is needed": "one linear for attention and MLP",
    "norm there": "norm elsewhere",
    "reads a written-out norm": "norm of its own kind",
    "between these operations": "writes in between",
    "has a stack of matrices": "a matrix per head, group or token",
    "keeps the number of features": "another number of features",
    "of the two linears has a bias": "one bias of two",
    "in place of the softmax": "attention of its own kind",
    "need a multiple of 16": "a linear with few rows",
    "has a kernel of": "convolutions",
    "by a computed matrix": "computed weights",
    "weight is a buffer": "weights that are buffers",
    "has its parameter on the left": "a parameter on the left",
}


def main() -> None:
    logging.disable()
    names = sys.argv[1:]
    older = {name: case for name, case in FAMILIES.items() if name not in NEWEST}
    for cases in (CASES | EXTRA, older, NEWEST, OTHERS):
        if asked := [case for case in cases.values() if not names or case.name in names]:
            print("\n".join(table(asked)), end="\n\n")


def table(cases: Iterable[Case]) -> Iterator[str]:
    """Yield a Markdown table. Models with equal cells share a line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        try:
            is_newer = case.name in NEWEST.keys() - FAMILIES.keys()  # than this version of transformers
            found = _as_printed(case.name) if is_newer else cells(case)
        except ModuleNotFoundError:  # the model's package is not installed
            found = _as_printed(case.name)
        rows.setdefault(found, []).append(case.name)
    yield f"| model | {' | '.join(f'`{rule}`' for rule in RULES)} | reasons |"
    yield f"| --- |{' ---: |' * len(RULES)} --- |"
    for found, names in rows.items():
        yield f"| {', '.join(names)} | {' | '.join(found)} |"


def cells(case: Case) -> tuple[str, ...]:
    """Return the number of fused sites of each rule, and the obstacles to more."""
    model, sample = _of_two_layers(case), case.sample()
    if case.hf and any(type(part).__name__.endswith("Experts") for part in model.modules()):
        model, sample = _in_bfloat16(model, sample)
    converted = te_transform.convert(model, sample)
    if not (found := te_transform.verify(model, converted, sample)):
        raise SystemExit(f"{case.name}: {found}")
    report = te_transform.report(converted)
    return *(str(report.counts[rule]) for rule in RULES), ", ".join(obstacles(report))


def _as_printed(name: str) -> tuple[str, ...]:
    """Return the cells that docs/models.md has for a model."""
    lines = Path(__file__).with_suffix(".md").read_text().splitlines()
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| "))
    return next(tuple(found) for names, *found in rows if name in names.split(", "))


def _in_bfloat16(model: nn.Module, sample: Inputs) -> tuple[nn.Module, Inputs]:
    """Return model and inputs in bfloat16, or in float32 if the model's own code fails in bfloat16."""
    narrow, inputs = copy.deepcopy(model).bfloat16(), cast(sample, torch.bfloat16)
    try:
        narrow(**inputs)
    except RuntimeError:
        return model, sample
    return narrow, inputs


def _of_two_layers(case: Case) -> nn.Module:
    """Build a case of the tests with two layers: some have one layer there, to save time."""
    build = case.build
    one_layer = isinstance(build, partial) and build.keywords.get("num_hidden_layers") == 1
    return build(num_hidden_layers=2) if one_layer else build()


def obstacles(report: Report) -> list[str]:
    reasons = {reason for site in report.refused for reason in site.reasons}
    return [*dict.fromkeys(map(_obstacle, sorted(reasons)))]


def _obstacle(reason: str) -> str:
    return next((name for words, name in WHY.items() if words in reason), reason)


if __name__ == "__main__":
    main()
