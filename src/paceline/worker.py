"""What happens inside one rank, in order: read it to know the system.

A rank is a command, `python -m paceline.worker JOB STORE PARENT`, so the user's script is never imported again.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from paceline import failure, job, result
from paceline.config import Config
from paceline.data import batches
from paceline.data.loader import LaneSampler, evaluation_loader, lane_loader
from paceline.data.sources import make_datasets
from paceline.evaluate import Evaluator
from paceline.lifeline import die_with_parent
from paceline.loop import Fit, Plan, fit
from paceline.optim import lr_at, make_optimizer
from paceline.own_loop import run_own_loop
from paceline.progress import Progress
from paceline.randomness import seed_generators
from paceline.replica import Replica, Single, make_model, replicate
from paceline.run_folder import RunFolder
from paceline.step import Stepper
from paceline.telemetry.events import Events
from paceline.telemetry.lines import failed_line, warning_line
from paceline.world import World, join


def main() -> None:
    """One rank of a local run: load the job, join the others, do it; leave a failure where the launcher looks."""
    job_path, store, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    rank = int(os.environ["RANK"])
    warnings.showwarning = _show_with_rank(rank)
    folder, progress = RunFolder(job_path.parent), Progress()
    try:
        config, task = job.load(job_path)
        with join(config, store) as world:
            task(config, folder, world, progress)
    except BaseException as error:  # noqa: BLE001 - also sys.exit and Ctrl-C: whatever ends a rank is told
        failure.write(failure.capture(error, rank=rank, progress=progress, folder=folder), folder)
        print(failed_line(rank), file=sys.stderr)
        traceback.print_exc()
        _end(1)  # without what the program left for its end, which could wait for neighbours that wait for this rank
    # What Python does at its end: wait for threads, then run what libraries have left to be done.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _end(0)


def _end(code: int) -> NoReturn:
    """End the process at once: the end of the interpreter is where threads of process groups abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Build everything and train; rank 0 writes the result. All ranks."""
    lanes = config.lanes or world.size
    ridden = batches.lanes_of(world.rank, world.size, lanes)
    events = Events(folder.events if world.is_main else None)
    events.write(
        "run_started", name=config.name, run_dir=str(folder.path), seed=config.seed, world_size=world.size,
        lanes=lanes, device=world.device.type, backend=world.backend,
    )  # fmt: skip

    progress.phase = "building the data set"
    seed_generators(config.seed, "data set")
    training, validation = make_datasets(config)

    progress.phase = "building the model"
    seed_generators(config.seed, "model")
    replica = replicate(make_model(config), config, world)

    value, outcome, stepper = None, Fit(), None
    if config.train_fn is None:
        say_if_bits_differ(config, world, events)
        stepper, total_steps = build_stepper(config, replica, len(training), lanes, ridden, world)
    if stepper is None:
        began = time.perf_counter()
        value = run_own_loop(config, replica, training, validation, world, events, progress)
        outcome.seconds = time.perf_counter() - began
    else:
        outcome = run_managed_loop(config, stepper, training, validation, total_steps, ridden, world, events, progress)

    progress.phase = "writing the result"
    replica.share_buffers()
    if world.is_main:
        result.write(
            folder, replica.module, stepper.ema if stepper else None, stepper.optimizer if stepper else None, value,
            metrics=outcome.metrics, history=outcome.history, step=progress.step or 0,
            epoch=(progress.epoch or 0) + 1, world_size=world.size, lanes=lanes,
            seconds=round(outcome.seconds, 3), samples=progress.samples,
        )  # fmt: skip
    events.write("run_finished", step=progress.step, epoch=progress.epoch, metrics=outcome.metrics)
    events.close()


def say_if_bits_differ(config: Config, world: World, events: Events) -> None:
    """One line if this number of ranks cannot give the bits that others give."""
    if config.exact and world.size & (world.size - 1):
        events.write(
            "warning",
            text=f"{world.size} ranks add up in an order of their own: the weights agree with other numbers of ranks "
            "to rounding, not to the last bit; a power of two keeps the bits",
        )


def build_stepper(
    config: Config, replica: Replica | Single, size: int, lanes: int, ridden: range, world: World
) -> tuple[Stepper, int]:
    """The step with its optimizer, and how many steps the run has. All ranks."""
    total = batches.steps_per_epoch(size, config.batch_size, lanes) * config.num_epochs
    total = min(total, config.max_steps or total)
    stepper = Stepper(
        replica,
        make_optimizer(config, replica.module),
        config,
        lr_factor=lambda step: lr_at(step, 1.0, config.schedule, total),
        lanes_per_rank=len(ridden),
        world=world,
    )
    return stepper, total


def run_managed_loop(
    config: Config,
    stepper: Stepper,
    training: Any,
    validation: Any | None,
    total_steps: int,
    ridden: range,
    world: World,
    events: Events,
    progress: Progress,
) -> Fit:
    """Wire the loaders and the evaluation into the managed loop. All ranks."""
    lanes = len(ridden) * world.size
    shared: dict[str, Any] = {"seed": config.seed, "workers": config.workers, "world": world}
    sampler = LaneSampler(
        seed=config.seed,
        size=len(training),
        batch_size=config.batch_size,
        lanes=lanes,
        steps=range(total_steps),
        ridden=ridden,
    )
    evaluator = None
    if validation is not None:
        loader = evaluation_loader(validation, batch_size=config.batch_size, **shared)
        evaluator = Evaluator(loader, config, world)
    plan = Plan(
        steps_per_epoch=batches.steps_per_epoch(len(training), config.batch_size, lanes),
        total_steps=total_steps,
        log_every_steps=config.log.every_steps,
        check_replicas_every=config.check_replicas_every,
        log_digests=config.log.digests,
    )
    return fit(stepper, lane_loader(training, sampler, **shared), evaluator, plan, world, events, progress)


def _show_with_rank(rank: int) -> Callable[..., None]:
    """Warnings as one line each, in a form that the launcher finds in the logs."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        print(
            warning_line(rank, f"{category.__name__}: {message} ({filename}:{lineno})"),
            file=sys.stderr,
            flush=True,
        )

    return show


if __name__ == "__main__":
    main()
