"""Rehearses a config: a run of one step with few samples, with a few ranks on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, Subset

from paceline import Trainer
from paceline.config import Checkpoint, Config, Log
from paceline.observe.events import read
from paceline.run.layout import RunFolder
from paceline.tools.doctor.checks import RehearsalResult

SAMPLES = 8  # in a micro-batch, and for validation
# The keys that belong to the real run: its hosts, its GPUs, its checkpoints and its end.
OF_REAL_RUN: dict[str, Any] = {
    "launcher": "local", "nodes": None, "rendezvous": None, "device": "cpu", "backend": "auto", "precision": "auto",
    "step_mode": "eager", "sync_batchnorm": False, "resume": "never", "max_restarts": 0, "time_limit": None,
}  # fmt: skip


def rehearse(config: Config, ranks: int, run_dir: Path) -> RehearsalResult:
    """Train one step in the given run folder; with a `train_fn`, only fetch its first batch."""
    began = time.perf_counter()
    result = Trainer.from_config(shortened(config, ranks, run_dir), config.folder or Path()).start()
    seconds = time.perf_counter() - began
    if config.train_fn is not None:
        return RehearsalResult(ranks, seconds, is_own_loop=True)
    folder = RunFolder(result.run_dir)
    saved = [file.stat().st_size for file in folder.checkpoints.glob("step-*/*")]
    held = [max(event["memory_mb"]) for event in read(folder.events) if event["event"] == "pace"]
    return RehearsalResult(
        ranks,
        seconds,
        loss=result.history[-1].get("train_loss"),
        metrics=tuple(result.metrics.items()),
        checkpoint=sum(saved) if saved else None,
        memory=int(1e6 * max(held)) if held else None,
    )


def shortened(config: Config, ranks: int, run_dir: Path) -> Config:
    """The config of the rehearsal: one step of small micro-batches, one for each rank."""
    batch_size = min(config.batch_size, SAMPLES)
    length = {"max_steps": 1, "num_epochs": 1, "batch_size": batch_size, "lanes": None}
    place = {"procs": ranks, "run_dir": run_dir, "workers": min(config.workers, 1)}
    quiet = {"log": Log(every_steps=1, tensorboard=False), "checkpoint": Checkpoint(every_minutes=None, keep=1)}
    data = {"train_fn": fetch_batch} if config.train_fn is not None else few_samples(config, ranks * batch_size)
    return config.model_copy(update={**OF_REAL_RUN, **length, **place, **quiet, **data})


def few_samples(config: Config, needed: int) -> dict[str, Any]:
    """The keys of a config that make it validate on SAMPLES samples; `needed` are for training."""
    if config.val_dataset_fn is not None:
        return {"val_dataset_fn": partial(few_of, config.function("val_dataset_fn"), SAMPLES)}
    if config.val_df is not None:
        make = partial(config.function("dataset_fn"), **config.dataset_args)
        return {"val_dataset_fn": partial(few_of, make, SAMPLES)}
    if not config.val_fraction:
        return {}
    # The validation data is a fraction of all samples, and only ranks can count them: use a fixed number instead.
    count = needed + SAMPLES
    keys = {"dataset_fn": partial(few_of, config.function("dataset_fn"), count), "val_fraction": SAMPLES / count}
    has_column = config.curriculum is not None and config.curriculum.column is not None  # a number for every sample
    return keys | {"sample_weights": None} | ({"curriculum": None} if has_column else {})


def few_of(make: Callable[..., Any], count: int, *table: Any, **arguments: Any) -> Any:
    """Up to `count` samples of the data set that `make` returns, evenly spaced; an iterable data set is not changed."""
    dataset = make(*table, **arguments)
    is_indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_indexed or isinstance(dataset, IterableDataset):
        return dataset
    return Subset(dataset, range(0, len(dataset), max(1, len(dataset) // count))[:count])


def fetch_batch(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None:
    """The `train_fn` of a rehearsal: fetches the first batch."""
    next(iter(train_loader))
