"""One step of a config on a few ranks of CPU: a task for the launcher, which trains as ever, only very little."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from paceline import launch
from paceline.checkpoint.store import Store, read_manifest
from paceline.config import Checkpoint, Config, Log
from paceline.data.sources import fetch, is_stream, table_of
from paceline.engine.replica import replicate
from paceline.observe.events import read
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.outcome import write_value
from paceline.tools.doctor.checks import Trial
from paceline.worker.build import build_data, build_model, build_settings
from paceline.worker.main import train
from paceline.world import World

SAMPLES = 8  # of a micro-batch, and to validate on
# What belongs to the real run: its hosts, its GPUs, its past and its end.
HERE: dict[str, Any] = {
    "launcher": "local", "nodes": None, "rendezvous": None, "device": "cpu", "backend": "auto", "precision": "auto",
    "step_mode": "eager", "sync_batchnorm": False, "resume": "never", "max_restarts": 0, "time_limit": None,
}  # fmt: skip


def try_step(config: Config, ranks: int, run_dir: Path) -> Trial:
    """Train one step in a run folder of its own, or only build what a loop of the user's own would get."""
    began = time.perf_counter()
    outcome = launch.start(shortened(config, ranks, run_dir), rehearse, config.folder or Path())
    seconds = time.perf_counter() - began
    if config.train_fn is not None:
        return Trial(ranks, seconds, is_own_loop=True)
    folder, facts = RunFolder(outcome.run_dir), outcome.facts
    assert facts is not None
    saved = Store(folder.checkpoints).paths()
    return Trial(
        ranks,
        seconds,
        loss=facts.history[-1].get("train_loss"),
        metrics=tuple(facts.metrics.items()),
        checkpoint=read_manifest(saved[0]).size if saved else None,
        memory=_memory_in(folder),
    )


def shortened(config: Config, ranks: int, run_dir: Path) -> Config:
    """The config of the rehearsal: one step of small micro-batches, one for each rank."""
    length = {"max_steps": 1, "num_epochs": 1, "batch_size": min(config.batch_size, SAMPLES), "lanes": None}
    hands = {"procs": ranks, "run_dir": run_dir, "workers": min(config.workers, 1)}
    quiet = {"log": Log(every_steps=1, tensorboard=False), "checkpoint": Checkpoint(every_minutes=None, keep=1)}
    return config.model_copy(update={**HERE, **length, **hands, **quiet})


def rehearse(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Train on data that is made as the run would make it, with few samples to validate on. All ranks."""
    tables = {"df": table_of(config.df), "val_df": table_of(config.val_df)}
    config = config.model_copy(update=tables)
    training, validation = build_data(config, progress)
    if config.train_fn is not None:
        build(config, training, folder, world, progress)
        return
    few = Subset(validation, range(min(len(validation), SAMPLES))) if validation is not None else None
    made: dict[str, Any] = {"dataset_fn": lambda *table, **arguments: training, "val_df": None}
    made["val_dataset_fn"] = None if few is None else lambda: few
    train(config.model_copy(update=made), folder, world, progress)


def build(config: Config, training: Any, folder: RunFolder, world: World, progress: Progress) -> None:
    """What a loop of the user's own is given: the model in DDP, and samples. All ranks."""
    replicate(build_model(config, progress), build_settings(config, world, channels_last=False), world)
    progress.phase = "fetching a sample"
    next(iter(training)) if is_stream(training) else fetch(training, [0])
    if world.is_main:
        write_value(folder, True)


def _memory_in(folder: RunFolder) -> int | None:
    """Bytes that the rank with the most has held, from the events of a run."""
    used = [max(event["memory_mb"]) for event in read(folder.events) if event["event"] == "pace"]
    return int(1e6 * max(used)) if used else None
