"""`BestCheckpoint`: the checkpoint of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.callbacks.callback import Callback
from paceline.callbacks.patience import sign_of
from paceline.callbacks.run import Run


class BestCheckpoint(Callback):
    """Saves a checkpoint whenever a metric is better than in all evaluations before.

    A metric that is not a loss needs a mode: whether higher ("max") or lower ("min") is better.
    """

    def __init__(self, metric: str = "val_loss", mode: Literal["min", "max"] | None = None) -> None:
        self.metric, self.sign = metric, sign_of(metric, mode)
        self.best = math.inf  # multiplied by the sign, so that lower is better

    def on_start(self, run: Run) -> None:
        """Start from the best value in `run.history`, also after a checkpoint without a state of this callback."""
        self.best = min([self.best, *map(self._value_in, run.history)])

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Save if this evaluation is the best."""
        value = self._value_in(metrics)
        if value < self.best:
            self.best = value
            run.save()

    def _value_in(self, row: Mapping[str, Any]) -> float:
        """The metric times the sign, so that lower is better; infinite if it is missing or not a number."""
        value = row.get(self.metric)
        return math.inf if value is None or math.isnan(value) else float(self.sign * value)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value so far."""
        self.best = state["best"]
