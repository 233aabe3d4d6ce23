"""The user's own loop with `run`: what happens between its batches and between its epochs, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.data.feed import Feed
from paceline.data.lanes import StepInputs
from paceline.data.seeding import seed_generators
from paceline.engine.clock import DATA
from paceline.engine.own_step import OwnStep
from paceline.errors import ConfigError
from paceline.system.signals import StopAgreed
from paceline.worker.context import Context
from paceline.worker.cycle import StepCycle
from paceline.worker.logged_values import LoggedValues, checked
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.tracked import Tracked


@dataclass(eq=False)
class OwnLoop:
    """The place of the user's code in the run.

    for epoch in run.epochs(n):              callbacks: on_evaluate, for the epoch before
        for batch in train_loader:
            (the user's code)                run.backward begins the exchange of the ranks, run.step updates
            after the last lane of a step:   log, callbacks: on_step, compare the replicas, end the exchange,
                                             publish, stop or start a checkpoint

    Nothing here is a collective before the user's code calls one or asks for the next batch, so a rank may look at a
    batch by itself.
    """

    context: Context
    step: OwnStep
    feed: Feed
    plan: LoopPlan
    state: TrainState
    cycle: StepCycle
    tracked: Tracked
    logged: LoggedValues
    inputs_from: Callable[[int, int], Iterator[StepInputs]]  # of the steps from one number up to another
    steps_per_epoch: int | None  # None for an iterable data set

    def __post_init__(self) -> None:
        self.progress, self.seed = self.context.progress, self.step.settings.seed
        self._claimed = 0  # epochs of the calls of run.epochs so far
        self._epoch: int | None = None  # that run.epochs has begun
        self._passes = 0  # epochs that were begun without run.epochs
        self._open: StepInputs | None = None  # the step whose batches the user's code gets
        self._is_exchanging = self._is_warned = False
        self._inputs: Iterator[StepInputs] | None = None
        self._position = -1  # the next step of `_inputs`
        self._values: dict[str, Any] = {}  # logged after the batches of this epoch
        self._stopped: StopAgreed | None = None

    # --- batches -----------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The batches of this rank in the present epoch, from where the run is. All ranks."""
        self._check_stopped()
        self.close_step()
        epoch = self._epoch if self._epoch is not None else self._next_pass()
        self.progress.phase = "training"
        for inputs in self._inputs_of(epoch):
            self._open = inputs
            self.step.begin(inputs)
            for lane in inputs.lanes:
                batch = self.feed.batch(self.feed.inputs(lane, inputs.epoch))
                self.progress.epoch, self.progress.step, self.progress.batch = inputs.epoch, inputs.step, lane.lane
                self.step.enter(lane)
                yield batch
                self.step.leave()
            self._end_step(inputs)
            self.cycle.clock.enter(DATA)
            if self.state.is_finished:
                break
        self.progress.batch = None
        seed_generators(self.seed, "after the batches", epoch)

    def close_step(self) -> None:
        """Complete a step whose last batch was processed before the user's code left the loader. All ranks."""
        inputs, lane = self._open, self.step.lane
        self._open = None
        if inputs is None or lane is None:
            return
        self.step.leave()
        if self.step.is_begun and lane is inputs.lanes[-1]:
            self._end_step(inputs)
        elif self._is_exchanging:
            self._is_exchanging = False
            self.cycle.exchange.end()

    def begin_exchange(self) -> None:
        """Begin the exchange of the ranks for this step. All ranks."""
        if not self._is_exchanging and self._open is not None:
            self._is_exchanging = True
            self.cycle.begin(self._open)

    def _end_step(self, inputs: StepInputs) -> None:
        """Log the step, and save or stop if the ranks agree on it. All ranks."""
        self.begin_exchange()
        self._is_exchanging, self._open = False, None
        answers = self.cycle.end(inputs, self.step.end(), self.step.lr)
        if self.state.is_finished:  # the loaders end, and the user's code does what it does after them
            answers = answers._replace(reason=0)
        try:
            self.cycle.close(answers, can_save=self._epoch is not None)
        except StopAgreed as agreed:
            self._stopped = agreed
            raise

    def _inputs_of(self, epoch: int) -> Iterator[StepInputs]:
        """The inputs of the remaining steps of an epoch."""
        per_epoch = self.steps_per_epoch
        if per_epoch is None:
            is_over = self.state.stream_position[0] > epoch
            wanted, end = self._position if self._inputs is not None else self.state.step, -1
        else:
            wanted, end = max(self.state.step, epoch * per_epoch), (epoch + 1) * per_epoch
            is_over = wanted >= min(end, self.plan.total_steps or end)
        if is_over:
            return
        if self._inputs is None or self._position != wanted:
            self._inputs = self.inputs_from(wanted, max(end, self.plan.total_steps or end))
        for inputs in self._inputs:
            self._position = inputs.step + 1
            yield inputs
            if inputs.ends_epoch:
                return

    def _next_pass(self) -> int:
        """The next epoch of a loop that does not use run.epochs."""
        if self.state.step and not self._passes:
            raise ConfigError(
                "the run was saved within run.epochs(…), which train_fn does not call before it iterates over "
                "train_loader; call it, or begin a new run with --resume never"
            )
        if not self._passes:
            self.context.warn(
                "train_fn iterates over train_loader outside run.epochs(…), so no checkpoints are kept; "
                "write `for epoch in run.epochs(num_epochs)`"
            )
        self._passes += 1
        return self._passes - 1

    # --- epochs ------------------------------------------------------------------------------------------------

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs that are left of `number`, counted from 0. All ranks."""
        first, self._claimed = self._claimed, self._claimed + number
        for epoch in range(first, first + number):
            self._check_stopped()
            if epoch < len(self.state.history) or self._is_over() or self.state.is_finished:
                continue
            self._epoch = epoch
            self.cycle.run.epoch = epoch + 1
            seed_generators(self.seed, "epoch", epoch)
            yield epoch - first
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Add the row of the epoch that has ended to the history; save or stop if the ranks want to. All ranks."""
        self.close_step()
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        cycle, state = self.cycle, self.state
        is_ended = self._is_over() or state.is_finished
        if self.steps_per_epoch is not None and not is_ended:  # the user's code may have left the loader early
            state.step = max(state.step, (epoch + 1) * self.steps_per_epoch)
        cycle.log.collect()
        values, self._values = self._values, {}
        metrics = cycle.world.decide(lambda: {name: float(checked(name, value)) for name, value in values.items()})
        row = {"epoch": epoch + 1, "step": state.step, **cycle.log.epoch_means(), **metrics}
        state.metrics = metrics
        state.history.append(row)
        cycle.events.write("epoch", **row)
        cycle.log.restart_epoch()
        cycle.call("on_evaluate", row)
        if cycle.is_save_requested():
            cycle.save()
        cycle.log.restart_clock()
        try:
            cycle.check_stop()
        except StopAgreed as agreed:
            self._stopped = agreed
            raise

    def finish(self) -> None:
        """Complete what is open when the user's code returns. All ranks."""
        self._check_stopped()
        self.finish_epoch()
        self.cycle.log.collect()

    def save(self) -> bool:
        """Save the present state, unless the loop cannot be resumed; return whether it is on the disk. All ranks."""
        return bool(self._claimed) and self.cycle.save()

    def _is_over(self) -> bool:
        return self.plan.total_steps is not None and self.state.step >= self.plan.total_steps and self._is_limited()

    def _is_limited(self) -> bool:
        """Whether max_steps ends the run, and not the number of epochs."""
        return self.context.config.max_steps is not None

    # --- what the user's code logs -----------------------------------------------------------------------------

    def log(self, values: dict[str, Any]) -> None:
        """Keep the values for the next log point, or for the row of this epoch."""
        lane, inputs = self.step.lane, self._open
        if lane is not None and inputs is not None:
            self.logged.add(inputs.step, lane.lane, lane.samples, values)
        else:
            self._values |= {name: checked(name, value) for name, value in values.items()}

    def warn_of_gather(self) -> None:
        """Warn that a loss over the gathered rows of ranks depends on their number, if lanes do not fix it."""
        if self.step.lanes_per_rank > 1 and not self._is_warned:
            self._is_warned = True
            self.context.warn(
                f"run.gather joins the batches of {self.context.world.size} ranks, so the loss depends on their "
                "number; use as many ranks as lanes for the same weights"
            )

    def _check_stopped(self) -> None:
        if self._stopped is not None:  # the user's code has caught it
            raise self._stopped
