"""The length of training sequences as a function of the number of past steps or tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from te_transform.graph.keywords import did_you_mean
from te_transform.training.counts import is_count

SCHEDULES = ("linear", "root")


class CurriculumError(ValueError):
    """The error for a curriculum that cannot be used, or for a batch that it cannot cut."""


@dataclass(frozen=True)
class LengthSchedule:
    """The lengths from `min_length` to `max_length`, reached after `total` steps or tokens.

    The length is s(t) = floor((t / total)^(1 / r) * (max_length - min_length) + min_length), rounded down to
    a multiple of `bucket`. r is 1 for "linear" and 2 for "root" (arXiv 2108.06084). A mapping has the length
    from each step or token on. From `total` on, the length is `max_length`. `by_tokens` is True if `total` is
    in tokens. With `longest_first`, the length at 0 is `max_length`.
    """

    min_length: int
    max_length: int
    total: int
    schedule: str | Mapping[int, int]
    bucket: int
    by_tokens: bool = False
    longest_first: bool = False

    def length_at(self, position: int) -> int:
        """Return the length after `position` steps or tokens, computed in integers."""
        return self.max_length if self.longest_first and position == 0 else self._grown(position)

    def _grown(self, position: int) -> int:
        if position >= self.total:
            return self.max_length
        if isinstance(self.schedule, Mapping):
            return self.schedule[max(start for start in self.schedule if start <= position)]
        span = self.max_length - self.min_length
        if self.schedule == "linear":
            grown = span * position // self.total
        else:
            grown = isqrt(span * span * position // self.total)
        return (self.min_length + grown) // self.bucket * self.bucket

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths of the schedule, ascending. If it counts tokens, steps may skip lengths."""
        if isinstance(self.schedule, Mapping):
            return tuple(sorted({*self.schedule.values(), self.max_length}))
        positions, buckets = range(self.total + 1), range(self.min_length, self.max_length, self.bucket)
        first = (bisect_left(positions, length, key=self._grown) for length in buckets)
        return tuple(sorted({*map(self._grown, first), self.max_length}))


def length_schedule(
    min_length: int | None, max_length: int, total: int, schedule: str | Mapping[int, int], bucket: int
) -> LengthSchedule:
    """Return the schedule of these arguments of SequenceCurriculum.

    Raises:
        CurriculumError: the value of an argument is invalid, by itself or with the other arguments.
    """
    check_count("bucket", bucket)
    check_count("max_length", max_length)
    if isinstance(schedule, Mapping):
        if min_length is not None:
            raise CurriculumError(
                f"expected no min_length beside a mapping of lengths, got {min_length!r}; leave it out"
            )
        _check_stages(schedule, max_length, total, bucket)
        return LengthSchedule(min(schedule.values()), max_length, total, dict(schedule), bucket)
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        suggested = did_you_mean(schedule, SCHEDULES) if isinstance(schedule, str) else ""
        raise CurriculumError(
            "expected schedule='linear', 'root', or a mapping of step or token to length such as "
            f"{{0: 64, 1000: 256}} for a discrete one, got {schedule!r}{suggested}"
        )
    min_length = bucket if min_length is None else min_length
    check_count("min_length", min_length)
    _check_length("min_length", min_length, bucket)
    if min_length > max_length:
        raise CurriculumError(
            f"expected min_length of at most max_length={max_length}, got {min_length}; lower min_length "
            "(it defaults to the bucket) or the bucket"
        )
    return LengthSchedule(min_length, max_length, total, schedule, bucket)


def check_count(name: str, value: Any) -> None:
    """Check that an argument is a positive integer.

    Raises:
        CurriculumError: the argument has another value.
    """
    if not is_count(value):
        raise CurriculumError(f"expected {name} of at least 1, got {value!r}; pass a positive int")


def _check_length(name: str, length: int, bucket: int) -> None:
    """Raise unless `length` is a positive multiple of the bucket."""
    if length < bucket:
        raise CurriculumError(
            f"expected {name} of at least one bucket of {bucket} tokens, got {length}; pass "
            f"bucket={length}, or {name}={bucket}"
        )
    if length % bucket:
        below = length // bucket * bucket
        raise CurriculumError(
            f"expected {name} to be a multiple of bucket={bucket}, got {length}; pass {below} or "
            f"{below + bucket}"
        )


def _check_stages(stages: Mapping[Any, Any], max_length: int, total: int, bucket: int) -> None:
    """Raise unless `stages` has a length for every position from 0 to `total`."""
    if 0 not in stages:
        raise CurriculumError(
            f"expected a schedule that starts at 0, got {dict(stages)}; add the length of the first step"
        )
    for start, length in stages.items():
        if not isinstance(start, int) or not 0 <= start < total:
            raise CurriculumError(
                f"expected stages that start from 0 to {total - 1}, got {start!r}; after the total the "
                "length is max_length"
            )
        check_count(f"the length from {start} on", length)
        if length > max_length:
            raise CurriculumError(
                f"expected lengths of at most max_length={max_length}, got {length} from {start} on; raise "
                "max_length"
            )
        if length != max_length:
            _check_length(f"the length from {start} on", length, bucket)
