"""The task of a rank that is profiled: the managed loop with a callback, for a few steps, without checkpoints.

After a warm-up, steps are timed without the profiler, because the profiler slows them down; then the same number of
steps is traced.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity

from paceline.callbacks import Callback, Run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data.rows import as_row_dataset
from paceline.data.scaler import fit_scalers
from paceline.data.sources import is_stream
from paceline.engine.clock import DATA, OTHER, PHASES, REDUCTION, PhaseClock
from paceline.engine.precision import resolve_precision
from paceline.engine.step import Stepper
from paceline.launch.environment import ranks_here
from paceline.observe.events import Events
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.outcome import write_value
from paceline.system.cores import usable_cores
from paceline.system.signals import Stop
from paceline.tools.profile import trace
from paceline.tools.profile.facts import Operator, Profile, StepSettings
from paceline.tools.profile.trace import OperatorCost, PhaseStart, Span
from paceline.worker.build import build_data, build_loop, build_model, build_step, use_own_stream
from paceline.worker.context import open_context
from paceline.worker.state import TrainState
from paceline.world import World

MOST_OPERATORS = 10


class RankProfile(NamedTuple):
    """The measurements of one rank; times in milliseconds per step."""

    host: str
    step_ms: float
    host_ms: list[float]  # of each phase of the clock
    busy_ms: dict[str, float]  # of a GPU
    costs: dict[str, OperatorCost]
    traced_ms: float  # the time of a step while it was traced
    own_ms: list[float]  # the time of each timed step without waiting for the all-reduce


def profile(config: Config, folder: RunFolder, world: World, progress: Progress, *, warm_up: int, steps: int) -> None:
    """Write a profile of the steps as the value of the job, and a trace of each rank. All ranks."""
    # Kineto logs lines that are of use only to its developers.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    use_own_stream(world)
    context = open_context(config, folder, world, progress)
    events = context.events
    training, _ = build_data(context)
    model = build_model(context)
    fit_scalers(model, training, config.seed, progress, config.collate)
    stepper, plan, _ = build_step(context, model, training, None)
    saver = Saver(Store(folder.checkpoints), config.checkpoint, {}, world, events, stepper.sharding)
    profiler = StepProfiler(stepper.clock, world.device, warm_up, steps, events)
    build_loop(context, stepper, None, plan, saver, Stop(), TrainState(), [profiler]).run()

    progress.phase = "writing the trace"
    events.write("progress", epoch=0, phase=progress.phase, batch=profiler.total - 1, batches=profiler.total)
    spans = trace.write(profiler.profiler, profiler.traced_marks, folder.trace(world.rank), os.getpid())
    rank_profiles = world.gather_objects(profiler.rank_profile(spans))
    if world.is_main:
        setting = setting_of(stepper, world)
        write_value(folder, put_together(rank_profiles, setting, world.device.type, steps, folder))
    events.write("run_finished")
    events.close()


class StepProfiler(Callback):
    """Times steps after a warm-up, then traces as many, then stops the loop."""

    needs_step_metrics = False

    def __init__(self, clock: PhaseClock, device: torch.device, warm_up: int, steps: int, events: Events) -> None:
        self.device, self.steps, self.events = device, steps, events
        self.timed_from, self.traced_from, self.total = warm_up, warm_up + steps, warm_up + 2 * steps
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.profiler = torch.profiler.profile(
            activities=activities, acc_events=True
        )  # without acc_events, some versions warn
        self.marks = [PhaseStart(OTHER, time.time_ns())]
        self._timed: list[int] = []  # the times between steps, in ns
        self._traced: list[int] = []  # the start and the end of the trace, in ns
        self._enter = clock.enter
        # The parts of the step have references to this clock, so its method is wrapped instead of the clock.
        clock.enter = self._on_enter  # type: ignore[method-assign]

    @property
    def traced_marks(self) -> list[PhaseStart]:
        """The phases that are in the trace."""
        begin, end = self._traced
        return [*(mark for mark in self.marks if begin <= mark.time_ns <= end), PhaseStart(OTHER, end)]

    def rank_profile(self, spans: Sequence[Span]) -> RankProfile:
        """The measurements of this rank; `spans` is the work in the trace."""
        per_step = 1e6 * self.steps
        host = [trace.spent_ns(self.marks, *step) for step in pairwise(self._timed)]
        return RankProfile(
            socket.gethostname(),
            step_ms=(self._timed[-1] - self._timed[0]) / per_step,
            host_ms=[sum(spent) / per_step for spent in zip(*host, strict=True)],
            busy_ms={kind: us / 1e3 / self.steps for kind, us in trace.busy_us(spans).items()},
            costs=trace.costs_of(spans, self.device.type),
            traced_ms=(self._traced[1] - self._traced[0]) / per_step,
            own_ms=[(sum(spent) - spent[REDUCTION]) / 1e6 for spent in host],
        )

    def _on_enter(self, phase: int) -> None:
        self.marks.append(PhaseStart(phase, time.time_ns()))
        self._enter(phase)

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Start or stop timing or tracing at the steps where they begin and end."""
        done = run.step_number
        if self.timed_from <= done <= self.traced_from:
            is_end = done in (self.timed_from, self.traced_from)
            self._timed.append(self._now() if is_end else time.time_ns())
        if done == self.traced_from:
            self.profiler.start()  # slow
            self._traced.append(self._now())
            self.marks.append(PhaseStart(OTHER, self._traced[0]))
        if done == self.total:
            self._traced.append(self._now())
            self.profiler.stop()
            run.stop("the profiler")
        part = ("warming up", "timing", "tracing")[(done >= self.timed_from) + (done >= self.traced_from)]
        self.events.write_sometimes("progress", epoch=0, phase=part, batch=done - 1, batches=self.total)

    def _now(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host runs ahead of the device
        return time.time_ns()


# --- the measurements of all ranks ------------------------------------------------------------------------------


def put_together(
    rank_profiles: list[RankProfile], setting: StepSettings, device: str, steps: int, folder: RunFolder
) -> Profile:
    """Combine the measurements of all ranks into one profile (pure)."""
    step_ms = [rank_profile.step_ms for rank_profile in rank_profiles]
    if device == "cuda":
        phases = {kind: [rank_profile.busy_ms[kind] for rank_profile in rank_profiles] for kind in trace.KINDS}
        busy = map(sum, zip(*phases.values(), strict=True))
        phases["idle"] = [max(0.0, step - used) for step, used in zip(step_ms, busy, strict=True)]
    else:
        phases = {
            name: [rank_profile.host_ms[place] for rank_profile in rank_profiles] for place, name in enumerate(PHASES)
        }
    return Profile(
        run_dir=str(folder.path),
        device=device,
        steps=steps,
        hosts=[rank_profile.host for rank_profile in rank_profiles],
        step_ms=step_ms,
        phase_ms=phases,
        data_ms=[rank_profile.host_ms[DATA] for rank_profile in rank_profiles],
        last_in=last_in([rank_profile.own_ms for rank_profile in rank_profiles]) if device == "cpu" else [],
        operators=operators_in(rank_profiles, steps, device),
        traces=[str(folder.trace(rank)) for rank in range(len(rank_profiles))],
        setting=setting,
    )


def last_in(own_ms: list[list[float]]) -> list[float]:
    """The share of steps in which each rank took longest, from its milliseconds for each step."""
    last = [max(range(len(step)), key=step.__getitem__) for step in zip(*own_ms, strict=True)]
    return [last.count(rank) / len(last) for rank in range(len(own_ms))]


def operators_in(rank_profiles: list[RankProfile], steps: int, device: str) -> list[Operator]:
    """The operators with the longest times, as means over ranks and steps; on a CPU, relative to traced steps."""
    count = steps * len(rank_profiles)
    whole = sum(
        rank_profile.traced_ms if device == "cpu" else rank_profile.step_ms for rank_profile in rank_profiles
    ) / len(rank_profiles)
    us: dict[str, float] = {}
    calls: dict[str, int] = {}
    for rank_profile in rank_profiles:
        for name, cost in rank_profile.costs.items():
            us[name] = us.get(name, 0.0) + cost.us
            calls[name] = calls.get(name, 0) + cost.calls
    dearest = sorted(us, key=us.__getitem__, reverse=True)[:MOST_OPERATORS]
    return [Operator(name, (ms := us[name] / 1e3 / count), calls[name] / count, ms / whole) for name in dearest]


def setting_of(stepper: Stepper, world: World) -> StepSettings:
    """The settings of the run that affect its time."""
    config = stepper.settings
    optimizer, dataset = stepper.optimizer, stepper.feed.dataset
    return StepSettings(
        workers=config.workers,
        batch_size=config.batch_size,
        lanes=config.lanes,
        threads=torch.get_num_threads(),
        cores=usable_cores(),
        ranks_here=min(ranks_here(), world.size),
        backend=world.backend,
        precision=config.precision,
        has_bf16=resolve_precision("auto", world.device) == "bf16",
        step_mode=config.step_mode,
        is_replayed=stepper.graph is not None and not stepper.graph.is_given_up,
        has_rows=stepper.feed.rows is not None,
        is_tensors=config.collate_fn is None and as_row_dataset(dataset) is not dataset,
        is_stream=is_stream(dataset),
        is_exact=config.exact,
        compression=config.compression,
        is_fused=all(group.get("fused") for group in optimizer.param_groups),
        could_fuse="fused" in optimizer.defaults,
        log_every_steps=config.log.every_steps,
        check_replicas_every=config.check_replicas_every,
        log_digests=config.log.digests,
    )
