"""The managed loop: order and cadence only. What happens in a step, an evaluation or a save is said elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import State, capture
from paceline.config import Best
from paceline.data.loader import Turn
from paceline.digest import check_replicas, digests_of
from paceline.evaluate import Evaluator
from paceline.progress import Progress
from paceline.step import Stepper
from paceline.stop import Stop, StopAgreed
from paceline.telemetry.events import Events
from paceline.world import Exchange, World


@dataclass(frozen=True)
class Plan:
    """How long the run is and when it says something."""

    total_steps: int | None  # None where an iterable data set decides
    epochs: int  # begun by the end of the run
    log_every_steps: int
    check_replicas_every: int
    log_digests: bool
    best: Best | None


@dataclass
class Sums:
    """Losses so far: since the last `step` event, and in this epoch."""

    window: float = 0.0
    window_count: float = 0.0
    epoch: float = 0.0
    epoch_count: float = 0.0


@dataclass
class Fit:
    """All that the loop carries from step to step. A checkpoint holds it, so a run goes on from any step."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # of training; evaluations are not counted
    history: list[dict[str, Any]] = field(default_factory=list)  # one row an epoch
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    sums: Sums = field(default_factory=Sums)
    owes_evaluation: bool = False  # the run was stopped after an epoch's last step and before its evaluation
    is_broken_off: bool = False  # the last row is of an epoch that `max_steps` has cut short
    mark: tuple[int, int] = (0, 0)  # of an iterable data set: the next step's epoch, and the step that began it

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Fit:
        """What `asdict` has made of one."""
        return cls(**{**content, "sums": Sums(**content["sums"])})


@dataclass
class Loop:
    """One run from its present step to its end, or to the step at which all ranks agree to stop."""

    stepper: Stepper
    turns: Iterable[Turn]
    evaluator: Evaluator | None
    plan: Plan
    saver: Saver
    stop: Stop
    fit: Fit
    world: World
    events: Events
    progress: Progress

    def run(self) -> int:
        """Train. Returns 0, or the reason why it was stopped. All ranks."""
        self.exchange = Exchange(self.world)
        self.losses = LossRecord(self.world, self.fit)
        self.progress.step, self.progress.samples = self.fit.step, self.fit.samples
        try:
            if self.fit.owes_evaluation:
                self._end_epoch(self.fit.history[-1]["epoch"] + 1 if self.fit.history else 0)
            self.progress.phase = "training"
            is_first = True
            for turn in self.turns:
                self._take(turn)
                if is_first:  # the optimizer has its state now
                    self.saver.reserve(self._capture())
                    is_first = False
        except StopAgreed as agreed:
            return int(agreed.args[0])
        finally:
            self.progress.batch = None
        return 0

    def save(self) -> bool:
        """Save the present state and wait for it; whether it is on the disk. All ranks."""
        self.progress.phase = "saving"
        return self.saver.save_now(self.fit.step, self._state, self._measured())

    def _take(self, turn: Turn) -> None:
        """One step, and whatever is due after it. All ranks."""
        fit, plan = self.fit, self.plan
        if fit.is_broken_off:  # this step goes on with that epoch
            fit.history.pop()
        fit.is_broken_off = turn.breaks_off
        self.progress.epoch, self.progress.step = turn.epoch, turn.step
        self.exchange.begin(self.stop.reason, self.saver.is_time, self.saver.is_busy)
        samples = turn.lanes[0].step_samples
        self.losses.add(self.stepper.take(turn.step, turn.lanes), samples=samples)
        fit.step = self.progress.step = turn.step + 1
        fit.samples += samples
        fit.mark = turn.mark
        self.progress.samples = fit.samples
        if fit.step % plan.log_every_steps == 0 or turn.ends_epoch:
            self._log(turn.epoch)
        if fit.step % plan.check_replicas_every == 0 or turn.ends_run:
            check_replicas(self.stepper.replica.module, self.world, fit.step)
        reason, is_time, is_busy = self.exchange.end()
        fit.owes_evaluation = turn.ends_epoch
        is_better = False
        if turn.ends_epoch and not reason:
            self._end_epoch(turn.epoch)
            is_better = self._is_better()
        if is_better:
            self.saver.finish()  # these weights are the best, not those of a step to come
        elif not is_busy:
            self.saver.settle()
        if reason:
            raise StopAgreed(reason)
        if self.saver.is_due(fit.step, is_time=bool(is_time), is_asked=is_better):
            self.saver.start(fit.step, self._state(), self._measured())

    def _log(self, epoch: int) -> None:
        loss, samples_per_s = self.losses.flush()
        self.events.write(
            "step", step=self.fit.step, steps=self.plan.total_steps, epoch=epoch, epochs=self.plan.epochs,
            loss=loss, lr=self.stepper.lr, samples_per_s=round(samples_per_s, 1),
        )  # fmt: skip
        if self.plan.log_digests:
            digests = digests_of(self.stepper.replica.module).tolist()
            self.events.write("digests", step=self.fit.step, digests=digests)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate and close the epoch's row of history. All ranks."""
        row: dict[str, Any] = {"epoch": epoch, "step": self.fit.step, "train_loss": self.losses.epoch_mean()}
        if self.evaluator is not None:
            self.fit.metrics = self._evaluate(self.evaluator)
            row |= self.fit.metrics
        if not self.fit.is_broken_off:
            self.losses.restart_epoch()
        self.fit.owes_evaluation = False
        self.fit.history.append(row)
        self.events.write("epoch", **row)
        self.losses.restart_clock()

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        self.progress.phase = "evaluating"
        self.stepper.replica.share_buffers()
        with self.stepper.ema.applied() if self.stepper.ema is not None else nullcontext():
            metrics = evaluator.measure(self.stepper.replica.module, self._on_round)
        self.progress.phase, self.progress.batch = "training", None
        return metrics

    def _on_round(self, done: int, total: int) -> None:
        """After each round of an evaluation. All ranks."""
        self.progress.batch = done
        self.events.write_sometimes("evaluating", batch=done, batches=total)
        self.exchange.begin(self.stop.reason)
        [reason] = self.exchange.end()
        if reason:
            raise StopAgreed(reason)

    def _is_better(self) -> bool:
        """Whether the last row of history is the best so far, by the metric that the config names."""
        if self.plan.best is None:
            return False
        sign = 1 if self.plan.best.mode == "min" else -1
        measured = [row.get(self.plan.best.metric) for row in self.fit.history]
        values = [math.nan if value is None else sign * value for value in measured]
        return not math.isnan(values[-1]) and all(math.isnan(v) or values[-1] < v for v in values[:-1])

    def _measured(self) -> dict[str, float]:
        """What a checkpoint says of how good it is: the last row of history, if it belongs to this step."""
        row = self.fit.history[-1] if self.fit.history else {}
        is_of_now = row.get("step") == self.fit.step
        return {name: value for name, value in row.items() if isinstance(value, float)} if is_of_now else {}

    def _state(self) -> State:
        """The state to save, the same on all ranks. All ranks."""
        self.losses.collect()
        self.stepper.replica.share_buffers()
        return self._capture()

    def _capture(self) -> State:
        counters = {"loop": asdict(self.fit), "stepper": self.stepper.counters()}
        return capture(self.stepper.replica.module, self.stepper.optimizer, self.stepper.ema, counters)


class LossRecord:
    """The loss of each lane of each step, kept on the device until somebody wants to see it."""

    def __init__(self, world: World, fit: Fit) -> None:
        self._world, self._fit = world, fit
        self._kept: list[torch.Tensor] = []
        self._samples = 0
        self.restart_clock()

    def add(self, lanes: torch.Tensor, samples: int) -> None:
        """Keep one step's (lanes of this rank × sum and count); no synchronisation."""
        self._kept.append(lanes)
        self._samples += samples

    def collect(self) -> None:
        """Add what is kept to the sums. All ranks."""
        if not self._kept:
            return
        mine = torch.stack(self._kept).double()
        self._kept.clear()
        # steps × lanes × 2, in the order of the lanes whatever the number of ranks: the sums are the same to the digit.
        steps = torch.cat(self._world.gather_equal(mine), dim=1)
        sums = self._fit.sums
        # One step after the other, so that it does not matter when this is called.
        for total, count in steps.sum(dim=1).tolist():
            sums.window += total
            sums.window_count += count
            sums.epoch += total
            sums.epoch_count += count

    def flush(self) -> tuple[float | None, float]:
        """The mean loss, None if every step was skipped, and the samples per second since the last flush. All ranks."""
        self.collect()
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        self._fit.seconds += elapsed
        speed = self._samples / elapsed
        self.restart_clock()
        sums = self._fit.sums
        mean = sums.window / sums.window_count if sums.window_count else None
        sums.window = sums.window_count = 0.0
        return mean, speed

    def epoch_mean(self) -> float | None:
        """The mean loss of this epoch so far; None if every step was skipped."""
        sums = self._fit.sums
        return sums.epoch / sums.epoch_count if sums.epoch_count else None

    def restart_epoch(self) -> None:
        """Begin an epoch."""
        self._fit.sums.epoch = self._fit.sums.epoch_count = 0.0

    def restart_clock(self) -> None:
        """Begin to time anew, so that an evaluation does not count as slow training."""
        self._samples = 0
        self._since = time.perf_counter()
