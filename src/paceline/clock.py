"""Where a rank's time goes: a clock that is told when the next phase of a step begins."""

from __future__ import annotations

from time import perf_counter

import torch

DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, OTHER = range(6)
PHASES = ("data", "forward", "backward", "reduction", "optimizer", "other")


class Clock:
    """Seconds of each phase on this rank's host, since it was restarted."""

    def __init__(self, device: torch.device) -> None:
        # Of a GPU's work the host sees only how it is handed out; how long it waits for data, it knows.
        self.names = PHASES if device.type == "cpu" else PHASES[:1]
        self._phase, self._since = OTHER, 0.0
        self.restart()

    def enter(self, phase: int) -> None:
        """From now on it is `phase`."""
        now = perf_counter()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def restart(self) -> None:
        """Begin to count anew, in the phase that it is."""
        self._spent = [0.0] * len(PHASES)
        self._since = self._began = perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since it was restarted."""
        return perf_counter() - self._began

    @property
    def seconds(self) -> list[float]:
        """Of each phase that has a name here."""
        self.enter(self._phase)
        return self._spent[: len(self.names)]
