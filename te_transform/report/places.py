"""Group equal outcomes: `h.0.mlp` and `h.1.mlp` become `h.{0,1}.mlp  x2`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from te_transform.graph.grouped import grouped
from te_transform.plan.rule import Outcome


@dataclass(frozen=True)
class Places:
    """The sites of one rule with the same reasons: path patterns, each with its number of sites.

    `reasons` say why the sites are refused, or why fused sites are not active in a call of the example's
    sizes.
    """

    rule: str
    reasons: tuple[str, ...]
    patterns: tuple[tuple[str, int], ...]
    weights: int = 0  # total number of elements in the sites' weights
    saved: float = 0.0  # predicted seconds per call that fusing the sites saves or would save
    is_fused: bool = False

    @property
    def count(self) -> int:
        return sum(count for _, count in self.patterns)

    @property
    def active(self) -> int:
        """The number of sites that run fused in a call of the example's sizes."""
        return self.count if self.is_fused and not self.reasons else 0

    @property
    def lines(self) -> list[str]:
        return [f"{pattern}  x{count}" for pattern, count in self.patterns]


def gather(outcomes: Iterable[Outcome]) -> list[Places]:
    """Group outcomes by rule and reasons, both in the order of their first outcome."""
    by_rule = grouped((outcome.rule, outcome) for outcome in outcomes)
    return [
        Places(
            rule,
            why,
            collapse(o.path for o in group),
            sum(o.weights for o in group),
            sum(o.saved for o in group),
            group[0].status == "fused",
        )
        for rule, own in by_rule.items()
        for why, group in grouped((o.reasons or (o.inactive,) * bool(o.inactive), o) for o in own).items()
    ]


def most_valuable_first(places: Iterable[Places]) -> list[Places]:
    """Sort refused sites by the time that fusing would save, then by weight size, then by number of sites."""
    return sorted(places, key=lambda place: (-place.saved, -place.weights, -place.count))


def collapse(paths: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return patterns of `paths` with counts: `h.0.mlp` and `h.1.mlp` become ("h.{0,1}.mlp", 2).

    Patterns are exact: a pattern has several varying numbers only if all their combinations occur.
    """
    counts = Counter(tuple(_part(part) for part in path.split(".")) for path in paths)
    for place in reversed(range(max(map(len, counts), default=0))):
        merged: dict[tuple, tuple[frozenset, int]] = {}
        for parts, count in counts.items():
            numbers = next((p for p in parts[place : place + 1] if isinstance(p, frozenset)), None)
            key = parts if numbers is None else (*parts[:place], None, *parts[place + 1 :])
            known, total = merged.get(key, (frozenset(), 0))
            merged[key] = (known.union(numbers or ()), total + count)
        counts = {}
        for key, (numbers, count) in merged.items():
            counts[tuple(numbers if part is None else part for part in key)] = count
    named = ((".".join(map(_path_part, parts)), count) for parts, count in counts.items())
    return tuple((pattern or "(the model itself)", count) for pattern, count in named)


def listed(paths: Iterable[str]) -> str:
    """Return the patterns of `paths` as one comma-separated string."""
    return ", ".join(pattern for pattern, _ in collapse(paths))


def _part(text: str) -> str | frozenset[int]:
    return frozenset({int(text)}) if text.isdecimal() and text == str(int(text)) else text


def _path_part(part: str | frozenset[int]) -> str:
    if isinstance(part, str):
        return part
    runs = groupby(enumerate(sorted(part)), lambda numbered: numbered[1] - numbered[0])
    spans = [[number for _, number in run] for _, run in runs]
    texts = [f"{s[0]}..{s[-1]}" if len(s) > 2 else ",".join(map(str, s)) for s in spans]
    return ",".join(texts) if len(part) == 1 else "{" + ",".join(texts) + "}"


def unnumbered(path: str) -> str:
    """Return a module path with * for each number, so that equal layers have the same."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
