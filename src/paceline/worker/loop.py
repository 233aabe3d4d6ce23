"""The managed loop: the order of steps, evaluations and saves. Their implementation is in other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.lanes import StepInputs
from paceline.engine.clock import DATA
from paceline.engine.step import Stepper
from paceline.system.signals import StopAgreed
from paceline.worker.cycle import FINISH, StepCycle
from paceline.worker.evaluate import Evaluator
from paceline.worker.state import LoopPlan, TrainState


@dataclass
class Loop:
    """One run from its current step to its end, or to the step at which all ranks agree to stop.

    callbacks: on_start
    for inputs of each step:
        begin an exchange: stop? a checkpoint by the clock? is a rank still writing one? does a callback want one?
        stepper.take(inputs)                     forward, backward, reduction, update
        log the step                             losses leave the device at log points
        callbacks: on_step
        compare the replicas                     every check_replicas_every steps, and at the end
        end the exchange                         all ranks have the answers
        at the end of an epoch, or every evaluate.every_steps, unless the ranks stop:
            evaluate
            callbacks: on_evaluate
        publish the checkpoint that was written  callbacks: on_checkpoint
        stop or finish, if a rank asks for it
        start a checkpoint, if one is due
    callbacks: on_stop
    """

    stepper: Stepper
    inputs: Callable[[torch.Tensor | None], Iterable[StepInputs]]  # of the remaining steps, see build_inputs
    evaluator: Evaluator | None
    plan: LoopPlan
    state: TrainState
    cycle: StepCycle

    def __post_init__(self) -> None:
        """All ranks."""
        self.world, self.events, self.progress = self.cycle.world, self.cycle.events, self.cycle.progress
        self.module = self.stepper.replica.module

    def run(self) -> int:
        """Train, and return 0 or the number of the reason to stop. All ranks."""
        self._continue_epoch()
        self.cycle.start()
        try:
            if self._evaluate_if_due(len(self.state.history)):
                self.cycle.save()  # the checkpoint that was restored has no metrics of this evaluation
                self.cycle.log.restart_clock()
            if self.state.is_finished:
                return 0
            self.progress.phase = "training"
            for inputs in self._all_inputs():
                self._take(inputs)
                self.stepper.clock.enter(DATA)
        except StopAgreed as agreed:
            reason = int(agreed.args[0])
            return 0 if reason == FINISH else reason
        finally:
            self.progress.batch = None
        return 0

    def finish(self, reason: int) -> None:
        """Call `on_stop`, after the loop. All ranks."""
        self.cycle.call("on_stop", self.cycle.run.stop_requested if reason else None)

    def _all_inputs(self) -> Iterator[StepInputs]:
        """The inputs of all remaining steps; measures the samples' losses if the order depends on them. All ranks."""
        yield from self.inputs(self.state.sample_losses)
        is_over = self.plan.total_steps is not None and self.state.step >= self.plan.total_steps
        if self.plan.ranks_by_loss and self.state.sample_losses is None and not is_over:
            self.state.sample_losses = self._measure_samples()
            yield from self.inputs(self.state.sample_losses)

    def _measure_samples(self) -> torch.Tensor:
        """The loss of every training sample with the current weights. All ranks."""
        self.progress.phase = "ranking the samples"
        self.stepper.replica.share_buffers()
        moving = self.stepper.replica.forward_state.moving
        evaluator = Evaluator(self.stepper.feed, self.stepper.settings, self.world, moving)
        losses = evaluator.losses(self.module, self._on_round)
        self.progress.phase, self.progress.batch = "training", None
        self.cycle.log.restart_clock()
        return losses

    def _continue_epoch(self) -> None:
        """Reopen an epoch that was cut short if the run is longer now: it is evaluated at its end."""
        state, total = self.state, self.plan.total_steps
        if not state.is_epoch_cut_short or state.is_finished or (total is not None and state.step >= total):
            return
        if state.is_evaluation_due:
            state.is_evaluation_due = False
        else:
            state.history.pop()
        state.is_epoch_cut_short = False

    def _take(self, inputs: StepInputs) -> None:
        """Do one step, and the saves, logs and evaluations that are due after it. All ranks."""
        state = self.state
        self.cycle.begin(inputs)
        self.stepper.freeze(self.cycle.run.frozen)
        result = self.stepper.take(inputs)
        answers = self.cycle.end(inputs, result, self.stepper.lr)
        state.is_epoch_cut_short = inputs.is_epoch_cut_short or (state.is_finished and not inputs.ends_epoch)
        state.is_evaluation_due = inputs.ends_epoch or state.is_finished
        state.is_step_evaluation_due = self._is_evaluated_by_steps() and not state.is_evaluation_due
        is_requested = False
        if not answers.reason or state.is_finished:
            is_requested = self._evaluate_if_due(inputs.epoch)
        if inputs.ends_run:
            self.cycle.withdraw_finish()  # it ends here anyway
        elif state.is_finished:
            self.cycle.compare_replicas()
            answers = answers._replace(reason=FINISH)
        self.cycle.close(answers, is_requested=is_requested)

    def _evaluate_if_due(self, epoch: int) -> bool:
        """Do the evaluation that is due, if any; return whether a callback requests a checkpoint of it. All ranks."""
        state = self.state
        if state.is_evaluation_due:
            self._end_epoch(epoch)
            return self.cycle.is_save_requested()
        if not state.is_step_evaluation_due:
            return False
        row = state.evaluation = self._row(epoch, is_evaluated=True)
        state.is_step_evaluation_due = False
        self.events.write("evaluation", **row)
        self._call_on_evaluate(row)
        is_requested = self.cycle.is_save_requested()
        if state.is_finished:  # the run ends with this evaluation
            state.is_epoch_cut_short = True
            self._add_row(row)
        return is_requested

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate, unless a later epoch will be evaluated, and add the epoch's row to the history. All ranks."""
        state = self.state
        is_regular = self._is_evaluated_by_steps() or (
            not state.is_epoch_cut_short and (epoch + 1) % self.plan.evaluate_every_epochs == 0
        )
        is_last = state.is_finished or state.is_epoch_cut_short or epoch + 1 >= self.plan.epochs
        row = self._row(epoch, is_evaluated=is_regular or is_last)
        if not state.is_epoch_cut_short:
            self.cycle.log.restart_epoch()
        state.is_evaluation_due = False
        self._add_row(row)
        if is_regular or is_last:
            self._call_on_evaluate(row, is_regular=is_regular)

    def _is_evaluated_by_steps(self) -> bool:
        """Whether `evaluate.every_steps` requires an evaluation after the current step."""
        every = self.plan.evaluate_every_steps
        return every is not None and self.state.step % every == 0

    def _add_row(self, row: dict[str, Any]) -> None:
        """Add a row to the history."""
        self.state.history.append(row)
        self.events.write("epoch", **row)

    def _row(self, epoch: int, *, is_evaluated: bool) -> dict[str, Any]:
        """The means of the epoch so far, and the metrics of an evaluation. All ranks."""
        self.cycle.log.collect()
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.state.step, **self.cycle.log.epoch_means()}
        if self.evaluator is not None and is_evaluated:
            self.state.metrics = self._evaluate(self.evaluator)
            row |= self.state.metrics
        return row

    def _call_on_evaluate(self, row: dict[str, Any], *, is_regular: bool = True) -> None:
        """Pass the row of an evaluation to the schedule and to the callbacks. All ranks.

        An irregular evaluation happens because the run ends here. A longer run would not do it, so checkpoints, with
        which this run may be extended, contain the states from before it.
        """
        if is_regular:
            self.stepper.rates.after_evaluation(row)
        else:
            self.cycle.hold_callbacks()
        self.cycle.call("on_evaluate", row)
        self.cycle.log.restart_clock()

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        """The metrics of the current weights, or of their average if the run keeps one. All ranks."""
        self.progress.phase = "evaluating"
        self.stepper.replica.share_buffers()
        with self.stepper.ema.applied() if self.stepper.ema is not None else nullcontext():
            metrics = evaluator.measure(self.module, self._on_round)
        self.progress.phase, self.progress.batch = "training", None
        return metrics

    def _on_round(self, done: int, total: int) -> None:
        """After each round of an evaluation. All ranks."""
        self.progress.batch = done
        self.events.write_sometimes("evaluating", batch=done, batches=total)
        self.cycle.check_stop()
