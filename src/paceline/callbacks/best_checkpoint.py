"""`BestCheckpoint`: the checkpoint of the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.callbacks.callback import Callback
from paceline.callbacks.patience import WatchedMetric
from paceline.callbacks.run import Run


class BestCheckpoint(Callback):
    """Saves a checkpoint whenever a metric is better than in all previous evaluations.

    A metric that is not a loss needs a mode: whether higher ("max") or lower ("min") is better.
    """

    def __init__(self, metric: str = "val_loss", mode: Literal["min", "max"] | None = None) -> None:
        self.watched = WatchedMetric("checkpoint.best.metric", metric, mode)
        self.best = math.inf  # multiplied by the sign, so that lower is better

    def on_start(self, run: Run) -> None:
        """Start from the best value in `run.history`, even if the checkpoint has no state of this callback."""
        for row in run.history:
            self._is_best(row)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Save if this evaluation is the best; the user's own loop may have epochs without an evaluation."""
        if not run.is_own_loop:
            self.watched.check_measured(metrics)
        if self._is_best(metrics):
            run.save()

    def _is_best(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is better than all previous ones; stores the new best value."""
        value = self.watched.value_in(row)
        is_best = value < self.best
        self.best = value if is_best else self.best
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value so far."""
        self.best = state["best"]
