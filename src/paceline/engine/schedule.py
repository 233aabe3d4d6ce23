"""The learning rate of each update: by `schedule`, by the user's `schedule_fn`, or by a scheduler of torch.

A rate depends only on the step and the `state_dict`, so a resumed run has the rates of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.callbacks.patience import Patience, WatchedMetric
from paceline.config import Config, Schedule
from paceline.data.seeding import keyed_generators
from paceline.engine.optimizers import lrs_of, set_lr
from paceline.engine.torch_scheduler import TorchScheduler
from paceline.errors import ConfigError
from paceline.observe.failures import raising_config_errors

NEED_END = ("linear", "cosine", "exponential", "onecycle", "wsd")  # schedules that need the number of steps

Metrics = Mapping[str, float | None]


class LearningRates:
    """Multiplies the initial learning rates of an optimizer by a factor that depends on the step."""

    watched: WatchedMetric | None = None  # the metric on which the rates depend

    def __init__(self, optimizer: torch.optim.Optimizer, factor_at: Callable[[int], float] = lambda step: 1.0) -> None:
        self.optimizer, self.factor_at, self.base_lrs = optimizer, factor_at, lrs_of(optimizer)
        self.lrs = self.base_lrs  # of the last update

    @property
    def changes_options(self) -> bool:
        """Whether options of the optimizer other than its learning rates have changed."""
        return False

    def lrs_at(self, step: int) -> list[float]:
        """The learning rate of each group in the update that takes `step` to `step + 1`."""
        factor = self.factor_at(step)
        return [base * factor for base in self.base_lrs]

    def apply(self, step: int) -> float:
        """Set the learning rates for the next update, and return that of the first group."""
        self.lrs = self.lrs_at(step)
        set_lr(self.optimizer, self.lrs)
        return self.lrs[0]

    def after_update(self) -> None:
        """Called after each update."""

    def after_evaluation(self, metrics: Metrics) -> None:
        """Called after each evaluation, with its row."""

    def state_dict(self) -> dict[str, Any]:
        """The state, besides the step, on which the rates depend."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class PlateauRates(LearningRates):
    """Reduces the learning rates when a metric has stopped improving, after a warm-up."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        super().__init__(optimizer)
        self.schedule, self.reductions, option = schedule, 0, schedule.option
        self.watched = WatchedMetric("schedule.metric", option("metric"), option("mode"))
        self.patience = Patience(self.watched, option("patience"), option("min_delta"))
        self.factor_at = self._factor_at

    def _factor_at(self, step: int) -> float:
        reduced = self.schedule.option("factor") ** self.reductions
        return warm_up_at(step, self.schedule.warmup_steps) * max(float(reduced), self.schedule.final)

    def after_evaluation(self, metrics: Metrics) -> None:
        """Reduce the rates if the patience is exhausted, and wait again."""
        if self.patience.is_exhausted_by(metrics):
            self.reductions += 1
            self.patience.waited = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of reductions, and the metric so far."""
        return {"reductions": self.reductions, "patience": self.patience.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if "reductions" in state:  # otherwise the run had another schedule until now
            self.reductions = state["reductions"]
            self.patience.load_state_dict(state["patience"])


class SchedulerRates(LearningRates):
    """Uses the learning rates, and other options such as momentum, of a scheduler of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: TorchScheduler) -> None:
        super().__init__(optimizer)
        self.scheduler = scheduler
        if scheduler.metric is not None:  # only the scheduler has its mode
            self.watched = WatchedMetric("the scheduler's metric", scheduler.metric, "min")

    @property
    def changes_options(self) -> bool:
        """Whether the scheduler also sets options such as momentum."""
        return self.scheduler.changes_options

    def lrs_at(self, step: int) -> list[float]:
        """The learning rates that the scheduler set last."""
        return self.scheduler.lrs()

    def after_update(self) -> None:
        """Step the scheduler, unless it waits for evaluations."""
        if not self.scheduler.takes_metric:
            self.scheduler.step()

    def after_evaluation(self, metrics: Metrics) -> None:
        """Step a scheduler that needs a metric: its named metric, or the validation loss, or else the training loss."""
        if not self.scheduler.takes_metric:
            return
        if self.watched is not None:
            self.watched.check_measured(metrics)
        usual = "val_loss" if "val_loss" in metrics else "train_loss"
        value = metrics[self.watched.name if self.watched is not None else usual]
        if value is not None:
            self.scheduler.step(value)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state of the scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scheduler, and set the options that it had set."""
        if "scheduler" in state:  # otherwise the run had another schedule until now
            self.scheduler.load_state_dict(state)


def make_rates(
    config: Config, optimizer: torch.optim.Optimizer, total_steps: int | None, steps_per_epoch: int | None
) -> LearningRates:
    """The learning rates of the config; a ConfigError if they need the length of the run and it is unknown."""
    if config.scheduler_fn is not None:
        with keyed_generators(config.seed, "scheduler"):
            return SchedulerRates(optimizer, TorchScheduler(config.function("scheduler_fn"), optimizer, total_steps))
    if config.schedule_fn is not None:
        factor_of = checked_schedule(config.function("schedule_fn"))
        return LearningRates(optimizer, lambda step: factor_of(step, total_steps))
    schedule = config.schedule
    if schedule.name in NEED_END and total_steps is None:
        raise ConfigError(
            f"schedule.name={schedule.name} needs the number of steps, which is unknown for an iterable data set; "
            "set max_steps, or use schedule.name: constant"
        )
    if schedule.every_epochs is not None and steps_per_epoch is None:
        raise ConfigError(
            f"schedule.every_epochs={schedule.every_epochs} needs the number of steps in an epoch, which is unknown "
            "for an iterable data set; set schedule.every_steps"
        )
    if schedule.name == "plateau":
        return PlateauRates(optimizer, schedule)
    return LearningRates(optimizer, lambda step: factor_at(step, schedule, total_steps, steps_per_epoch))


def checked_schedule(schedule_fn: Callable[..., Any]) -> Callable[[int, int | None], float]:
    """The user's `schedule_fn`, whose results are checked to be finite numbers; step 0 is checked now."""

    def factor_of(step: int, total_steps: int | None) -> float:
        with raising_config_errors(f"schedule_fn({step}, {total_steps})"):
            value = schedule_fn(step, total_steps)
        try:
            factor = float(value)
        except (TypeError, ValueError):
            factor = math.nan
        if not math.isfinite(factor) or factor < 0:
            raise ConfigError(
                f"schedule_fn returned {value!r} for step {step} of {total_steps}; "
                "it must return a number ≥ 0, the factor of the learning rates"
            )
        return factor

    return factor_of


# --- the schedules, as pure functions -------------------------------------------------------------------------------


def factor_at(step: int, schedule: Schedule, total_steps: int | None, steps_per_epoch: int | None = None) -> float:
    """The factor of the learning rates in the update that takes `step` to `step + 1`, for a schedule by its name."""
    if schedule.name == "onecycle":
        assert total_steps is not None
        return _one_cycle_at(step, schedule, total_steps)
    if step < schedule.warmup_steps:
        return warm_up_at(step, schedule.warmup_steps)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "step":
        every = schedule.every_steps or (schedule.every_epochs or 1) * (steps_per_epoch or 1)
        return float(schedule.option("factor") ** (step // every))
    assert total_steps is not None, "a schedule with an end needs the number of steps"
    begin = schedule.warmup_steps
    if schedule.name == "wsd":  # warm-up, stable, decay
        begin = max(begin, total_steps - round(schedule.option("decay_fraction") * total_steps))
    done = max(0.0, (step - begin) / max(1, total_steps - begin))
    if schedule.name == "exponential":
        return float(schedule.final**done)
    down = (1 + math.cos(math.pi * done)) / 2 if schedule.name == "cosine" else 1 - done
    return schedule.final + (1 - schedule.final) * down


def warm_up_at(step: int, warmup_steps: int) -> float:
    """The factor of a linear warm-up, which is 1 from its last step on."""
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _one_cycle_at(step: int, schedule: Schedule, total_steps: int) -> float:
    """The factor that rises from `start` to 1 and falls to `final`, each along half a cosine wave."""
    peak = max(0.0, schedule.option("warmup_fraction") * total_steps - 1)
    if step <= peak and peak > 0:
        low, done = schedule.option("start"), 1 - step / peak
    else:
        low, done = schedule.final, (step - peak) / max(1.0, total_steps - 1 - peak)
    return float(low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)
