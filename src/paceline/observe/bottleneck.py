"""Finds the bottleneck of a run: one rank, communication or data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from paceline.config.lane_counts import lane_counts

REDUCTION = "reduction"  # the only phase in which a rank waits for others
RANK_SHARE = 0.1  # of a step: a rank that takes longer than the others by more is a bottleneck
PHASE_SHARE = 0.3  # of a step: a phase that takes more on every rank is a bottleneck
# A rank is a straggler if it is behind by this share of a step at several consecutive log points and for several
# seconds of training: any rank may be late once.
STRAGGLER_SHARE = 0.2
STRAGGLER_WINDOWS = 3
STRAGGLER_S = 5.0


class Bottleneck(NamedTuple):
    """The largest delay of a step. `rank` is None if all ranks have it."""

    rank: int | None
    phase: str  # the phase in which the rank is slowest, or which takes long on all ranks
    behind_ms: float  # per step: the time that others wait for this rank, or the shortest time of a rank in the phase
    share: float  # of a step

    def __str__(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}: +{self.behind_ms:.{0 if self.behind_ms >= 10 else 1}f} ms ({self.phase})"
        name = "communication" if self.phase == REDUCTION else self.phase
        return f"{name} {self.share:.0%} of a step".replace("%", " %")


def find_bottleneck(
    step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]], lanes: int | None = None
) -> Bottleneck | None:
    """The largest bottleneck, if any, from the milliseconds of each rank in a whole step and in each phase (pure).

    A rank with more of the `lanes` than another may take longer in proportion; without `lanes`, all ranks have the same
    number. On a GPU only the phase "data" is known until a step has been timed on the device.
    """
    step = max(step_ms, default=0.0)
    if step <= 0 or any(len(values) != len(step_ms) for values in phase_ms.values()):
        return None
    counts = lane_counts(max(lanes or 0, len(step_ms)), len(step_ms))
    return (
        _slow_rank(phase_ms, step, counts)
        or _slow_phase(REDUCTION, phase_ms, step)
        or _slow_phase("data", phase_ms, step)
    )


def _slow_rank(phase_ms: Mapping[str, Sequence[float]], step: float, counts: Sequence[int]) -> Bottleneck | None:
    """The rank whose own time, without waiting for others, is well above that of the others."""
    own = {phase: values for phase, values in phase_ms.items() if phase != REDUCTION}
    totals = [sum(values) for values in zip(*own.values(), strict=True)]
    if len(totals) < 2:
        return None
    rank = max(range(len(totals)), key=totals.__getitem__)
    # As late as it is, and not only because it has a lane more.
    most = max(counts)
    of_most_lanes = [total * most / count for total, count in zip(totals, counts, strict=True)]
    behind = min(_behind(totals, rank), _behind(of_most_lanes, rank))
    if behind <= RANK_SHARE * step:
        return None
    phase = max(own, key=lambda name: _behind(own[name], rank))
    return Bottleneck(rank, phase, behind, behind / step)


def _behind(values: Sequence[float], rank: int) -> float:
    """The difference of a rank's value from the median of the other ranks."""
    return values[rank] - median(value for other, value in enumerate(values) if other != rank)


def _slow_phase(phase: str, phase_ms: Mapping[str, Sequence[float]], step: float) -> Bottleneck | None:
    least = min(phase_ms.get(phase, ()), default=0.0)
    return Bottleneck(None, phase, least, least / step) if least > PHASE_SHARE * step else None


class StragglerDetector:
    """Finds a rank that delays the others for several seconds, from the step times at each log point."""

    def __init__(self, hosts: Sequence[str], lanes: int | None = None) -> None:
        """`hosts` are those of the ranks, in the order of the ranks; `lanes` are those of a step."""
        self._hosts, self._lanes = hosts, lanes
        self._reported: set[tuple[int, str]] = set()
        self._suspect: tuple[int, str] | None = None
        self._windows, self._seconds = 0, 0.0

    def update(
        self, step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]], seconds: float
    ) -> dict[str, Any] | None:
        """Add `seconds` of training; return the fields of a `straggler` event if there is a new straggler."""
        found = find_bottleneck(step_ms, phase_ms, self._lanes)
        if found is None or found.rank is None or found.share < STRAGGLER_SHARE:
            self._suspect = None
            return None
        suspect = found.rank, found.phase
        if suspect != self._suspect:
            self._suspect, self._windows, self._seconds = suspect, 0, 0.0
        self._windows += 1
        self._seconds += seconds
        if suspect in self._reported or self._windows < STRAGGLER_WINDOWS or self._seconds < STRAGGLER_S:
            return None
        self._reported.add(suspect)
        return self._fields(found, found.rank)

    def _fields(self, found: Bottleneck, rank: int) -> dict[str, Any]:
        host, wait = self._hosts[rank], f"{found.behind_ms:,.1f} ms of each step ({100 * found.share:.0f} %)"
        return {
            "rank": rank, "host": host, "phase": found.phase,
            "behind_ms": round(found.behind_ms, 3), "share": round(found.share, 3),
            "text": f"rank {rank} on {host} delays the others: they wait {wait} for its {found.phase}",
        }  # fmt: skip
