"""The managed loop: order and cadence only. What happens in a step, an evaluation or a save is said elsewhere."""

from __future__ import annotations

import math
import socket
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import State, capture
from paceline.config import Best
from paceline.data.loader import StepInputs
from paceline.engine.digest import check_frozen, check_replicas, digests_of
from paceline.engine.nonfinite import FinishedStep
from paceline.engine.step import LANES, NORM, SKIPPED, Stepper
from paceline.observe.clock import DATA, OTHER, PHASES, REDUCTION, Clock
from paceline.observe.events import Events
from paceline.observe.progress import Progress
from paceline.observe.stragglers import Stragglers
from paceline.system.memory import Memory
from paceline.system.signals import Stop, StopAgreed
from paceline.worker.evaluate import Evaluator
from paceline.world import Exchange, World

SOONEST_S, LATEST_S = 0.1, 1.0  # between two log points that nobody has asked for
SHARE = 0.004  # of the time, for what the ranks send each other at log points
INTERVALS: list[int] = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]  # in steps
DENSITY = 200  # a window of recorded steps is at least one step, and at least 1 / 200 of the steps so far
LOOK_S = 1.0  # of training between two steps of a GPU whose phases are timed
LAG, LAG_SHARE = 2, 20  # a GPU is given so many steps, or a part of those between log points, to do beside the telling


@dataclass(frozen=True)
class LoopPlan:
    """How long the run is and when it says something."""

    total_steps: int | None  # None where an iterable data set decides
    epochs: int  # begun by the end of the run
    log_every_steps: int | None  # None: `step` events by the step number, `pace` events by the clock
    check_replicas_every: int
    log_digests: bool
    best: Best | None
    ranks_by_loss: bool = False  # the samples, after the first epoch


@dataclass
class LossSums:
    """Losses so far: since the last `step` event, and in this epoch."""

    window: float = 0.0
    window_count: float = 0.0
    epoch: float = 0.0
    epoch_count: float = 0.0

    def add(self, total: float, count: float) -> None:
        """Take in one step."""
        self.window += total
        self.window_count += count
        self.epoch += total
        self.epoch_count += count


@dataclass
class TrainState:
    """All that the loop carries from step to step. A checkpoint holds it, so a run goes on from any step."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # of training; evaluations are not counted
    history: list[dict[str, Any]] = field(default_factory=list)  # one row for each epoch
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    sums: LossSums = field(default_factory=LossSums)
    owes_evaluation: bool = False  # the run was stopped after an epoch's last step and before its evaluation
    is_broken_off: bool = False  # the last row is of an epoch that `max_steps` has cut short
    mark: tuple[int, int] = (0, 0)  # of an iterable data set: the next step's epoch, and the step that began it
    losses: torch.Tensor | None = None  # of every sample after the first epoch, where they are ranked by them

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrainState:
        """What `asdict` has made of one."""
        # Checkpoints of earlier versions count epochs from 0.
        history = [{**row, "epoch": number} for number, row in enumerate(content["history"], start=1)]
        return cls(**{**content, "history": history, "sums": LossSums(**content["sums"])})


@dataclass
class Loop:
    """One run from its present step to its end, or to the step at which all ranks agree to stop."""

    stepper: Stepper
    turns: Callable[[torch.Tensor | None], Iterable[StepInputs]]  # from where the run is, as far as the losses allow
    evaluator: Evaluator | None
    plan: LoopPlan
    saver: Saver
    stop: Stop
    fit: TrainState
    world: World
    events: Events
    progress: Progress

    def run(self) -> int:
        """Train. Returns 0, or the reason why it was stopped. All ranks."""
        self.exchange = Exchange(self.world)
        guard = self.stepper.guard
        review = guard.review if guard is not None and guard.is_deferred else lambda steps: None
        # It must not know this loop: workers of DataLoaders do not end if they are left to the garbage collector.
        stragglers = Stragglers(self.world.gather_objects(socket.gethostname()))
        self.losses = StepLog(self.world, self.fit, self.plan, self.events, self.stepper.clock, stragglers, review)
        self.progress.step, self.progress.samples = self.fit.step, self.fit.samples
        module = self.stepper.replica.module
        self.frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        module.train()  # pretrained models come in evaluation mode
        try:
            if self.fit.owes_evaluation:
                self._end_epoch(len(self.fit.history))
                if self._is_better():  # the checkpoint that the run goes on from does not know how good it is
                    self.save()
                    self.losses.restart_clock()
            self.progress.phase = "training"
            is_first = True
            for turn in self._turns():
                self._take(turn)
                self.stepper.clock.enter(DATA)
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

    def _turns(self) -> Iterator[StepInputs]:
        """What is left to do. Where the samples' losses are needed, they are measured on the way. All ranks."""
        yield from self.turns(self.fit.losses)
        is_over = self.plan.total_steps is not None and self.fit.step >= self.plan.total_steps
        if self.plan.ranks_by_loss and self.fit.losses is None and not is_over:
            self.fit.losses = self._measure_samples()
            yield from self.turns(self.fit.losses)

    def _measure_samples(self) -> torch.Tensor:
        """Every training sample's loss under the weights as they are now. All ranks."""
        self.progress.phase = "ranking the samples"
        self.stepper.replica.share_buffers()
        moving = self.stepper.replica.forward_state.moving
        evaluator = Evaluator(self.stepper.feed, self.stepper.config, self.world, moving)
        losses = evaluator.losses(self.stepper.replica.module, self._on_round)
        self.progress.phase, self.progress.batch = "training", None
        self.losses.restart_clock()
        return losses

    def _take(self, turn: StepInputs) -> None:
        """One step, and whatever is due after it. All ranks."""
        fit, plan = self.fit, self.plan
        if fit.is_broken_off:  # this step goes on with that epoch
            fit.history.pop()
        fit.is_broken_off = turn.breaks_off
        self.progress.epoch, self.progress.step = turn.epoch, turn.step
        self.exchange.begin(self.stop.reason, self.saver.is_time, self.saver.is_busy)
        row = self.stepper.take(turn)
        self.losses.add(turn, row, self.stepper.lr)
        self.stepper.clock.enter(OTHER)
        fit.step = self.progress.step = turn.step + 1
        fit.samples += turn.lanes[0].step_samples
        fit.mark = turn.mark
        self.progress.samples = fit.samples
        if self.losses.is_due(fit.step) or turn.ends_epoch:
            self._log(turn)
        elif self.losses.is_overdue(fit.step):
            self.losses.settle()
        if plan.log_digests and is_recorded(turn, plan.log_every_steps):
            digests = digests_of(self.stepper.replica.module).tolist()
            self.events.write("digests", step=fit.step, digests=digests)
        if fit.step % plan.check_replicas_every == 0 or fit.step == 1 or turn.ends_run:
            check_frozen(self.frozen, self.world)
            if self.stepper.replica.forward_state.moving:  # in each lane by itself; rank 0's are the ones that count
                self.stepper.replica.share_buffers()
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
            self.stepper.clock.forget()

    def _log(self, turn: StepInputs) -> None:
        """Report how training is doing: at once, or on a GPU when the rows have arrived. All ranks."""
        self.losses.send(is_log_point=True)
        if self.world.device.type != "cuda" or turn.ends_epoch:
            self.losses.settle()

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate and close the epoch's row of history. All ranks."""
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.fit.step, "train_loss": self.losses.epoch_mean()}
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
        """All ranks."""
        stepper = self.stepper
        counters = {"loop": asdict(self.fit), "stepper": stepper.counters()}
        loss = stepper.replica.forward_state.of_loss()
        return capture(stepper.replica.module, stepper.optimizer, stepper.ema, counters, stepper.sharding, loss)


class PendingStep(NamedTuple):
    """What the host keeps of a step until its row has arrived."""

    step: int  # from 0
    epoch: int
    lr: float
    time: float  # at which the device was given the step
    is_recorded: bool  # in a `step` event
    lanes: list[tuple[int, Any]]  # of this rank, with their indices


class PendingRows(NamedTuple):
    """The rows of some steps on their way to the host."""

    numbers: torch.Tensor  # of each rank: the rows of its steps, then facts about itself
    arrived: torch.cuda.Event | None
    steps: list[PendingStep]
    is_log_point: bool


class StepLog:
    """The losses of steps, on the device until a log point or a checkpoint; then `step` and `pace` events.

    The clock chooses the log points. The steps that are recorded, and the numbers of each, do not depend on them.
    """

    def __init__(
        self,
        world: World,
        fit: TrainState,
        plan: LoopPlan,
        events: Events,
        clock: Clock,
        stragglers: Stragglers,
        review: Callable[[Sequence[FinishedStep]], None],
    ) -> None:
        """`review` is told of every step whose losses have arrived."""
        self._world, self._fit, self._plan, self._events, self._review = world, fit, plan, events, review
        self._clock, self._stragglers, self._memory = clock, stragglers, Memory(world.device)
        self._facts = -3 - len(PHASES)  # where they begin: memory, cost, milliseconds of a step and of each phase
        self._every, self._told_s, self._look_s = 1, 0.0, LOOK_S
        self._cost_s = 0.0  # of sending the last log point
        self._rows: list[torch.Tensor] = []
        self._steps: list[PendingStep] = []
        self._sent: PendingRows | None = None
        self.restart_clock()

    def add(self, turn: StepInputs, row: torch.Tensor, lr: float) -> None:
        """Keep the row of a step; no synchronisation."""
        self._rows.append(row)
        lanes = [(lane.lane, lane.indices) for lane in turn.lanes]
        is_kept = is_recorded(turn, self._plan.log_every_steps)
        self._steps.append(PendingStep(turn.step, turn.epoch, lr, time.time(), is_kept, lanes))
        self._samples += turn.lanes[0].step_samples
        self._timed_steps += 1

    def is_due(self, step: int) -> bool:
        """Whether a step is a log point; the same on all ranks."""
        return step % self._interval == 0

    @property
    def _interval(self) -> int:
        """Steps between log points."""
        return self._plan.log_every_steps or self._every

    def is_overdue(self, step: int) -> bool:
        """Whether a log point has been on its way for so long that waiting for it costs nothing."""
        if self._sent is None or not self._sent.is_log_point:
            return False
        return step > self._sent.steps[-1].step + max(LAG, self._interval // LAG_SHARE)

    def send(self, *, is_log_point: bool = False) -> None:
        """Let the rows set out for the host, which goes on meanwhile. All ranks."""
        self.settle()
        began = time.perf_counter()
        rows = torch.stack(self._rows).double().flatten()
        # What the host knows of this rank goes along, from pinned memory: any other would wait for the device.
        is_on_gpu = rows.device.type == "cuda"
        known = [self._memory.used, self._cost_s, *self._clock.means(self._timed_steps)]
        facts = torch.tensor(known, dtype=rows.dtype, pin_memory=is_on_gpu).to(rows.device, non_blocking=True)
        self._clock.enter(REDUCTION)
        numbers = torch.stack(self._world.gather_equal(torch.cat([rows, facts])))
        self._clock.enter(OTHER)
        arrived = None
        if is_on_gpu:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        self._sent = PendingRows(numbers, arrived, self._steps, is_log_point)
        self._rows, self._steps = [], []
        if is_log_point:
            self._cost_s = time.perf_counter() - began
            self._restart_steps()

    def settle(self) -> None:
        """Wait for the rows that were sent, and take them in. All ranks."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.arrived is not None:
            sent.arrived.synchronize()
        rows = sent.numbers[:, : self._facts].reshape(len(sent.numbers), len(sent.steps), -1).transpose(0, 1)
        skipped = [bool(flag) for flag in rows[:, 0, SKIPPED].tolist()]
        # Steps × lanes × 2, in the order of the lanes whatever the number of ranks: the sums are the same to the digit.
        totals = rows[:, :, LANES].reshape(len(skipped), -1, 2).contiguous()
        norms = rows[:, 0, NORM].tolist()  # the same on all ranks
        with self._events.batch():
            # One step after the other, so that it does not matter when this is called.
            for taken, (total, count), norm, is_skipped in zip(
                sent.steps, totals.sum(dim=1).tolist(), norms, skipped, strict=True
            ):
                self._fit.sums.add(0.0 if is_skipped else total, 0.0 if is_skipped else count)
                if taken.is_recorded:
                    self._close_window(taken, None if is_skipped else norm)
            if sent.is_log_point:
                self._report_pace(sent)
        known = zip(sent.steps, totals.tolist(), skipped, strict=True)
        self._review(
            [FinishedStep(taken.step, taken.lanes, of_lanes, was_skipped) for taken, of_lanes, was_skipped in known]
        )

    def collect(self) -> None:
        """Take in everything there is. All ranks."""
        self.settle()
        if self._rows:
            self.send()
            self.settle()

    def _close_window(self, taken: PendingStep, norm: float | None) -> None:
        """Record the steps since the last recorded one."""
        sums = self._fit.sums
        self._events.write(
            "step", time=round(taken.time, 3),
            step=taken.step + 1, steps=self._plan.total_steps, epoch=taken.epoch + 1, epochs=self._plan.epochs,
            loss=sums.window / sums.window_count if sums.window_count else None,  # None if every step was skipped
            lr=taken.lr, grad_norm=norm if norm is not None and 0 <= norm < math.inf else None,
        )  # fmt: skip
        sums.window = sums.window_count = 0.0

    def _report_pace(self, sent: PendingRows) -> None:
        """Report time and memory since the last log point, and choose the next ones."""
        step = sent.steps[-1].step + 1
        memory, cost_s, *means = sent.numbers[:, self._facts :].T.tolist()  # of each, a number for each rank
        step_ms = [round(each, 3) for each in means[0]]
        phases = self._clock.phases_of(list(zip(*means, strict=True)))
        phase_ms = {name: [round(each, 3) for each in ms] for name, ms in phases.items()}
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        self._fit.seconds += elapsed
        self._events.write(
            "pace", step=step, steps=self._plan.total_steps, epoch=sent.steps[-1].epoch + 1, epochs=self._plan.epochs,
            samples_per_s=round(self._samples / elapsed, 1),
            step_ms=step_ms, phase_ms=phase_ms, memory_mb=[round(used / 1e6, 1) for used in memory],
        )  # fmt: skip
        if found := self._stragglers.see(step_ms, phase_ms, elapsed):
            self._events.write("straggler", step=step, **found)
        self._restart_window()
        # A rank that comes early waits for the others; the last one knows what it costs.
        self._adapt(len(sent.steps), max(means[0]) / 1e3, min(cost_s))

    def _adapt(self, steps: int, step_s: float, cost_s: float) -> None:
        """Choose when the next log points are, by numbers that all ranks have in common."""
        self._told_s += steps * step_s
        self._every = log_interval(step_s, self._told_s, cost_s)
        if self._told_s >= self._look_s:
            self._clock.ask()
            self._look_s = self._told_s + LOOK_S

    def epoch_mean(self) -> float | None:
        """The mean loss of this epoch so far; None if every step was skipped."""
        sums = self._fit.sums
        return sums.epoch / sums.epoch_count if sums.epoch_count else None

    def restart_epoch(self) -> None:
        """Begin an epoch."""
        self._fit.sums.epoch = self._fit.sums.epoch_count = 0.0

    def restart_clock(self) -> None:
        """Begin to time anew, so that an evaluation does not count as slow training."""
        self._clock.forget()
        self._restart_window()
        self._restart_steps()

    def _restart_window(self) -> None:
        self._samples = 0
        self._since = time.perf_counter()

    def _restart_steps(self) -> None:
        self._timed_steps = 0
        self._clock.restart()


def is_recorded(turn: StepInputs, every_steps: int | None) -> bool:
    """Whether a step gets a `step` event: a function of the run alone, so that the curves of equal runs are equal."""
    step = turn.step + 1
    return step % (every_steps or record_interval(step)) == 0 or (turn.ends_epoch and not turn.breaks_off)


def record_interval(step: int) -> int:
    """Steps between two recorded ones around `step`: all of the first steps, fewer of later ones (pure).

    It does not depend on the length of the run, which may be unknown, or be changed when the run is resumed.
    """
    return INTERVALS[bisect_left(INTERVALS, step / DENSITY)]


def log_interval(step_s: float, elapsed_s: float, cost_s: float) -> int:
    """Steps between two log points, each of which costs the ranks so many seconds (pure).

    A run that is over soon is told in detail, a long one about once a second, so that it costs next to nothing.
    """
    pause = min(max(elapsed_s / 50, SOONEST_S, cost_s / SHARE), LATEST_S)
    wanted = pause / max(step_s, 1e-6)
    return next(each for each in INTERVALS if each >= wanted)
