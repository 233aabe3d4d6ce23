"""The tasks of the ranks that are measured: the managed loop without sums over ranks, and sums between two ranks.

Each rank trains by itself, with the reduction hook of DDP, at the same time as the other ranks of a host would: so the
figures include what ranks of one host take from each other, and nothing of a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import Any

import psutil
import torch
import torch.distributed as dist

from paceline.callbacks import Callback, Run
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Store
from paceline.config import Config
from paceline.data.scaler import fit_scalers
from paceline.data.sources import size_of
from paceline.engine.clock import BACKWARD, FORWARD, OPTIMIZER, OTHER, PHASES, REDUCTION
from paceline.engine.reduce import Reduction
from paceline.engine.replica import Replica
from paceline.engine.step import Stepper
from paceline.observe.events import Events
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.outcome import write_value
from paceline.system.cores import usable_cores
from paceline.system.memory import used_on
from paceline.system.shared_sum import MOST_PROCESSES
from paceline.system.signals import Stop
from paceline.tools.plan.facts import Gradient
from paceline.worker.build import build_data, build_inputs, build_loop, build_model, build_step, use_own_stream
from paceline.worker.context import Context, open_context
from paceline.worker.state import LoopPlan, TrainState
from paceline.world import World

LANES = 2  # of each measured rank: their gradients are not rounded, which is measured by itself
LOADER_LANES, LOADER_S = 40, 3.0  # the loaders are measured over this number of lanes, or of seconds
ROUNDS = 5
SMALL, LARGE = 16, 4_000_000  # bytes of the sums between two ranks


@dataclass(frozen=True)
class RankParts:
    """The measurements of one rank, in milliseconds."""

    phase_ms: list[float]  # of a step
    loader_ms: float
    round_ms: float
    round_lane_ms: float
    ready_ms: list[float]  # of each gradient, in the order of the parameters
    memory_bytes: int


def measure(config: Config, folder: RunFolder, world: World, progress: Progress, *, warm_up: int, steps: int) -> None:
    """Write the measured parts of a step, and the sizes of the data, as the value of the job. All ranks."""
    use_own_stream(world)
    config = config.model_copy(update={"lanes": LANES})
    shared = open_context(config, folder, world, progress)
    context = replace(shared, world=replace(world, rank=0, size=1))
    training, validation = build_data(context)
    model = build_model(context)
    fit_scalers(model, training, config.seed, progress, config.collate)
    stepper, plan = build_alone(context, model, training, validation)
    timer = StepTimer(stepper, warm_up, steps, context.events)
    saver = Saver(Store(folder.checkpoints), config.checkpoint, {}, context.world, context.events)
    world.gather_equal(torch.zeros(1, device=world.device))  # the ranks work at the same time
    build_loop(context, stepper, None, plan, saver, Stop(), TrainState(), [timer]).run()
    memory = used_on(world.device)
    progress.phase = "measuring the loaders"
    loader_ms = loader_time_ms(context, stepper, plan)
    world.gather_equal(torch.zeros(1, device=world.device))
    round_ms, more = round_times_ms(stepper, config)
    parts = RankParts(timer.phase_ms(), loader_ms, round_ms, more, timer.ready_ms(), memory)
    gathered = world.gather_objects(parts)
    if world.is_main:
        sizes = {
            "samples": size_of(training),
            "val_samples": (size_of(validation) if validation is not None else None) or 0,
        }
        write_value(folder, {**put_together(gathered, stepper, world), **sizes})
    shared.events.write("run_finished")
    shared.events.close()


def build_alone(
    context: Context, model: torch.nn.Module, training: Any, validation: Any | None
) -> tuple[Stepper, LoopPlan]:
    """The step of a rank that sums over no others, but calls the hook for each bucket of DDP. All ranks."""
    built, plan, _ = build_step(context, model, training, validation, through_ddp=True)
    if isinstance(built.replica, Replica):  # or each step would wait for rank 0, and the model adds these messages
        built.replica.broadcast_buffers = False
    stepper = Stepper(
        built.replica, built.optimizer, built.settings, built.feed, rates=built.rates, world=context.world,
        warn=context.warn, through_ddp=True,
    )  # fmt: skip
    return stepper, plan


def put_together(gathered: list[RankParts], stepper: Stepper, world: World) -> dict[str, Any]:
    """The figures of `Measured` that ranks know, as means over the ranks."""
    phases = [fmean(each) for each in zip(*(parts.phase_ms for parts in gathered), strict=True)]
    ready = [fmean(each) for each in zip(*(parts.ready_ms for parts in gathered), strict=True)]
    device, feed, config = world.device, stepper.feed, stepper.settings
    is_gpu = device.type == "cuda"
    order = sorted(zip(ready, stepper.parameters, strict=True), key=lambda each: each[0])
    state = [t for kept in stepper.optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "backend": world.backend,
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "concurrent": world.size,
        "forward_ms": phases[FORWARD] / LANES,
        "backward_ms": (phases[BACKWARD] + phases[REDUCTION]) / LANES,
        "update_ms": phases[OPTIMIZER],
        "other_ms": phases[OTHER],
        "loader_ms": fmean(parts.loader_ms for parts in gathered),
        "is_loader_ahead": feed.rows is None and config.workers > 0,
        "round_ms": fmean(parts.round_ms for parts in gathered),
        "round_lane_ms": fmean(parts.round_lane_ms for parts in gathered),
        "gradients": [Gradient(p.nbytes, p.element_size(), ms).__dict__ for ms, p in order],
        "has_overlap": stepper.phases[0].backward.hook is not None,
        "buffer_bytes": sum(each.nbytes for each in stepper.replica.forward_state.tensors().values()),
        "optimizer_bytes": sum(tensor.nbytes for tensor in state),
        "memory_bytes": max(parts.memory_bytes for parts in gathered),
        "capacity_bytes": torch.cuda.mem_get_info(device)[1] if is_gpu else psutil.virtual_memory().total,
    }


class StepTimer(Callback):
    """Times the phases of steps after a warm-up, and when backward completes each gradient; then stops the loop."""

    needs_step_metrics = False

    def __init__(self, stepper: Stepper, warm_up: int, steps: int, events: Events) -> None:
        self.device, self.warm_up, self.total, self.events = stepper.world.device, warm_up, warm_up + steps, events
        self._phase, self._marks = OTHER, list[tuple[int, Any]]()
        self._steps: list[list[float]] = []
        self._began: Any = None
        self._ready: dict[int, Any] = {}  # of the last lane
        self._readies: list[list[float]] = []
        self._enter = stepper.clock.enter
        # The parts of the step have references to this clock, so its method is wrapped instead of the clock.
        stepper.clock.enter = self._on_enter  # type: ignore[method-assign]
        self._count = len(stepper.parameters)
        for index, parameter in enumerate(stepper.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            self._ready[index] = self._now()

        return on_gradient

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _on_enter(self, phase: int) -> None:
        now = self._now()
        self._marks.append((phase, now))
        if phase == BACKWARD:
            self._began, self._ready = now, {}
        self._enter(phase)

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        """Keep the times of the step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host runs ahead of the device
        marks = [*self._marks, (OTHER, self._now())]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if run.step_number > self.warm_up and self._began is not None:
            spent = [0.0] * len(PHASES)
            for (phase, begin), (_, end) in pairwise(marks):
                spent[phase] += elapsed_ms(begin, end)
            self._steps.append(spent)
            missing = elapsed_ms(self._began, marks[-1][1])
            ready = [self._ready.get(index) for index in range(self._count)]
            self._readies.append([missing if each is None else elapsed_ms(self._began, each) for each in ready])
        self._marks = [marks[-1]]
        self.events.write_sometimes(
            "progress", epoch=0, phase="measuring", batch=run.step_number - 1, batches=self.total
        )
        if run.step_number == self.total:
            run.stop("the plan")

    def phase_ms(self) -> list[float]:
        """The median milliseconds of each phase of a step."""
        return [median(each) for each in zip(*self._steps, strict=True)]

    def ready_ms(self) -> list[float]:
        """The median milliseconds from the start of backward to each gradient."""
        return [median(each) for each in zip(*self._readies, strict=True)]


def elapsed_ms(begin: Any, end: Any) -> float:
    """Milliseconds between two times of the host, or two events of a GPU that it has reached."""
    return 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))


def loader_time_ms(context: Context, stepper: Stepper, plan: LoopPlan) -> float:
    """The milliseconds to fetch the samples of a lane, while nothing else is computed."""
    spent, count, began = 0.0, 0, time.perf_counter()
    for number, inputs in enumerate(build_inputs(context, stepper, plan, TrainState())(None)):
        for lane in inputs.lanes:
            stepper.feed.inputs(lane, inputs.epoch)
        now = time.perf_counter()
        if number:  # not the start of the loaders
            spent, count = spent + now - began, count + len(inputs.lanes)
        began = now
        if count >= LOADER_LANES or spent > LOADER_S:
            break
    return 1e3 * spent / max(1, count)


def round_times_ms(stepper: Stepper, config: Config) -> tuple[float, float]:
    """The milliseconds in which gradients of a single lane are rounded to integers and back, and of one more lane."""
    if not config.exact:
        return 0.0, 0.0
    like = stepper.parameters
    reduction = Reduction(
        replace(stepper.world, size=1), 3, exact=True, bucket_bytes=stepper.settings.bucket_mb * 2**20
    )
    sums = [torch.zeros_like(parameter) for parameter in like]
    lane = [torch.randn_like(parameter) for parameter in like]

    def time_ms(lanes: int) -> float:
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            reduction.sum_integers(sums, [lane] * lanes, like)
            if like[0].is_cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return median(times)

    with torch.no_grad():
        time_ms(1)  # allocates
        one, three = time_ms(1), time_ms(3)
    return one, max(0.0, (three - one) / 2)


def measure_sums(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Write the seconds of a small and of a large sum over the ranks here as the value of the job. All ranks.

    `library` has those of Gloo or NCCL; `memory` those by which up to `most_ranks` ranks sum gradients through the
    memory of their host, or None.
    """
    context = open_context(config, folder, world, progress)
    library = [time_sum(size, world, dist.all_reduce) for size in (SMALL, LARGE)]
    memory, shared = None, world.shared_sum()
    if shared is not None:
        memory = [time_sum(size, world, lambda tensor: shared.all_reduce(tensor, torch.add)) for size in (SMALL, LARGE)]
    if world.is_main:
        write_value(folder, {"library": library, "memory": memory, "most_ranks": MOST_PROCESSES})
    context.events.write("run_finished")
    context.events.close()


def time_sum(size: int, world: World, all_reduce: Callable[[torch.Tensor], Any]) -> float:
    """The seconds of a sum over all ranks, without those that other programs have delayed. All ranks."""
    tensor = torch.zeros(size // 4, device=world.device)
    times = []
    for _ in range(2 + 3 * ROUNDS):
        began = time.perf_counter()
        all_reduce(tensor)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - began)
    return quantiles(times[2:], n=4)[0]
