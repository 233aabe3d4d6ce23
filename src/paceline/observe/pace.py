"""What holds the pace of a run down: one rank, communication or data (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

REDUCTION = "reduction"  # the one phase in which a rank waits for others
BEHIND = 0.1  # of a step, from which a rank that takes longer than the others is named
LARGE = 0.3  # share of a step, from which what all ranks do is named


class Verdict(NamedTuple):
    """What costs the most time. `rank` is None where all ranks are alike."""

    rank: int | None
    phase: str  # where the rank loses most, or what takes so long on all
    behind_ms: float  # a step: what the others wait for this rank, or what the phase takes at least
    share: float  # of a step

    def __str__(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}: +{self.behind_ms:.{0 if self.behind_ms >= 10 else 1}f} ms ({self.phase})"
        name = "communication" if self.phase == REDUCTION else self.phase
        return f"{name} {self.share:.0%} of a step".replace("%", " %")


def slowest(step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]]) -> Verdict | None:
    """The one thing to look at, or None: by the milliseconds of each rank, for a whole step and in each of its phases.

    On a GPU only the phase "data" is known until a step was timed there.
    """
    step = max(step_ms, default=0.0)
    if step <= 0 or any(len(values) != len(step_ms) for values in phase_ms.values()):
        return None
    return _slow_rank(phase_ms, step) or _large(REDUCTION, phase_ms, step) or _large("data", phase_ms, step)


def _slow_rank(phase_ms: Mapping[str, Sequence[float]], step: float) -> Verdict | None:
    """The rank whose own time, waiting left out, is well above that of the others."""
    own = {phase: values for phase, values in phase_ms.items() if phase != REDUCTION}
    totals = [sum(values) for values in zip(*own.values(), strict=True)]
    if len(totals) < 2:
        return None
    rank = max(range(len(totals)), key=totals.__getitem__)
    behind = _behind(totals, rank)
    if behind <= BEHIND * step:
        return None
    phase = max(own, key=lambda name: _behind(own[name], rank))
    return Verdict(rank, phase, behind, behind / step)


def _behind(values: Sequence[float], rank: int) -> float:
    """How far a rank's value is above the median of the others."""
    return values[rank] - median(value for other, value in enumerate(values) if other != rank)


def _large(phase: str, phase_ms: Mapping[str, Sequence[float]], step: float) -> Verdict | None:
    least = min(phase_ms.get(phase, ()), default=0.0)
    return Verdict(None, phase, least, least / step) if least > LARGE * step else None
