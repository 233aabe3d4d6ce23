"""`BestCheckpoint`: the checkpoint of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.callbacks.callback import Callback
from paceline.callbacks.run import Run


class BestCheckpoint(Callback):
    """Saves a checkpoint whenever a metric is better than in all epochs before."""

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        self.metric, self.sign = metric, 1 if mode == "min" else -1

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Compare the last row of the history with the others."""
        *before, last = (self._value_in(row) for row in run.history)
        if not math.isnan(last) and all(math.isnan(value) or last < value for value in before):
            run.save()

    def _value_in(self, row: Mapping[str, Any]) -> float:
        value = row.get(self.metric)
        return math.nan if value is None else self.sign * value
