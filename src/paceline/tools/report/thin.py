"""Reduces the points of a long run to the number that a page can draw. All remaining values were measured (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple, TypeVar

STRAGGLER_RATIO = 1.25  # of a step time to the median of all ranks

T = TypeVar("T")


class Point(NamedTuple):
    """A number, and the step and time at which it was measured."""

    step: int
    seconds: float  # since the run began
    value: float


class StepTimes(NamedTuple):
    """The time of a step on each rank, without the time in which it waited for other ranks, if known."""

    step: int
    ms: Sequence[float]


@dataclass(frozen=True)
class Heat:
    """Step times as a heat map, with a column for some steps and a row for each rank."""

    steps: list[int]  # the last step of each column
    columns: list[list[float]]  # the longest time of each rank
    stragglers: list[list[int]]  # the stragglers of each column
    points: int  # the number of measurements
    slow_points: dict[int, int]  # for each straggler, the number of measurements in which it was one


def thinned(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: the first, the last, and the lowest and highest of equal stretches between them."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    kept = [points[0]]
    for stretch in stretches(inner, (limit - 2) // 2):
        low, high = min(stretch, key=lambda point: point.value), max(stretch, key=lambda point: point.value)
        kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def stretches(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """The items in order, in at most `count` parts of nearly equal length."""
    count = min(count, len(items))
    for part in range(count):
        yield items[part * len(items) // count : (part + 1) * len(items) // count]


def heat_of(times: Sequence[StepTimes], limit: int) -> Heat:
    """Step times in at most `limit` columns. Stragglers are detected before times are dropped."""
    slow = [stragglers_in(point.ms) for point in times]
    parts = list(stretches(list(zip(times, slow, strict=True)), limit))
    counts: dict[int, int] = {}
    for rank in sorted(rank for ranks in slow for rank in ranks):
        counts[rank] = counts.get(rank, 0) + 1
    return Heat(
        steps=[part[-1][0].step for part in parts],
        columns=[_longest([point.ms for point, _ in part]) for part in parts],
        stragglers=[sorted({rank for _, ranks in part for rank in ranks}) for part in parts],
        points=len(times),
        slow_points=counts,
    )


def stragglers_in(times: Sequence[float]) -> list[int]:
    """The ranks whose time is more than STRAGGLER_RATIO times the median of all."""
    usual = median_low(times) if times else 0.0
    return [rank for rank, ms in enumerate(times) if ms > STRAGGLER_RATIO * usual]


def _longest(rows: Sequence[Sequence[float]]) -> list[float]:
    ranks = max(map(len, rows))  # a run may be resumed on another number of ranks
    return [max(row[rank] for row in rows if rank < len(row)) for rank in range(ranks)]
