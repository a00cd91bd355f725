"""Write the table of docs/models.md: convert every model that the tests share, verify it, and count.

    python docs/models.py

Each model has two layers (an encoder-decoder two of each), random weights, and the class its authors wrote.
"""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the models, which are the tests'

import te_transform
from te_transform.report.report import Report
from tests.families import FAMILIES
from tests.zoo import CASES, EXTRA, Case

RULES = ("merge_siblings", "attention", "layernorm_mlp", "layernorm_linear", "linear")
WHY = {  # what stands in the way, by words of the reason; "" where it costs nothing
    "exact (erf) GELU": "exact GELU",
    "a dropout of": "dropout inside the MLP",
    "is also read by": "norm read twice",
    "have a bias and some have none": "q and v have a bias, k has none",
}


def main() -> None:
    logging.disable()
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in (CASES | EXTRA | FAMILIES).values():
        rows.setdefault(cells(case), []).append(case.name)
    print(f"| model | {' | '.join(f'`{rule}`' for rule in RULES)} | in the way of more |")
    print(f"| --- |{' ---: |' * len(RULES)} --- |")
    for found, names in rows.items():
        print(f"| {', '.join(names)} | {' | '.join(found)} |")


def cells(case: Case) -> tuple[str, ...]:
    """How many sites of each rule were fused, and what stands in the way of more."""
    model, sample = case.build(), case.sample()
    converted = te_transform.convert(model, sample)
    if not te_transform.verify(model, converted, sample):
        raise SystemExit(f"{case.name} is not verified")
    report = te_transform.report(converted)
    return *(str(report.counts[rule]) for rule in RULES), ", ".join(obstacles(report))


def obstacles(report: Report) -> list[str]:
    reasons = {reason for site in report.refused for reason in site.reasons}
    known = [name for words, name in WHY.items() if name and any(words in reason for reason in reasons)]
    return known + sorted(reason for reason in reasons if not any(words in reason for words in WHY))


if __name__ == "__main__":
    main()
