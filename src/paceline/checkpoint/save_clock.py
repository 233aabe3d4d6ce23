"""`every_minutes`: measures what saves cost the training loop, and decides when the next one is due.

Rank 0's clock decides for all ranks, without communication. When checkpoints are saved has no effect on the weights.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any, Literal

from paceline.checkpoint.interval import FIRST_S, Failures, auto_interval_s, describe_interval

STEPS, SAVES = 200, 5  # the newest ones that are taken into account
PAUSE = 10  # a step that takes this number of median steps has included something else, such as an evaluation
MUCH = 1.5  # a change of the interval by this factor is reported


class SaveClock:
    """The time of this rank's loop, with and without a save."""

    def __init__(self, every_minutes: float | Literal["auto"] | None, failures: Failures) -> None:
        self._is_auto, self._failures = every_minutes == "auto", failures
        self.interval_s = FIRST_S if every_minutes == "auto" else 60 * (every_minutes or math.inf)
        self._began = self._started = self._last_step = time.monotonic()
        self._is_saving, self._steps_while_saving = False, 0
        self._step_s: deque[float] = deque(maxlen=STEPS)  # without a save
        self._costs_s: deque[float] = deque(maxlen=SAVES)
        self._reported_s: float | None = None

    @property
    def is_time(self) -> bool:
        """Whether `every_minutes` have passed since the start of the last save."""
        return time.monotonic() - self._started >= self.interval_s

    def end_step(self) -> dict[str, Any] | None:
        """Count a step; return the fields of a `save_interval` event if the interval is to be reported."""
        now = time.monotonic()
        if self._is_saving:
            self._steps_while_saving += 1
        else:
            self._step_s.append(now - self._last_step)
        self._last_step = now
        # Not before a save by time could be due: a short run has no use for the report.
        return self._report() if self._costs_s and now - self._began >= FIRST_S else None

    def start_save(self) -> None:
        """Call this after the loop has waited for a copy of the state."""
        self._is_saving, self._steps_while_saving = True, 0
        self._started = time.monotonic()

    def end_save(self, *, started_at: float, is_saved: bool) -> float | None:
        """The seconds that a save has cost: its time, less the time that its steps would have taken without it.

        This includes steps that were slower, because the writing of files used the same cores, memory or device.
        """
        self._is_saving = False
        if not is_saved:
            return None
        cost_s = time.monotonic() - started_at - self._steps_while_saving * self._typical_step_s()
        self._costs_s.append(max(cost_s, 0.0))
        self._last_step = time.monotonic()  # a save that was waited for is no part of the next step
        if self._is_auto:
            self.interval_s = auto_interval_s(statistics.median(self._costs_s), self._known_failures().mtbf_s)
        return self._costs_s[-1]

    def _typical_step_s(self) -> float:
        """The mean time of the newest steps without a save."""
        limit = PAUSE * statistics.median(self._step_s or [0.0])
        return statistics.fmean([each for each in self._step_s if each <= limit] or [0.0])

    def _known_failures(self) -> Failures:
        known = self._failures
        return Failures(known.ranks, known.count, known.observed_s + time.monotonic() - self._began)

    def _report(self) -> dict[str, Any] | None:
        before_s, now_s = self._reported_s, self.interval_s
        if not self._is_auto or (before_s is not None and before_s / MUCH < now_s < before_s * MUCH):
            return None
        self._reported_s = now_s
        cost_s, failures = statistics.median(self._costs_s), self._known_failures()
        text = describe_interval(now_s, cost_s, failures)
        return {"interval_s": round(now_s, 1), "cost_s": round(cost_s, 4), "text": text}
