"""The state of a loop between steps, the managed one or the user's own, and the plan of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Names of fields in checkpoints of earlier versions.
EARLIER_NAMES = {
    "is_evaluation_due": "owes_evaluation",
    "is_epoch_cut_short": "is_broken_off",
    "stream_position": "mark",
    "sample_losses": "losses",
}


@dataclass(frozen=True)
class LoopPlan:
    """The length of the run, and the intervals of the loop's actions."""

    total_steps: int | None  # None where an iterable data set decides
    epochs: int  # begun by the end of the run
    lanes: int
    log_every_steps: int | None  # None: `step` events by the step number, `pace` events by the clock
    check_replicas_every: int
    log_digests: bool
    steps_per_epoch: int | None = None  # None where an iterable data set decides
    evaluate_every_steps: int | None = None  # within an epoch
    evaluate_every_epochs: int = 1
    ranks_by_loss: bool = False  # whether samples are ordered by their losses, after the first epoch


@dataclass
class LossSums:
    """Sums and counts of the losses, or of another value: since the last `step` event, and in this epoch."""

    window: float = 0.0
    window_count: float = 0.0
    epoch: float = 0.0
    epoch_count: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Add the loss of one step."""
        self.window += total
        self.window_count += count
        self.epoch += total
        self.epoch_count += count

    def window_mean(self) -> float | None:
        """The mean since the last `step` event, at which the next window starts; None if nothing was counted."""
        mean = self.window / self.window_count if self.window_count else None
        self.window = self.window_count = 0.0
        return mean

    def epoch_mean(self) -> float | None:
        """The mean of this epoch so far; None if nothing was counted."""
        return self.epoch / self.epoch_count if self.epoch_count else None

    def restart_epoch(self) -> None:
        """Reset the sums of the epoch."""
        self.epoch = self.epoch_count = 0.0


@dataclass
class TrainState:
    """The state of the loop between two steps. It is part of checkpoints, so a run resumes at any step."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # of training; evaluations are not counted
    history: list[dict[str, Any]] = field(default_factory=list)  # one row for each epoch
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    sums: LossSums = field(default_factory=LossSums)
    value_sums: dict[str, LossSums] = field(default_factory=dict)  # of further values that a step returns, by name
    is_evaluation_due: bool = False  # the run was stopped after an epoch's last step and before its evaluation
    is_step_evaluation_due: bool = False  # the run was stopped before an evaluation within an epoch
    evaluation: dict[str, Any] = field(default_factory=dict)  # the row of the last evaluation within an epoch
    is_epoch_cut_short: bool = False  # the last row belongs to an epoch that `max_steps` or `run.finish` has cut short
    finish_requested: str | None = None  # the reason that was given to `run.finish` on any rank
    frozen: list[str] = field(default_factory=list)  # the names of the parameters that `run.freeze` keeps unchanged
    is_finished: bool = False  # all ranks have agreed to end the run here
    epoch: int = 0  # of the last step, from 1
    epochs_done: int = 0  # whose last step is done; their evaluation may be due
    stream_position: tuple[int, int] = (0, 0)  # iterable data sets: the next step's epoch, and the epoch's first step
    sample_losses: torch.Tensor | None = None  # of every sample after the first epoch, if samples are ordered by them

    @property
    def open_epoch(self) -> int | None:
        """The epoch, counted from 0, whose first step is done but whose row is not in the history; None between two."""
        return self.epoch - 1 if self.epoch > (self.history[-1]["epoch"] if self.history else 0) else None

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainState:
        """The state from the result of `asdict`, including that of earlier versions."""
        content = {**content}
        for name, earlier in EARLIER_NAMES.items():
            if earlier in content:
                content[name] = content.pop(earlier)
        # Checkpoints of earlier versions count epochs from 0.
        shift = 1 if content["history"] and content["history"][0]["epoch"] == 0 else 0
        history = [{**row, "epoch": row["epoch"] + shift} for row in content["history"]]
        content.setdefault("epoch", len(history))
        is_due, is_cut = content["is_evaluation_due"], content["is_epoch_cut_short"]
        content.setdefault("epochs_done", len(history) + is_due - is_cut)
        value_sums = {name: LossSums(**sums) for name, sums in content.get("value_sums", {}).items()}
        sums = {"sums": LossSums(**content["sums"]), "value_sums": value_sums}
        return cls(**{**content, "history": history, **sums})
