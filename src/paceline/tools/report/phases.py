"""The phases of a step on each rank: the mean time of each over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REST = "device"  # the rest of a step on a GPU, if no step's phases were timed


@dataclass(frozen=True)
class Phases:
    """Milliseconds of a step: for each phase, one number for each rank."""

    names: list[str]
    ms: list[list[float]]


class PhaseSums:
    """Adds up the phases of `pace` events, and starts again when the number of ranks or the phases change."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, list[float]] = {}

    def add(self, steps: int, step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]]) -> None:
        """Add the mean times of `steps` steps."""
        known = dict(phase_ms)
        if set(known) == {"data"}:  # no step was timed on the GPU yet, or not since the ranks were restarted
            if REST not in self._sums and len(self._sums.get("data", ())) == len(known["data"]):
                return
            known[REST] = [max(0.0, all_ - data) for all_, data in zip(step_ms, known["data"], strict=True)]
        if {name: len(ms) for name, ms in known.items()} != {name: len(ms) for name, ms in self._sums.items()}:
            self._steps, self._sums = 0, {name: [0.0] * len(ms) for name, ms in known.items()}
        self._steps += steps
        for name, ms in known.items():
            self._sums[name] = [total + steps * each for total, each in zip(self._sums[name], ms, strict=True)]

    def mean(self) -> Phases | None:
        """The means over all steps since the ranks last changed; None if no phases were measured."""
        if not self._steps:
            return None
        return Phases(
            list(self._sums), [[round(ms / self._steps, 3) for ms in of_ranks] for of_ranks in self._sums.values()]
        )


def own_ms(step_ms: Sequence[float], phase_ms: Mapping[str, Sequence[float]]) -> list[float]:
    """The step time of each rank, without the time in which it waited for other ranks, if known."""
    waited = phase_ms.get("reduction", [0.0] * len(step_ms))
    return [round(all_ - waits, 3) for all_, waits in zip(step_ms, waited, strict=True)]
