"""The losses of steps: on the device until a log point or a checkpoint, then in `step` and `pace` events.

Log points depend on measured times. The steps with a `step` event, and its numbers, depend only on the run.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from paceline.data.lanes import RankLanes, StepInputs
from paceline.engine.clock import OTHER, PHASES, REDUCTION, PhaseClock
from paceline.engine.nonfinite import FinishedStep
from paceline.engine.step import StepResult
from paceline.observe.bottleneck import StragglerDetector
from paceline.observe.events import Events
from paceline.system.memory import Memory
from paceline.worker.logged_values import LoggedValues
from paceline.worker.state import LoopPlan, LossSums, TrainState
from paceline.worker.step_rows import ArrivedStep, PendingRows, PendingStep, arrived_steps
from paceline.world import World

SHORTEST_S, LONGEST_S = 0.1, 1.0  # between two log points, unless the config sets log.every_steps
GATHER_SHARE = 0.004  # of the time, for the communication of the ranks at log points
INTERVALS: list[int] = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]  # in steps
WINDOWS = 200  # a window of recorded steps is at least one step, and at least 1 / 200 of the steps so far
SAMPLE_S = 1.0  # of training between two steps of a GPU whose phases are timed
LAG_STEPS, LAG_SHARE = 2, 20  # a GPU runs 2 steps, or 1 / 20 of the interval, before its log point is read


class StepLog:
    """Collects the results of steps and writes their events; adds their losses to the state of the loop."""

    def __init__(
        self,
        world: World,
        state: TrainState,
        plan: LoopPlan,
        events: Events,
        clock: PhaseClock,
        stragglers: StragglerDetector,
        review: Callable[[Sequence[FinishedStep]], None],
        logged: LoggedValues | None = None,
    ) -> None:
        """`review` is called with the steps whose losses have arrived; `logged` are values of the user's own loop."""
        self._logged = logged
        self._world, self._state, self._plan, self._events, self._review = world, state, plan, events, review
        self._clock, self._stragglers, self._memory = clock, stragglers, Memory(world.device)
        self._facts = -3 - len(PHASES)  # the first column of memory, cost, milliseconds of a step and of each phase
        self._every, self._trained_s, self._sample_at_s = 1, 0.0, SAMPLE_S
        self._cost_s = 0.0  # of sending the last log point
        self._rows: list[torch.Tensor] = []
        self._steps: list[PendingStep] = []
        self._sent: PendingRows | None = None
        self.last: dict[str, float | None] = {}  # the numbers of the newest step that has arrived
        self.restart_clock()

    def add(self, inputs: StepInputs, result: StepResult, lr: float) -> None:
        """Keep the result of a step; no synchronisation."""
        self._rows.append(result.row)
        lanes = [(lane.lane, lane.indices) for lane in inputs.lanes]
        is_kept = is_recorded(inputs, self._plan.log_every_steps)
        pending = PendingStep(
            inputs.step, inputs.epoch, lr, time.time(), is_kept, lanes, result.names, result.row.numel()
        )
        self._steps.append(pending)
        self._samples += inputs.lanes[0].step_samples
        self._timed_steps += 1

    def is_due(self, step: int) -> bool:
        """Whether a step is a log point; the same on all ranks."""
        return step % self._interval == 0

    @property
    def _interval(self) -> int:
        """Steps between log points."""
        return self._plan.log_every_steps or self._every

    def is_overdue(self, step: int) -> bool:
        """Whether a log point was sent long enough ago that its rows have arrived."""
        if self._sent is None or not self._sent.is_log_point:
            return False
        return step > self._sent.steps[-1].step + max(LAG_STEPS, self._interval // LAG_SHARE)

    def advance(self, step: int, *, ends_epoch: bool) -> None:
        """At a log point send the rows, and write their events: now, or on a GPU some steps later. All ranks."""
        if ends_epoch and self._sent is not None:  # the log point of this step has the pace of both
            self._sent = self._sent._replace(is_log_point=False)
        if self.is_due(step) or ends_epoch:
            self.send(is_log_point=True)
            if self._world.device.type != "cuda" or ends_epoch:
                self.settle()
        elif self.is_overdue(step):
            self.settle()

    def send(self, *, is_log_point: bool = False) -> None:
        """Start to copy the rows to the host, without waiting. All ranks."""
        self.settle()
        began = time.perf_counter()
        rows = torch.cat(self._rows).double()
        # Numbers of the host are copied from pinned memory: a copy from other memory would wait for the device.
        is_on_gpu = rows.device.type == "cuda"
        known = [self._memory.used, self._cost_s, *self._clock.mean_ms(self._timed_steps)]
        facts = torch.tensor(known, dtype=rows.dtype, pin_memory=is_on_gpu).to(rows.device, non_blocking=True)
        self._clock.enter(REDUCTION)
        numbers = torch.stack(self._world.gather_equal(torch.cat([rows, facts])))
        self._clock.enter(OTHER)
        arrived = None
        if self._logged is not None:
            self._logged.send()
        if is_on_gpu:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        self._sent = PendingRows(numbers, arrived, self._steps, is_log_point)
        self._rows, self._steps = [], []
        if is_log_point:
            self._cost_s = time.perf_counter() - began
            self._restart_steps()

    def settle(self) -> None:
        """Wait for the rows that were sent, and write their events. All ranks."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.arrived is not None:
            sent.arrived.synchronize()
        arrived = arrived_steps(sent, RankLanes(self._plan.lanes, self._world.size, self._world.rank))
        if self._logged is not None:
            logged = self._logged.arrived()
            arrived = [each.with_logged(logged.get(each.step.step, {})) for each in arrived]
        with self._events.batch():
            # Step by step, so that the sums do not depend on how many steps arrive together.
            for each in arrived:
                self._take_in(each)
            if sent.is_log_point:
                self._report_pace(sent)
        self._review([FinishedStep(each.step.step, each.step.lanes, each.totals, each.is_skipped) for each in arrived])

    def collect(self) -> None:
        """Write the events of all steps so far. All ranks."""
        self.settle()
        if self._rows:
            self.send()
            self.settle()

    def _take_in(self, arrived: ArrivedStep) -> None:
        """Add the numbers of one step to the sums; with a recorded step, close the window since the last one."""
        state, step, norm = self._state, arrived.step, arrived.grad_norm
        state.sums.add(*arrived.loss)
        for name, value in arrived.values.items():
            state.value_sums.setdefault(name, LossSums()).add(*value)
        grad_norm = norm if not arrived.is_skipped and 0 <= norm < math.inf else None
        values = {name: _mean(*value) for name, value in arrived.values.items()}
        self.last = {**values, "loss": _mean(*arrived.loss), "grad_norm": grad_norm, "lr": step.lr}
        if step.is_recorded:
            windows = {name: sums.window_mean() for name, sums in state.value_sums.items()}
            self._events.write(
                "step", time=round(step.time, 3),
                step=step.step + 1, steps=self._plan.total_steps, epoch=step.epoch + 1, epochs=self._plan.epochs,
                loss=state.sums.window_mean(),  # None if every step was skipped
                lr=step.lr, grad_norm=grad_norm, **({"values": windows} if windows else {}),
            )  # fmt: skip

    def _report_pace(self, sent: PendingRows) -> None:
        """Report time and memory since the last log point, and choose the next ones."""
        step = sent.steps[-1].step + 1
        memory, cost_s, *means = sent.numbers[:, self._facts :].T.tolist()  # one number per rank for each
        step_ms = [round(each, 3) for each in means[0]]
        phases = self._clock.phases_of(list(zip(*means, strict=True)))
        phase_ms = {name: [round(each, 3) for each in ms] for name, ms in phases.items()}
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        self._state.seconds += elapsed
        self._events.write(
            "pace", step=step, steps=self._plan.total_steps, epoch=sent.steps[-1].epoch + 1, epochs=self._plan.epochs,
            samples_per_s=round(self._samples / elapsed, 1),
            step_ms=step_ms, phase_ms=phase_ms, memory_mb=[round(used / 1e6, 1) for used in memory],
        )  # fmt: skip
        if found := self._stragglers.update(step_ms, phase_ms, elapsed):
            self._events.write("straggler", step=step, **found)
        self._restart_window()
        # An early rank waits for the others in the gather; the smallest cost is that of the last rank.
        self._adapt(len(sent.steps), max(means[0]) / 1e3, min(cost_s))

    def _adapt(self, steps: int, step_s: float, cost_s: float) -> None:
        """Choose the next log points, from numbers that are equal on all ranks."""
        self._trained_s += steps * step_s
        self._every = log_interval(step_s, self._trained_s, cost_s)
        if self._trained_s >= self._sample_at_s:
            self._clock.sample_next_step()
            self._sample_at_s = self._trained_s + SAMPLE_S

    def epoch_means(self) -> dict[str, float | None]:
        """The means of this epoch so far: `train_loss`, and `train_NAME` of each further value."""
        named = {"loss": self._state.sums, **self._state.value_sums}
        return {f"train_{name}": sums.epoch_mean() for name, sums in named.items()}

    def restart_epoch(self) -> None:
        """Reset the sums of the epoch."""
        for sums in (self._state.sums, *self._state.value_sums.values()):
            sums.restart_epoch()

    def restart_clock(self) -> None:
        """Restart the measurement of time, so that an evaluation does not count as slow training."""
        self._clock.discard_sample()
        self._restart_window()
        self._restart_steps()

    def _restart_window(self) -> None:
        self._samples = 0
        self._since = time.perf_counter()

    def _restart_steps(self) -> None:
        self._timed_steps = 0
        self._clock.restart()


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


def is_recorded(inputs: StepInputs, every_steps: int | None) -> bool:
    """Whether a step has a `step` event: a function of the run only, so that identical runs have identical curves."""
    step = inputs.step + 1
    return step % (every_steps or record_interval(step)) == 0 or (inputs.ends_epoch and not inputs.is_epoch_cut_short)


def record_interval(step: int) -> int:
    """Steps between two recorded steps around `step`: all of the first steps, fewer of later steps (pure).

    It does not depend on the length of the run, which may be unknown, or be changed when the run is resumed.
    """
    return INTERVALS[bisect_left(INTERVALS, step / WINDOWS)]


def log_interval(step_s: float, elapsed_s: float, cost_s: float) -> int:
    """Steps between two log points, each of which costs the ranks `cost_s` seconds (pure).

    A short run is logged in detail, a long one about once a second, so that the cost of logging is negligible.
    """
    pause = min(max(elapsed_s / 50, SHORTEST_S, cost_s / GATHER_SHARE), LONGEST_S)
    wanted = pause / max(step_s, 1e-6)
    return next(each for each in INTERVALS if each >= wanted)
