"""The goal of a search: the metric, whether it should be small or large, and the epoch that counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config import Config
from paceline.errors import ConfigError

KNOWN_MODES = {"val_loss": "min", "train_loss": "min", "mse": "min", "mae": "min", "accuracy": "max"}
RETURNED = "value"  # the metric of a train_fn that returns a number


@dataclass(frozen=True)
class Goal:
    """The metric to minimize or maximize."""

    metric: str
    mode: str  # min or max
    keeps_best: bool = False  # the run keeps its best checkpoint by this metric, so its best epoch counts

    def cost(self, value: float) -> float:
        """A number that is smaller for better values."""
        return value if self.mode == "min" else -value

    def value_of(self, history: Sequence[Mapping[str, Any]]) -> float | None:
        """The value of a run with these epochs; None if the metric was not measured, NaN if it is not a number."""
        values = [float(row[self.metric]) for row in history if row.get(self.metric) is not None]
        finite = [value for value in values if math.isfinite(value)]
        if self.keeps_best and finite:
            return min(finite, key=self.cost)
        return values[-1] if values else None


def pick_goal(config: Config, metric: str | None, mode: str | None) -> Goal:
    """The goal of the command line, or that of `checkpoint.best`, or the loss on the validation data."""
    best = config.checkpoint.best
    measured = _measured(config)
    if metric is None:
        metric = best.metric if best is not None else measured[0]
    if config.train_fn is None and metric not in measured:
        raise ConfigError(f"--metric {metric} is not measured; use {', '.join(measured)}, or add it to metrics")
    is_kept = best is not None and best.metric == metric
    if mode is None:
        mode = best.mode if best is not None and is_kept else KNOWN_MODES.get(metric)
    if mode not in ("min", "max"):
        problem = f"--mode {mode} is not known" if mode else f"--metric {metric} has no default mode"
        raise ConfigError(f"{problem}; use --mode min or --mode max")
    return Goal(metric, mode, keeps_best=is_kept and best is not None and best.mode == mode)


def _measured(config: Config) -> list[str]:
    """The metrics that a run of this config measures, the default first."""
    if config.train_fn is not None:
        return [RETURNED]
    is_held_out = config.val_fraction > 0 or config.val_df is not None or config.val_dataset_fn is not None
    return ["val_loss", "train_loss", *config.metrics] if is_held_out else ["train_loss"]
