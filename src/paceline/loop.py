"""The managed loop: order and cadence only. What happens in a step, an evaluation or an event is said elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from paceline.data.loader import Lane
from paceline.digest import check_replicas, digests_of
from paceline.evaluate import Evaluator
from paceline.progress import Progress
from paceline.step import Stepper
from paceline.telemetry.events import Events
from paceline.world import World


@dataclass(frozen=True)
class Plan:
    """How long the run is and when it says something."""

    steps_per_epoch: int
    total_steps: int
    log_every_steps: int
    check_replicas_every: int
    log_digests: bool

    @property
    def epochs(self) -> int:
        """Epochs begun by the end of the run."""
        return -(-self.total_steps // self.steps_per_epoch)


@dataclass
class Fit:
    """What the managed loop leaves: one row of history an epoch, and the last validation."""

    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of training; evaluations are not counted


def fit(
    stepper: Stepper,
    lanes: Iterable[Lane],
    evaluator: Evaluator | None,
    plan: Plan,
    world: World,
    events: Events,
    progress: Progress,
) -> Fit:
    """Train to the end of the plan. All ranks."""
    outcome = Fit()
    losses = LossRecord(world)
    progress.phase = "training"
    for step, ridden in _by_step(lanes):
        epoch = step // plan.steps_per_epoch
        progress.epoch, progress.step = epoch, step
        losses.add(stepper.take(step, ridden), samples=ridden[0].step_samples)
        progress.step = done = step + 1
        progress.samples += ridden[0].step_samples
        ends_epoch = done % plan.steps_per_epoch == 0 or done == plan.total_steps
        if done % plan.log_every_steps == 0 or ends_epoch:
            loss, samples_per_s = losses.flush()
            events.write(
                "step", step=done, steps=plan.total_steps, epoch=epoch, epochs=plan.epochs,
                loss=loss, lr=stepper.lr, samples_per_s=round(samples_per_s, 1),
            )  # fmt: skip
            if plan.log_digests:
                events.write("digests", step=done, digests=digests_of(stepper.replica.module).tolist())
        if done % plan.check_replicas_every == 0 or done == plan.total_steps:
            check_replicas(stepper.replica.module, world, done)
        if ends_epoch:
            row: dict[str, Any] = {"epoch": epoch, "step": done, "train_loss": losses.epoch_mean()}
            if evaluator is not None:
                outcome.metrics = _evaluate(evaluator, stepper, events, progress)
                row |= outcome.metrics
            outcome.history.append(row)
            events.write("epoch", **row)
            losses.restart_clock()
    outcome.seconds = losses.seconds
    return outcome


class LossRecord:
    """The loss of each lane of each step, kept on the device until somebody wants to see it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[torch.Tensor] = []
        self._samples = 0
        self.seconds = 0.0  # between flushes and restarts of the clock
        self._epoch_sum = self._epoch_count = 0.0
        self.restart_clock()

    def add(self, lanes: torch.Tensor, samples: int) -> None:
        """Keep one step's (lanes of this rank × sum and count); no synchronisation."""
        self._kept.append(lanes)
        self._samples += samples

    def flush(self) -> tuple[float, float]:
        """The mean loss and the samples per second since the last flush. All ranks."""
        mine = torch.stack(self._kept).double()
        # steps × lanes × 2, in the order of the lanes whatever the number of ranks: the sums are the same to the digit.
        steps = torch.cat(self._world.gather_equal(mine), dim=1)
        per_step = steps.sum(dim=1)
        total, count = per_step.sum(dim=0).tolist()
        self._epoch_sum += total
        self._epoch_count += count
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        self.seconds += elapsed
        speed = self._samples / elapsed
        self._kept.clear()
        self._samples = 0
        self.restart_clock()
        return total / count if count else float("nan"), speed

    def epoch_mean(self) -> float:
        """The mean loss since this was last asked."""
        mean = self._epoch_sum / self._epoch_count if self._epoch_count else float("nan")
        self._epoch_sum = self._epoch_count = 0.0
        return mean

    def restart_clock(self) -> None:
        """Begin to time anew, so that an evaluation does not count as slow training."""
        self._since = time.perf_counter()


def _evaluate(evaluator: Evaluator, stepper: Stepper, events: Events, progress: Progress) -> dict[str, float]:
    progress.phase = "evaluating"
    stepper.replica.share_buffers()
    with stepper.ema.applied() if stepper.ema is not None else nullcontext():
        metrics = evaluator.measure(
            stepper.replica.module,
            on_batch=lambda done, total: events.write_sometimes("evaluating", batch=done, batches=total),
        )
    progress.phase = "training"
    return metrics


def _by_step(lanes: Iterable[Lane]) -> Iterator[tuple[int, list[Lane]]]:
    """The lanes of this rank, gathered into steps."""
    for step, ridden in groupby(lanes, key=lambda lane: lane.step):
        yield step, list(ridden)
