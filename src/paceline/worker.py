"""What happens inside one rank, in order: read it to know the system.

A rank is a command, `python -m paceline.worker JOB STORE PARENT`, so the user's script is never imported again.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from paceline import failure, job, result
from paceline.config import Config
from paceline.data import batches
from paceline.data.loader import LaneSampler, evaluation_loader, lane_loader
from paceline.data.sources import make_datasets
from paceline.evaluate import Evaluator
from paceline.lifeline import die_with_parent
from paceline.loop import Fit, Plan, fit
from paceline.metrics import make_metrics
from paceline.optim import lr_at, make_optimizer
from paceline.own_loop import run_own_loop
from paceline.progress import Progress
from paceline.randomness import seed_generators
from paceline.replica import Replica, make_model, replicate
from paceline.run_folder import RunFolder
from paceline.step import Stepper
from paceline.telemetry.events import Events
from paceline.telemetry.lines import failed_line, warning_line
from paceline.world import World, join


def main() -> None:
    """One rank of a local run: load the job, join the others, train; leave a failure where the launcher looks."""
    job_path, store, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    rank = int(os.environ["RANK"])
    warnings.showwarning = _show_with_rank(rank)
    folder, progress = RunFolder(job_path.parent), Progress()
    try:
        config = job.load(job_path)
        with join(config, store) as world:
            train(config, folder, world, progress)
    except BaseException as error:  # noqa: BLE001 - also sys.exit and Ctrl-C: whatever ends a rank is told
        failure.write(failure.capture(error, rank=rank, progress=progress, folder=folder), folder)
        print(failed_line(rank), file=sys.stderr)
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # at once: an orderly end could wait for neighbours that wait for this rank


def train(config: Config, folder: RunFolder, world: World, progress: Progress) -> Any:
    """Build everything and train; rank 0 writes the result. Returns what `train_fn` returned. All ranks."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
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

    value, outcome = None, Fit()
    if config.train_fn is not None:
        value = run_own_loop(config, replica, training, validation, world, events, progress)
    else:
        outcome = run_managed_loop(config, replica, training, validation, lanes, ridden, world, events, progress)

    progress.phase = "writing the result"
    replica.share_buffers()
    if world.is_main:
        result.write(
            folder, replica.module, value,
            metrics=outcome.metrics, history=outcome.history, step=progress.step or 0,
            epoch=(progress.epoch or 0) + 1, world_size=world.size, lanes=lanes,
        )  # fmt: skip
    events.write("run_finished", step=progress.step, epoch=progress.epoch, metrics=outcome.metrics)
    events.close()
    return value


def run_managed_loop(
    config: Config,
    replica: Replica,
    training: Any,
    validation: Any | None,
    lanes: int,
    ridden: range,
    world: World,
    events: Events,
    progress: Progress,
) -> Fit:
    """Wire the loaders, the optimizer and the evaluation into the managed loop. All ranks."""
    size, seed, loss_fn = len(training), config.seed, config.function("loss_fn")
    per_epoch = batches.steps_per_epoch(size, config.batch_size, lanes)
    total = min(per_epoch * config.num_epochs, config.max_steps or per_epoch * config.num_epochs)
    sampler = LaneSampler(
        seed=seed, size=size, batch_size=config.batch_size, lanes=lanes, steps=range(total), ridden=ridden
    )
    stepper = Stepper(
        replica,
        make_optimizer(config, replica.module),
        loss_fn,
        lr_factor=lambda step: lr_at(step, 1.0, config.schedule, total),
        clip_norm=config.clip_norm,
        lanes_per_rank=len(ridden),
        seed=seed,
        world=world,
    )
    evaluator = None
    if validation is not None:
        loader = evaluation_loader(
            validation, batch_size=config.batch_size, seed=seed, workers=config.workers, world=world
        )
        evaluator = Evaluator(loader, loss_fn, make_metrics(config.metrics), world)
    loader = lane_loader(training, sampler, seed=seed, workers=config.workers, world=world)
    return fit(stepper, loader, evaluator, Plan(per_epoch, total, config.log.every_steps), world, events, progress)


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
