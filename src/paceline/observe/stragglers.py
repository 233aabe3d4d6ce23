"""A rank that holds the others back: told once it has done so for a while, with where it loses its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.pace import Verdict, slowest

SHARE = 0.2  # of a step
WINDOWS = 3  # log points in a row, and
SECONDS = 5.0  # of training: anybody may be late once


class Stragglers:
    """Looks at the step times of all ranks, log point by log point."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts` are those of the ranks, in their order."""
        self._hosts = hosts
        self._told: set[tuple[int, str]] = set()
        self._suspect: tuple[int, str] | None = None
        self._windows, self._seconds = 0, 0.0

    def see(
        self, step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]], seconds: float
    ) -> dict[str, Any] | None:
        """Take in `seconds` of training; the fields of a `straggler` event if there is something new to tell."""
        verdict = slowest(step_ms, phase_ms)
        if verdict is None or verdict.rank is None or verdict.share < SHARE:
            self._suspect = None
            return None
        suspect = verdict.rank, verdict.phase
        if suspect != self._suspect:
            self._suspect, self._windows, self._seconds = suspect, 0, 0.0
        self._windows += 1
        self._seconds += seconds
        if suspect in self._told or self._windows < WINDOWS or self._seconds < SECONDS:
            return None
        self._told.add(suspect)
        return self._fields(verdict, verdict.rank)

    def _fields(self, verdict: Verdict, rank: int) -> dict[str, Any]:
        host, late = self._hosts[rank], f"{verdict.behind_ms:,.1f} ms of each step ({100 * verdict.share:.0f} %)"
        return {
            "rank": rank, "host": host, "phase": verdict.phase,
            "behind_ms": round(verdict.behind_ms, 3), "share": round(verdict.share, 3),
            "text": f"rank {rank} on {host} holds the others back: they wait {late} for its {verdict.phase}",
        }  # fmt: skip
