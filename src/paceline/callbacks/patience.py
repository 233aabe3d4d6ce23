"""A metric and the evaluations since it last improved, for early stopping, best checkpoints and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from paceline.callbacks.arguments import TEXT
from paceline.errors import ConfigError

Mode = Literal["min", "max"]


class WatchedMetric:
    """A metric of evaluations, of which lower or higher values are better."""

    def __init__(self, key: str, metric: str, mode: Mode | None) -> None:
        """`key` is the name of the user's setting for the metric, for errors."""
        if not TEXT.holds(metric):
            raise ConfigError(f"{key}={metric!r} {TEXT.words}")
        if mode is None and not metric.endswith("loss"):
            raise ConfigError(
                f'{key}={metric!r} needs a mode: whether higher or lower is better; set mode="max" or mode="min"'
            )
        if mode not in (None, "min", "max"):
            raise ConfigError(f'{key}={metric!r} has mode={mode!r}, which is unknown; set mode="max" or mode="min"')
        self.key, self.name, self.sign = key, metric, -1 if mode == "max" else 1

    def check_measured(self, names: Iterable[str]) -> None:
        """Raise a ConfigError if the metric is not among the numbers of an evaluation."""
        if self.name not in (measured := [name for name in names if name not in ("epoch", "step")]):
            known = ", ".join(measured) or "another one"
            raise ConfigError(f"{self.key}={self.name!r} is not measured; use {known}")

    def value_in(self, metrics: Mapping[str, Any]) -> float:
        """The metric, multiplied so that lower is better; NaN if it has no value."""
        value = metrics.get(self.name)
        return math.nan if value is None else float(self.sign * value)


class Patience:
    """Whether a metric has not improved by more than `min_delta` in the last `patience` evaluations."""

    def __init__(self, metric: WatchedMetric, patience: int, min_delta: float = 0.0) -> None:
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best: float | None = None  # multiplied by the sign, so that lower is better
        self.waited = 0  # the number of evaluations since the best one

    def is_exhausted_by(self, metrics: Mapping[str, float | None]) -> bool:
        """Count an evaluation; NaN is not an improvement."""
        self.metric.check_measured(metrics)
        number = self.metric.value_in(metrics)
        if number < (math.inf if self.best is None else self.best - self.min_delta):
            self.best, self.waited = number, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def describe(self) -> str:
        """The time without improvement, as the reason of a stop."""
        best = "it was always NaN" if self.best is None else f"the best value is {self.metric.sign * self.best:.6g}"
        return f"{self.metric.name} has not improved in {self.waited} evaluations; {best}"

    def state_dict(self) -> dict[str, Any]:
        """The best value and the evaluations since."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.waited = state["best"], state["waited"]
