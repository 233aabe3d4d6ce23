"""The work around each step in both loops: agreement on stops and saves, logs, callbacks, comparison of replicas."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from paceline.callbacks import Callback
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState
from paceline.data.lanes import StepInputs
from paceline.data.seeding import seed_generators
from paceline.engine.clock import PhaseClock
from paceline.engine.digest import check_frozen, check_replicas, digests_of
from paceline.engine.nonfinite import FinishedStep, Guard
from paceline.engine.replica import BareReplica, PlainModel, Replica
from paceline.engine.step import StepResult
from paceline.engine.training_mode import keeping_modes
from paceline.errors import ConfigError
from paceline.observe.bottleneck import StragglerDetector
from paceline.system.signals import Stop, StopAgreed, describe
from paceline.worker.callback_states import states_of
from paceline.worker.context import Context
from paceline.worker.logged_values import LoggedValues
from paceline.worker.rank_run import RankRun
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.step_log import StepLog, is_recorded

# Larger than all signal numbers and TIME_IS_UP: a run that ends as complete needs no stop.
BY_CALLBACK, FINISH = 1_001, 1_002


class Place(IntEnum):
    """The place in the code at which a rank exchanges numbers with the others."""

    STEP = 1
    STEP_WITHOUT_BACKWARD = 2
    BETWEEN_STEPS = 3
    END_OF_EPOCH = 4
    END_OF_TRAIN_FN = 5
    SUM = 6
    GATHER = 7

    @property
    def words(self) -> str:
        """The place as text for messages."""
        return {
            Place.STEP: "in a batch with run.backward(loss)",
            Place.STEP_WITHOUT_BACKWARD: "at the end of a batch without run.backward(loss)",
            Place.BETWEEN_STEPS: "between two steps",
            Place.END_OF_EPOCH: "at the end of an epoch",
            Place.END_OF_TRAIN_FN: "at the end of train_fn",
            Place.SUM: "in run.sum or run.mean",
            Place.GATHER: "in run.gather",
        }[self]


class Answers(NamedTuple):
    """The result of the exchange at the end of a step: the maximum of the numbers that all ranks sent at its start."""

    reason: int  # to stop, or 0
    is_time: int  # to save, by the clock
    is_busy: int  # whether a rank is still writing a checkpoint
    is_asked: int  # whether a checkpoint was requested


def _review(guard: Guard | None, steps: Sequence[FinishedStep]) -> None:
    """Pass to the guard the steps whose numbers were checked on the device. All ranks."""
    if guard is not None and guard.is_deferred:
        guard.review(steps)


@dataclass
class StepCycle:
    """The start and the end of each step, and the checkpoints of the run."""

    context: Context
    replica: Replica | PlainModel | BareReplica
    clock: PhaseClock
    guard: Guard | None
    plan: LoopPlan
    saver: Saver
    stop: Stop
    state: TrainState
    callbacks: list[Callback]
    run: RankRun
    capture: Callable[[dict[str, Any]], CheckpointState]  # the state of model and optimizers, with these counters
    logged: LoggedValues | None = None  # the values that the user's own loop logs; None in the managed loop

    def __post_init__(self) -> None:
        self.world, self.events, self.progress = self.context.world, self.context.events, self.context.progress
        self.module = self.replica.module
        self._on_step = [each for each in enumerate(self.callbacks) if each[1].overrides("on_step")]
        self._is_reserved = False
        self._held: tuple[dict[str, Any], list[str]] | None = None  # see `hold_callbacks`

    def start(self) -> None:
        """Prepare for the first step of this attempt. All ranks."""
        self.exchange = self.world.exchange()
        review = partial(_review, self.guard)
        # The log has no reference to this object: a cycle would keep DataLoader workers until a garbage collection.
        stragglers = StragglerDetector(self.world.gather_objects(socket.gethostname()), self.plan.lanes)
        self.log = StepLog(self.world, self.state, self.plan, self.events, self.clock, stragglers, review, self.logged)
        self.progress.step, self.progress.samples = self.state.step, self.state.samples
        is_managed = self.logged is None  # the user's own loop may unfreeze parameters
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if is_managed and not p.requires_grad]
        self.module.train()  # pretrained models start in evaluation mode
        self.call("on_start")

    # --- one step ----------------------------------------------------------------------------------------------

    def begin(self, inputs: StepInputs, place: Place = Place.STEP) -> None:
        """Before a step: start the exchange with the other ranks. All ranks."""
        self.progress.epoch, self.progress.step = inputs.epoch, inputs.step
        reason = FINISH if self.run.asked_to_finish is not None else self.stop_reason()
        self._begin_exchange(place, reason, self.saver.is_time, self.saver.is_busy, self.run.save_requested)

    def end(self, inputs: StepInputs, result: StepResult, lr: float) -> Answers:
        """After a step: count and log it, call the callbacks, compare the replicas, end the exchange. All ranks."""
        state = self.state
        state.step = self.progress.step = inputs.step + 1
        state.samples += inputs.lanes[0].step_samples
        state.stream_position = inputs.stream_position
        state.epoch = self.run.epoch = inputs.epoch + 1
        is_done = inputs.ends_epoch and not inputs.is_epoch_cut_short
        state.epochs_done = self.run.epochs_done = inputs.epoch + is_done
        self.progress.samples = state.samples
        self._log(inputs, result, lr)
        self._call_on_step()
        if self._is_comparison_due(inputs):  # after the callbacks, which may change the model
            self.compare_replicas()
        answers = Answers(*self.end_exchange())
        state.is_finished = answers.reason == FINISH
        self._share(answers.reason)
        return answers

    def close(self, answers: Answers, *, is_requested: bool = False, can_save: bool = True) -> None:
        """Publish the checkpoint that was written, raise StopAgreed, or start a checkpoint if one is due. All ranks.

        `is_requested`: a checkpoint of exactly this step was requested.
        """
        self.saver.end_step(self.state.step)
        if is_requested:
            self.saver.finish()  # these weights must be saved, not those of a later step
        elif not answers.is_busy:
            self.saver.advance()
        self._call_on_checkpoint()
        if answers.reason:
            raise StopAgreed(answers.reason)
        self.saver.request(
            self.state.step, is_time=bool(answers.is_time), is_asked=is_requested or bool(answers.is_asked)
        )
        if self.saver.is_due and can_save:
            self.start_save()
            self.clock.discard_sample()
        if not self._is_reserved and can_save:  # the optimizer has its state now, and callbacks have been called
            self._is_reserved = True
            self.saver.reserve(self._state())

    def meet(self, place: Place) -> None:
        """Raise if another rank is at another place of the user's code. All ranks."""
        highest, lowest = self.exchange.meet(place, -place)
        self._check_places(place, highest, -lowest)

    def _begin_exchange(self, place: Place, *numbers: int) -> None:
        self._place = place
        self.exchange.begin(place, -place, *numbers)

    def end_exchange(self) -> list[int]:
        """The maximum of each number over all ranks; raises if another rank is at another place. All ranks."""
        highest, lowest, *numbers = self.exchange.end()
        self._check_places(self._place, highest, -lowest)
        return numbers

    def _check_places(self, mine: Place, highest: int, lowest: int) -> None:
        if highest != lowest:
            other = Place(highest if highest != mine else lowest)
            raise ConfigError(
                f"rank {self.world.rank} is {mine.words} while another rank is {other.words}; all ranks must take the "
                "same path through train_fn (to skip a batch on one rank, multiply its loss by 0)"
            )

    def stop_reason(self) -> int:
        """The number of this rank's reason to stop, or 0."""
        return self.stop.reason or (BY_CALLBACK if self.run.asked_to_stop is not None else 0)

    def _share(self, reason: int) -> None:
        """Share the text of an agreed reason with all ranks. All ranks, with the same reason."""
        run = self.run
        if reason == FINISH:
            run.finish_requested = run.finish_requested or self._first(run.asked_to_finish)
        elif reason:
            run.stop_requested = self._first(run.asked_to_stop) if reason == BY_CALLBACK else describe(reason)

    def _first(self, text: str | None) -> str | None:
        """The text of the first rank that has one. All ranks."""
        return next((each for each in self.world.gather_objects(text) if each is not None), None)

    def withdraw_finish(self) -> None:
        """Cancel the request to end the run before its last step."""
        self.state.is_finished = False
        self.run.asked_to_finish = self.run.finish_requested = None

    def check_stop(self) -> None:
        """Raise StopAgreed if any rank has a reason to stop. All ranks."""
        self._begin_exchange(Place.BETWEEN_STEPS, self.stop_reason())
        [reason] = self.end_exchange()
        self._share(reason)
        if reason:
            raise StopAgreed(reason)

    def _log(self, inputs: StepInputs, result: StepResult, lr: float) -> None:
        """Log the result of a step, and the digests of the weights if enabled. All ranks."""
        self.log.add(inputs, result, lr)
        self.log.advance(self.state.step, ends_epoch=inputs.ends_epoch)
        if self.plan.log_digests and is_recorded(inputs, self.plan.log_every_steps):
            self.events.write("digests", step=self.state.step, digests=digests_of(self.module).tolist())

    def _is_comparison_due(self, inputs: StepInputs) -> bool:
        return self.state.step % self.plan.check_replicas_every == 0 or self.state.step == 1 or inputs.ends_run

    def compare_replicas(self) -> None:
        """Stop the run if the weights of the ranks differ. All ranks."""
        check_frozen(self._frozen, self.world)
        if self.replica.forward_state.moving:  # differs between lanes; rank 0's values are kept
            self.replica.share_buffers()
        check_replicas(self.module, self.world, self.state.step)

    # --- callbacks ---------------------------------------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks that define it. All ranks."""
        self.run.step_number = self.state.step
        for index, callback in enumerate(self.callbacks):
            if callback.overrides(method):
                self._call_one(index, method, *arguments)
        self.run.write_logged()

    def _call_one(self, index: int, method: str, *arguments: Any) -> None:
        """Call a method with the same random numbers on all ranks; an error is reported with its name.

        Only `on_start`, which is called again when the run resumes, may change the mode of modules permanently.
        """
        callback = self.callbacks[index]
        name = f"{type(callback).__name__}.{method}"
        seed_generators(self.context.config.seed, "callback", index, name, self.state.step)
        self.run.is_in_callback = True
        try:
            with nullcontext() if method == "on_start" else keeping_modes(self.module):
                getattr(callback, method)(self.run, *arguments)
        except Exception:
            self.progress.phase = f"callback {name}"
            raise
        self.run.is_in_callback = False

    def _call_on_step(self) -> None:
        """Call `on_step`, with the numbers of this step if a callback needs them. All ranks."""
        self.run.step_number = self.state.step
        if any(callback.needs_step_metrics for _, callback in self._on_step):
            self.log.collect()
        for index, callback in self._on_step:
            self._call_one(index, "on_step", self.log.last if callback.needs_step_metrics else {})
        self.run.write_logged()

    def _call_on_checkpoint(self) -> None:
        """Call `on_checkpoint` for each checkpoint that was published since the last call. All ranks."""
        for path in self.saver.newly_published():
            self.call("on_checkpoint", path)

    def is_save_requested(self) -> bool:
        """Whether a callback requests a checkpoint of this step; sets `is_finished` if one ends the run. All ranks."""
        if not self.callbacks and self.logged is None:
            return False
        self._begin_exchange(Place.BETWEEN_STEPS, self.run.save_requested, self.run.asked_to_finish is not None)
        is_requested, is_finished = self.end_exchange()
        if is_finished:
            self.state.is_finished = True
            self._share(FINISH)
        return bool(is_requested)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def start_save(self) -> None:
        """Start to save the current state, once the save before it is published. All ranks."""
        self.saver.finish()
        self.run.save_requested = False
        self.saver.start(self.state.step, self._complete_state(), self._metrics_of_step())

    def save(self) -> bool:
        """Save the current state and wait for it; return whether it is on the disk. All ranks."""
        self.progress.phase = "saving"
        self.run.save_requested = False
        is_saved = self.saver.save_now(self.state.step, self._complete_state, self._metrics_of_step())
        self._call_on_checkpoint()
        return is_saved

    def _metrics_of_step(self) -> dict[str, float]:
        """The metrics for a checkpoint: those of an evaluation of this step."""
        rows = [row for row in (self.state.evaluation, *self.state.history[-1:]) if row.get("step") == self.state.step]
        return {name: value for row in rows for name, value in row.items() if isinstance(value, float)}

    def _complete_state(self) -> CheckpointState:
        """The state to save, after the events and buffers of this step are complete. All ranks."""
        self.log.collect()
        self.replica.share_buffers()
        self.state.finish_requested = self._first(self.run.asked_to_finish)  # possibly by one rank only
        return self._state()

    def _state(self) -> CheckpointState:
        """The state of model, optimizers, loop and callbacks. All ranks."""
        states, self.state.frozen = self._held or self._state_of_callbacks()
        return self.capture({"loop": asdict(self.state), "callbacks": states})

    def hold_callbacks(self) -> None:
        """Make all further checkpoints of this attempt contain the current state of the callbacks."""
        self._held = self._state_of_callbacks()

    def _state_of_callbacks(self) -> tuple[dict[str, Any], list[str]]:
        """The states of the callbacks, and the names of the parameters that they have frozen."""
        return states_of(self.callbacks), sorted(self.run.frozen)
