"""Counts the evaluations since a metric last improved, for early stopping and for the schedule `plateau`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.errors import ConfigError


def sign_of(metric: str, mode: Literal["min", "max"] | None) -> int:
    """1 if lower values of a metric are better, −1 if higher ones are; a ConfigError if that is not known."""
    if mode is None and not metric.endswith("loss"):
        raise ConfigError(
            f'metric={metric!r} needs a mode, whether higher or lower is better; give mode="max" or mode="min"'
        )
    return -1 if mode == "max" else 1


def measured(key: str, metric: str, metrics: Mapping[str, float | None]) -> float | None:
    """The value of a metric that the user has named by `key`; a ConfigError if it is not measured."""
    if metric not in metrics:
        known = ", ".join(name for name in metrics if name not in ("epoch", "step"))
        raise ConfigError(f"{key}={metric!r} is not measured; use {known}")
    return metrics[metric]


class Patience:
    """Whether a metric has not improved by more than `min_delta` in the last `patience` evaluations."""

    def __init__(
        self, owner: str, metric: str, mode: Literal["min", "max"] | None, patience: int, min_delta: float = 0.0
    ) -> None:
        """`owner` is what the user knows the metric's setting by, for errors."""
        self.owner = owner
        self.metric, self.sign, self.patience, self.min_delta = metric, sign_of(metric, mode), patience, min_delta
        self.best: float | None = None  # multiplied by the sign, so that lower is better
        self.waited = 0  # evaluations since the best one

    def is_exhausted_by(self, metrics: Mapping[str, float | None]) -> bool:
        """Count an evaluation; a metric that is not a number is no improvement."""
        value = measured(f"{self.owner}.metric", self.metric, metrics)
        number = math.nan if value is None else self.sign * value
        if number < (math.inf if self.best is None else self.best - self.min_delta):
            self.best, self.waited = number, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def describe(self) -> str:
        """How long the metric has not improved, for the reason of a stop."""
        best = "it was never a number" if self.best is None else f"the best value is {self.sign * self.best:.6g}"
        return f"{self.metric} has not improved in {self.waited} evaluations; {best}"

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.waited = state["best"], state["waited"]
