"""The user's own loop with `run`: the work between its batches and between its epochs, on every rank."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.callbacks.patience import WatchedMetric
from paceline.data.feed import Feed
from paceline.data.lanes import StepInputs
from paceline.data.seeding import seed_generators
from paceline.engine.clock import DATA
from paceline.engine.own_step import OwnStep
from paceline.errors import ConfigError
from paceline.system.signals import StopAgreed
from paceline.worker.context import Context
from paceline.worker.cycle import Place, StepCycle
from paceline.worker.epoch_inputs import EpochInputs
from paceline.worker.logged_values import LoggedValues, checked
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.tracked import Tracked


@dataclass(eq=False)
class OwnLoop:
    """Supplies batches to the user's code, and completes its steps and epochs.

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
    inputs: EpochInputs

    def __post_init__(self) -> None:
        self.progress, self.seed = self.context.progress, self.step.settings.seed
        # Epochs
        self._claimed = 0  # by the calls of run.epochs so far
        self._epoch: int | None = None  # that run.epochs has begun
        self._passes = 0  # over the loader, without run.epochs
        self._has_trained = False  # whether a gradient was computed
        self._first_step = self.state.step  # of this attempt
        self._trained = -1  # the last epoch whose batches were all trained on
        self._values: dict[str, Any] = {}  # logged after the batches of this epoch
        # The step whose batches the user's code gets
        self._open: StepInputs | None = None
        self._is_exchanging = False  # whether the exchange of the ranks for it has begun
        self._is_left = False  # whether the user's code has left the loader within it
        self._is_in_epochs = False  # whether the user's code is within a loop over run.epochs
        self._begun = 0  # iterations over the loader so far
        self._stopped: StopAgreed | None = None

    # --- batches -----------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[Any]:
        """The batches of this rank in the present epoch, from where the run is. All ranks."""
        self.check_stopped()
        self.close_step()
        epoch = self._epoch if self._epoch is not None else max(self._passes, self.inputs.present_epoch())
        self._begun += 1
        begun = self._begun
        if self._is_read_again(epoch):
            yield from self._batches_again(epoch)
            return
        self.progress.phase = "training"
        for inputs in self.inputs.remaining(epoch):
            self._open, self._is_left = inputs, False
            self.step.begin(inputs)
            for lane in inputs.lanes:
                batch = self.feed.batch(self.feed.inputs(lane, inputs.epoch))
                self.progress.epoch, self.progress.step, self.progress.batch = inputs.epoch, inputs.step, lane.lane
                self.step.enter(lane)
                try:
                    yield batch
                except GeneratorExit:
                    self._is_left = True  # what follows is not part of the batch; the step is closed by all ranks later
                    self._note_training()
                    seed_generators(self.seed, "left", inputs.step)
                    raise
                if self._begun != begun:
                    raise ConfigError(
                        "train_loader was iterated again within its own loop, which would mix up the batches; iterate "
                        "over it once at a time"
                    )
                if self._open is not inputs:  # the end of the epoch has closed the step
                    return
                self.step.check_lane()
                self.step.leave()
                self._note_training()
            if self._is_only_read():
                self._open = None
                continue
            self._end_step(inputs)
            self.cycle.clock.enter(DATA)
            if self.state.is_finished:
                break
        self.progress.batch = None
        seed_generators(self.seed, "after the batches", epoch)
        if self._is_only_read():
            return
        if self._epoch is None:
            self._passes += 1
        self._trained = epoch

    def _is_only_read(self) -> bool:
        """Whether the user's code reads batches before its epochs, for example to measure them, without training."""
        return self._epoch is None and not self._has_trained and self.inputs.steps_per_epoch is not None

    def _is_read_again(self, epoch: int) -> bool:
        """Whether the batches of an epoch were all trained on, and the user's code reads them again."""
        is_after_all = self._epoch is None and self._claimed > 0
        return self.inputs.steps_per_epoch is not None and (self._trained == epoch or is_after_all)

    def _batches_again(self, epoch: int) -> Iterator[Any]:
        """The batches of an epoch without steps, for example to measure the training accuracy."""
        for inputs in self.inputs.all_of(min(epoch, max(self._claimed - 1, 0))):
            for lane in inputs.lanes:
                if lane.samples:
                    yield self.feed.batch(self.feed.inputs(lane, inputs.epoch))

    def close_step(self) -> None:
        """Complete a step whose last batch was processed before the user's code left the loader. All ranks."""
        inputs, lane = self._open, self.step.lane
        self._open = None
        if inputs is None or lane is None:
            return
        is_complete = self.step.calls.has_stepped and lane is inputs.lanes[-1]
        self.step.leave()
        if is_complete:
            self._open = inputs
            self._end_step(inputs)
            return
        if self._is_exchanging:
            self._is_exchanging = False
            self.cycle.end_exchange()
        if self.step.calls.is_begun:
            self.step.abandon()
        else:  # its batches were only looked at
            self.inputs.put_back(inputs)

    def close_left_step(self) -> None:
        """Complete the step if the user's code has left the loader in the middle of it. All ranks."""
        self.check_stopped()
        if self._is_left:
            self.close_step()

    def meet(self, place: Place) -> None:
        """Before a call of the user's code that combines the ranks: complete a left step; compare places. All ranks."""
        self.close_left_step()
        self.cycle.meet(place)

    def begin_exchange(self, place: Place = Place.STEP) -> None:
        """Begin the exchange of the ranks for this step. All ranks."""
        if not self._is_exchanging and self._open is not None:
            self._is_exchanging = True
            self.cycle.begin(self._open, place)

    def _end_step(self, inputs: StepInputs) -> None:
        """Log the step, and save or stop if the ranks agree on it. All ranks."""
        if self._epoch is None:
            self._check_outside_epochs()
        if inputs.step == self._first_step:
            self._check_not_wrapped()
        if not self.step.calls.is_begun:
            self._warn_of_plain_step()
        self.begin_exchange(Place.STEP if self.step.calls.is_begun else Place.STEP_WITHOUT_BACKWARD)
        self._is_exchanging, self._open = False, None
        self.tracked.release_options()
        answers = self.cycle.end(inputs, self.step.end(), self.step.lr)
        if self.state.is_finished or self._is_left:  # the loop over the loader ends; a stop follows after the epoch
            answers = answers._replace(reason=0)
        try:
            # A checkpoint that is due after the last step of an epoch waits for the metrics of the epoch.
            can_save = self._epoch is not None and not inputs.ends_epoch and not self._is_left
            self.cycle.close(answers, can_save=can_save)
        except StopAgreed as agreed:
            self._stopped = agreed
            raise

    def _note_training(self) -> None:
        """Note whether a gradient was computed in the batch that ends."""
        self._has_trained |= self.step.calls.is_begun or self.step.hooks.has_seen_plain

    def _check_not_wrapped(self) -> None:
        """Refuse a model that the user's code has wrapped in DDP, which would sum the gradients a second time."""
        for wrapper in gc.get_objects():
            if type(wrapper) is DistributedDataParallel and self.step.hooks.are_watched(wrapper.parameters()):
                raise ConfigError(
                    "train_fn has wrapped the model in DistributedDataParallel, but run.backward and run.step sum the "
                    "gradients of the ranks; use the model as it is"
                )

    def _warn_of_plain_step(self) -> None:
        """Warn of keys that have no effect in a step without run.backward and run.step."""
        settings = self.step.settings
        depends = self.step.rank_lanes.most > 1
        given = {"lanes": depends, "ema": settings.ema is not None, "clip_norm": settings.clip_norm is not None}
        if keys := [f"{key}={getattr(settings, key)}" for key, is_given in given.items() if is_given]:
            verb = "has" if len(keys) == 1 else "have"
            rest = (
                "; each batch is an update by itself, so the weights depend on the number of processes, and "
                f"run.total_steps counts {self.step.rank_lanes.most} of them as one; remove lanes, or use both calls"
            )
            self.context.warn_once(
                f"{' and '.join(keys)} {verb} no effect without run.backward(loss) and run.step(optimizer)"
                + (rest if depends else "")
            )

    def _check_outside_epochs(self) -> None:
        """Warn that a loop without run.epochs is not saved; raise if the run was saved in a loop with run.epochs."""
        if self.state.history:
            raise ConfigError(
                "the run was saved within run.epochs(…), which train_fn does not call before it trains over "
                "train_loader; call it, or start a new run with --resume never"
            )
        self.context.warn_once(
            "train_fn trains over train_loader outside run.epochs(…), so no checkpoints are kept; "
            "write `for epoch in run.epochs(num_epochs)`"
        )

    # --- epochs ------------------------------------------------------------------------------------------------

    def epochs(self, number: int) -> Iterator[int]:
        """The epochs that are left of `number`, counted from 0. All ranks."""
        if not isinstance(number, int):
            raise ConfigError(f"run.epochs({number!r}) got a {type(number).__name__}; give a number of epochs")
        if self._is_in_epochs:
            raise ConfigError("run.epochs was called within a loop over run.epochs; call it once at a time")
        first, self._claimed = self._claimed, self._claimed + number
        for epoch in range(first, first + number):
            self.check_stopped()
            self.finish_epoch()  # that the user's code has left
            done = self.state.history[-1]["epoch"] if self.state.history else 0
            if epoch < done or self.inputs.is_over() or self.state.is_finished:
                continue
            self._epoch, begun = epoch, self._begun
            self.tracked.restore_options()
            self.step.watch_again()
            self.cycle.run.epoch = epoch + 1
            seed_generators(self.seed, "epoch", epoch)
            self._is_in_epochs = True
            try:
                yield epoch - first
            finally:
                self._is_in_epochs = False
            if self._begun != begun and not self._has_trained:
                self.context.warn_once(
                    "train_fn has used the batches of an epoch without run.backward(loss) and run.step(optimizer), so "
                    "the weights are unchanged; call both for each batch"
                )
            if self._begun == begun:
                self.context.warn_once(
                    "train_fn does not iterate over train_loader: batches from elsewhere are not divided among the "
                    "processes, and the run can be saved and stopped only between epochs"
                )
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Add the row of the epoch that has ended to the history; save or stop if that is due. All ranks."""
        self.close_step()
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        cycle, state = self.cycle, self.state
        cycle.meet(Place.END_OF_EPOCH)
        self.tracked.check_epochs(epoch)
        is_ended = self.inputs.is_over() or state.is_finished
        if self.inputs.steps_per_epoch is not None and not is_ended:  # the user's code may have left the loader early
            state.step = cycle.run.step_number = max(state.step, (epoch + 1) * self.inputs.steps_per_epoch)
            state.epochs_done = cycle.run.epochs_done = max(state.epochs_done, epoch + 1)
        cycle.log.collect()
        values, self._values = self._values, {}
        metrics = self._agreed({name: float(value) for name, value in values.items()})
        row = {"epoch": epoch + 1, "step": state.step, **cycle.log.epoch_means(), **metrics}
        state.metrics = metrics
        state.history.append(row)
        cycle.events.write("epoch", **row)
        cycle.log.restart_epoch()
        if metrics:
            self._warn_of_unlogged(row)
        cycle.call("on_evaluate", row)
        if cycle.is_save_requested() or cycle.saver.is_due:
            cycle.start_save()
        cycle.log.restart_clock()
        is_last = self.plan.total_steps is not None and state.step >= self.plan.total_steps
        try:
            if not is_last:  # nothing is left to train: the user's code ends, and the run is complete
                cycle.check_stop()
        except StopAgreed as agreed:
            self._stopped = agreed
            raise

    def _warn_of_unlogged(self, row: dict[str, Any]) -> None:
        """Warn about a metric that a callback waits for and the values of this epoch lack."""
        for watched in (getattr(callback, "watched", None) for callback in self.cycle.callbacks):
            if isinstance(watched, WatchedMetric) and watched.name not in row:
                known = ", ".join(name for name in row if name not in ("epoch", "step"))
                self.context.warn_once(
                    f"{watched.key}={watched.name!r} is not among the values of an epoch ({known}), which does not "
                    "count for it; log it with run.log after the batches, or watch one of these"
                )

    def _agreed(self, values: dict[str, float]) -> dict[str, float]:
        """Rank 0's values of the epoch, with a warning if those of other ranks differ. All ranks."""
        of_ranks = self.context.world.gather_objects(values)
        differing = [name for name in of_ranks[0] if any(each.get(name) != of_ranks[0][name] for each in of_ranks)]
        if differing := [name for name in differing if not math.isnan(of_ranks[0][name])]:
            self.context.warn_once(
                f"run.log({differing[0]}=…) after the batches of an epoch got different values on the ranks; rank 0's "
                "is kept; combine them with run.sum or run.mean"
            )
        return of_ranks[0]

    def finish(self) -> None:
        """Complete what is open when the user's code returns. All ranks."""
        self.check_stopped()
        self.close_step()
        self.cycle.meet(Place.END_OF_TRAIN_FN)
        self.finish_epoch()
        self.cycle.log.collect()

    def save(self) -> bool:
        """Save the present state, unless the loop cannot be resumed; return whether it is on the disk. All ranks."""
        return bool(self._claimed) and self.cycle.save()

    # --- objects -----------------------------------------------------------------------------------------------

    def track(self, name: str, thing: Any) -> None:
        """Track an object, and restore it if the run resumes."""
        replaced = self.tracked.add(name, thing, self._epoch)
        if isinstance(replaced, torch.optim.Optimizer):
            self.step.forget(replaced)

    def check_tracked(self, optimizer: torch.optim.Optimizer, call: str) -> None:
        """Refuse an optimizer that no checkpoint would hold; without run.epochs there are none."""
        if self._epoch is not None:
            self.tracked.check_has(optimizer, call)

    @contextmanager
    def checking_optimizers(self) -> Iterator[None]:
        """A context that rejects an optimizer of trained weights that is not tracked, and notes its learning rate."""

        def on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self.step.hooks.are_watched(optimizer.param_groups[0]["params"]):
                self.check_tracked(optimizer, "optimizer.step()")
                self.step.note_lr(optimizer)

        hook = register_optimizer_step_pre_hook(on_step)
        try:
            yield
        finally:
            hook.remove()

    # --- what the user's code logs -----------------------------------------------------------------------------

    def log(self, values: dict[str, Any]) -> None:
        """Keep the values for the next log point, or for the row of this epoch."""
        lane, inputs = self.step.lane, self._open
        if lane is not None and inputs is not None and not self._is_left:
            self.logged.add(lane, values)
        else:
            self._values |= {name: checked(name, value) for name, value in values.items()}

    def warn_of_gather(self) -> None:
        """Warn that a loss over the gathered rows of ranks depends on their number, if lanes do not fix it."""
        if self.step.rank_lanes.most > 1:
            self.context.warn_once(
                f"run.gather joins the batches of {self.context.world.size} ranks, so the loss depends on their "
                "number; use as many ranks as lanes for the same weights"
            )

    def check_stopped(self) -> None:
        """Raise the agreed stop again if the user's code has caught it."""
        if self._stopped is not None:
            raise self._stopped
