"""The managed loop: the order of steps, logging, evaluations and saves. Their implementation is in other modules."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.callbacks import Callback, Run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.state import CheckpointState, capture
from paceline.data.lanes import StepInputs
from paceline.engine.clock import DATA
from paceline.engine.digest import check_frozen, check_replicas, digests_of
from paceline.engine.step import Stepper, StepResult
from paceline.observe.bottleneck import StragglerDetector
from paceline.system.signals import Stop, StopAgreed, describe
from paceline.worker.callback_states import check_states, states_of
from paceline.worker.context import Context
from paceline.worker.evaluate import Evaluator
from paceline.worker.state import LoopPlan, TrainState
from paceline.worker.step_log import StepLog, is_recorded

BY_CALLBACK = 1_001  # among the numbers of signals and TIME_IS_UP


@dataclass
class Loop:
    """One run from its present step to its end, or to the step at which all ranks agree to stop.

    callbacks: on_start
    for inputs of each step:
        begin an exchange: stop? a checkpoint by the clock? is a rank still writing one? does a callback want one?
        stepper.take(inputs)                     forward, backward, reduction, update
        log the step                             losses leave the device at log points
        callbacks: on_step
        compare the replicas                     every check_replicas_every steps, and at the end
        end the exchange                         all ranks know the answers
        at the end of an epoch, unless the ranks stop:
            evaluate
            callbacks: on_evaluate
        publish the checkpoint that was written  callbacks: on_checkpoint
        stop, if a rank asks for it
        start a checkpoint, if one is due
    callbacks: on_stop
    """

    context: Context
    stepper: Stepper
    inputs: Callable[[torch.Tensor | None], Iterable[StepInputs]]  # of the remaining steps, see build_inputs
    evaluator: Evaluator | None
    plan: LoopPlan
    saver: Saver
    stop: Stop
    state: TrainState
    callbacks: list[Callback]

    def __post_init__(self) -> None:
        """All ranks."""
        context, state = self.context, self.state
        self.world, self.events, self.progress = context.world, context.events, context.progress
        self.module = self.stepper.replica.module
        self.run_view = Run(
            rank=self.world.rank, world_size=self.world.size, device=self.world.device, folder=context.folder.path,
            model=self.module, total_steps=self.plan.total_steps, step_number=state.step,
            epoch=state.epoch, history=state.history,
        )  # fmt: skip
        self.on_step = [callback for callback in self.callbacks if callback.overrides("on_step")]

    def run(self) -> int:
        """Train, and return 0 or the number of the reason to stop. All ranks."""
        self.exchange = self.world.exchange()
        guard = self.stepper.guard
        review = guard.review if guard is not None and guard.is_deferred else lambda steps: None
        # The log gets no reference to this loop: in a cycle, DataLoader workers would wait for the garbage collector.
        stragglers = StragglerDetector(self.world.gather_objects(socket.gethostname()))
        self.log = StepLog(self.world, self.state, self.plan, self.events, self.stepper.clock, stragglers, review)
        self.progress.step, self.progress.samples = self.state.step, self.state.samples
        self.frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        self.module.train()  # pretrained models start in evaluation mode
        self._call("on_start")
        try:
            if self.state.is_evaluation_due:
                self._end_epoch(len(self.state.history))
                if self._is_save_requested():  # the checkpoint that was restored has no metrics of this evaluation
                    self.save()
                    self.log.restart_clock()
            self.progress.phase = "training"
            is_first = True
            for inputs in self._all_inputs():
                self._take(inputs)
                self.stepper.clock.enter(DATA)
                if is_first:  # the optimizer has its state now, and callbacks have been called
                    check_states(self.callbacks)
                    self.saver.reserve(self._capture())
                    is_first = False
        except StopAgreed as agreed:
            return int(agreed.args[0])
        finally:
            self.progress.batch = None
        return 0

    def save(self) -> bool:
        """Save the present state and wait for it; return whether it is on the disk. All ranks."""
        self.progress.phase = "saving"
        self.run_view.save_requested = False
        is_saved = self.saver.save_now(self.state.step, self._state, self._metrics_of_step())
        self._call_on_checkpoint()
        return is_saved

    def reason_text(self, reason: int) -> str:
        """Why the loop stopped, in words."""
        if reason == BY_CALLBACK:
            return self.run_view.stop_requested or "a callback"
        return describe(reason)

    def _all_inputs(self) -> Iterator[StepInputs]:
        """The inputs of all remaining steps; measures the samples' losses if the order depends on them. All ranks."""
        yield from self.inputs(self.state.sample_losses)
        is_over = self.plan.total_steps is not None and self.state.step >= self.plan.total_steps
        if self.plan.ranks_by_loss and self.state.sample_losses is None and not is_over:
            self.state.sample_losses = self._measure_samples()
            yield from self.inputs(self.state.sample_losses)

    def _measure_samples(self) -> torch.Tensor:
        """Every training sample's loss under the present weights. All ranks."""
        self.progress.phase = "ranking the samples"
        self.stepper.replica.share_buffers()
        moving = self.stepper.replica.forward_state.moving
        evaluator = Evaluator(self.stepper.feed, self.stepper.settings, self.world, moving)
        losses = evaluator.losses(self.module, self._on_round)
        self.progress.phase, self.progress.batch = "training", None
        self.log.restart_clock()
        return losses

    def _take(self, inputs: StepInputs) -> None:
        """One step, and the saves, logs and evaluations that are due after it. All ranks."""
        state = self.state
        if state.is_epoch_cut_short:  # this step continues that epoch
            state.history.pop()
        state.is_epoch_cut_short = inputs.is_epoch_cut_short
        self.progress.epoch, self.progress.step = inputs.epoch, inputs.step
        self.exchange.begin(self._stop_reason(), self.saver.is_time, self.saver.is_busy, self.run_view.save_requested)
        result = self.stepper.take(inputs)
        state.step = self.progress.step = inputs.step + 1
        state.samples += inputs.lanes[0].step_samples
        state.stream_position = inputs.stream_position
        state.epoch = self.run_view.epoch = inputs.epoch + 1
        self.progress.samples = state.samples
        self._log(inputs, result)
        self._call_on_step()
        self._compare_replicas(inputs)  # after the callbacks, which may change the model
        reason, is_time, is_busy, is_asked = self.exchange.end()
        state.is_evaluation_due = inputs.ends_epoch
        is_requested = False
        if inputs.ends_epoch and not reason:
            self._end_epoch(inputs.epoch)
            is_requested = self._is_save_requested()
        if is_requested:
            self.saver.finish()  # these weights are to be saved, not those of a later step
        elif not is_busy:
            self.saver.advance()
        self._call_on_checkpoint()
        if reason:
            raise StopAgreed(reason)
        self.saver.request(state.step, is_time=bool(is_time), is_asked=is_requested or bool(is_asked))
        if self.saver.is_due:
            self.run_view.save_requested = False
            self.saver.start(state.step, self._state(), self._metrics_of_step())
            self.stepper.clock.discard_sample()

    def _stop_reason(self) -> int:
        return self.stop.reason or (BY_CALLBACK if self.run_view.stop_requested is not None else 0)

    def _log(self, inputs: StepInputs, result: StepResult) -> None:
        """Log the result of a step, and the digests of the weights if they are wanted. All ranks."""
        self.log.add(inputs, result, self.stepper.lr)
        self.log.advance(self.state.step, ends_epoch=inputs.ends_epoch)
        if self.plan.log_digests and is_recorded(inputs, self.plan.log_every_steps):
            self.events.write("digests", step=self.state.step, digests=digests_of(self.module).tolist())

    def _compare_replicas(self, inputs: StepInputs) -> None:
        """Stop the run if the weights of the ranks differ. All ranks."""
        step = self.state.step
        if step % self.plan.check_replicas_every == 0 or step == 1 or inputs.ends_run:
            check_frozen(self.frozen, self.world)
            if self.stepper.replica.forward_state.moving:  # differs between lanes; rank 0's values are kept
                self.stepper.replica.share_buffers()
            check_replicas(self.module, self.world, step)

    def _end_epoch(self, epoch: int) -> None:
        """Evaluate and add the epoch's row to the history. All ranks."""
        state = self.state
        row: dict[str, Any] = {"epoch": epoch + 1, "step": state.step, "train_loss": self.log.epoch_mean()}
        if self.evaluator is not None:
            state.metrics = self._evaluate(self.evaluator)
            row |= state.metrics
        if not state.is_epoch_cut_short:
            self.log.restart_epoch()
        state.is_evaluation_due = False
        state.history.append(row)
        self.events.write("epoch", **row)
        self._call("on_evaluate", row)
        self.log.restart_clock()

    def _evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        """The metrics of the present weights, or of their average if the run keeps one. All ranks."""
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
        self.exchange.begin(self._stop_reason())
        [reason] = self.exchange.end()
        if reason:
            raise StopAgreed(reason)

    # --- callbacks ---------------------------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks that have it. All ranks."""
        self.run_view.step_number = self.state.step
        for callback in self.callbacks:
            if callback.overrides(method):
                getattr(callback, method)(self.run_view, *arguments)

    def _call_on_step(self) -> None:
        """Call `on_step`, with the numbers of this step where a callback needs them. All ranks."""
        if not self.on_step:
            return
        if any(callback.needs_step_metrics for callback in self.on_step):
            self.log.collect()
        self.run_view.step_number = self.state.step
        for callback in self.on_step:
            callback.on_step(self.run_view, self.log.last if callback.needs_step_metrics else {})

    def _call_on_checkpoint(self) -> None:
        """Call `on_checkpoint` for each checkpoint that was published since the last call. All ranks."""
        for path in self.saver.newly_published():
            self._call("on_checkpoint", path)

    def _is_save_requested(self) -> bool:
        """Whether a callback of any rank has requested a checkpoint of this step. All ranks."""
        if not self.callbacks:
            return False
        self.exchange.begin(self.run_view.save_requested)
        [is_requested] = self.exchange.end()
        return bool(is_requested)

    def finish(self, reason: int) -> None:
        """Call `on_stop`, after the loop. All ranks."""
        self._call("on_stop", self.reason_text(reason) if reason else None)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _metrics_of_step(self) -> dict[str, float]:
        """The metrics for a checkpoint: the last row of the history, if it belongs to this step."""
        row = self.state.history[-1] if self.state.history else {}
        is_of_now = row.get("step") == self.state.step
        return {name: value for name, value in row.items() if isinstance(value, float)} if is_of_now else {}

    def _state(self) -> CheckpointState:
        """The state to save, after the events and buffers of this step are complete. All ranks."""
        self.log.collect()
        self.stepper.replica.share_buffers()
        return self._capture()

    def _capture(self) -> CheckpointState:
        """The state of model, optimizer, loop and callbacks. All ranks."""
        stepper = self.stepper
        counters = {
            "loop": asdict(self.state),
            "stepper": stepper.counters(),
            "callbacks": states_of(self.callbacks),
        }
        loss = stepper.replica.forward_state.of_loss()
        return capture(stepper.replica.module, stepper.optimizer, stepper.ema, counters, stepper.sharding, loss)
