"""`EarlyStopping`: ends a run when a metric has stopped improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from paceline.callbacks.arguments import COUNT, NOT_NEGATIVE, check
from paceline.callbacks.callback import Callback
from paceline.callbacks.patience import Patience, WatchedMetric
from paceline.callbacks.run import Run


class EarlyStopping(Callback):
    """Ends the run as complete when a metric has not improved by more than `min_delta` in `patience` evaluations.

    A metric that is not a loss needs a mode: whether higher ("max") or lower ("min") is better.
    """

    def __init__(
        self,
        metric: str = "val_loss",
        mode: Literal["min", "max"] | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
    ) -> None:
        check("early_stop", COUNT, patience=patience)
        check("early_stop", NOT_NEGATIVE, min_delta=min_delta)
        self.watched = WatchedMetric("early_stop.metric", metric, mode)
        self.patience = Patience(self.watched, patience, min_delta)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Count the evaluation; the user's own loop may have epochs without an evaluation."""
        if run.is_own_loop and self.watched.name not in metrics:
            return
        if self.patience.is_exhausted_by(metrics):
            run.finish(self.patience.describe())

    def state_dict(self) -> dict[str, Any]:
        """The best value and the number of evaluations since."""
        return self.patience.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count."""
        self.patience.load_state_dict(state)
