"""Measures a config on this machine, by short runs in their own run folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from paceline import launch
from paceline.config import Checkpoint, Config, to_plain
from paceline.errors import ConfigError
from paceline.run.job import Task
from paceline.run.lifecycle import new_folder
from paceline.tools.plan.collectives import CollectiveCost, Network, all_reduce
from paceline.tools.plan.facts import Measured, RunKeys
from paceline.tools.plan.links import Link

WARM_UP = 5  # steps, in which kernels are chosen and optimizer states and buckets are created
LOG_EVERY_STEPS = 100
# The keys that belong to the real run: its hosts, its checkpoints, its end, and the order of its samples.
OF_REAL_RUN: dict[str, Any] = {
    "nodes": None, "rendezvous": None, "resume": "never", "max_restarts": 0, "time_limit": None, "curriculum": None,
    "launcher": "local", "global_batch_size": None, "shard_optimizer": False, "callbacks": [], "early_stop": None,
    # Schedules and evaluations that wait for a metric, which is not measured here.
    "scheduler_fn": None, "schedule_fn": None,
}  # fmt: skip


def measure(config: Config, ranks: int, steps: int, parent: Path, folder: Path) -> tuple[Measured, RunKeys]:
    """Measure steps with this number of ranks at work on this machine; run folders are created below `parent`."""
    if config.train_fn is not None:
        raise ConfigError(
            f"train_fn={to_plain(config.train_fn)} is your own loop, whose parts cannot be measured one by one; plan a "
            "config with loss_fn or step_fn"
        )
    short = shortened(config, ranks, WARM_UP + steps + 1)
    task = Task("paceline.tools.plan.task:measure", {"warm_up": WARM_UP, "steps": steps})
    found: dict[str, Any] = start(short, task, parent, folder)
    sizes = {name: found.pop(name) for name in ("samples", "val_samples")}
    local, shared, shared_ranks = Link(0.0, 0.0), Link(0.0, 0.0), 0
    if found["device"] == "cpu" or ranks > 1:
        local, shared, shared_ranks = measure_sums(short, max(2, ranks), found["backend"], parent, folder)
    figures = {
        "loopback_bytes_per_s": local.bytes_per_s, "loopback_latency_s": local.latency_s, "shared_ranks": shared_ranks,
        "shared_bytes_per_s": shared.bytes_per_s, "shared_latency_s": shared.latency_s,
    }  # fmt: skip
    return Measured.from_dict({**found, **figures}), keys_of(config, **sizes)


def measure_sums(config: Config, ranks: int, backend: str, parent: Path, folder: Path) -> tuple[Link, Link, int]:
    """The links for sums between ranks of this machine, by its library and through memory, and the ranks of these."""
    quick = config.model_copy(update={"procs": ranks})
    found = start(quick, Task("paceline.tools.plan.task:measure_sums"), parent, folder)
    small_s, large_s = found["library"]
    local = loopback_of(small_s, large_s, ranks, backend)
    if found["memory"] is None:
        return local, Link(0.0, 0.0), 0
    small_s, large_s = found["memory"]
    return local, loopback_of(small_s, large_s, ranks, is_shared=True), found["most_ranks"]


def loopback_of(small_s: float, large_s: float, ranks: int, backend: str = "gloo", *, is_shared: bool = False) -> Link:
    """The link for which the model takes these times for a small and a large sum (pure)."""
    from paceline.tools.plan.task import LARGE

    def cost(size: float, link: Link) -> CollectiveCost:
        none = Link(math.inf, 0.0)
        return all_reduce(size, Network(ranks, ranks, none, link, backend, link if is_shared else None))

    latencies, sent = cost(1, Link(math.inf, 1.0)).seconds, cost(LARGE, Link(1.0, 0.0)).link_s
    return Link(sent / max(large_s - small_s, large_s / 2), small_s / latencies)


def start(config: Config, task: Task, parent: Path, folder: Path) -> Any:
    """The value of a task, which runs in a new run folder."""
    config = config.model_copy(update={"run_dir": new_folder(None, parent)})
    return launch.start(config, task, folder).load_value()


def shortened(config: Config, ranks: int, steps: int) -> Config:
    """The config of the measured ranks: few steps of two lanes, without checkpoints, trackers and TensorBoard."""
    quiet = {
        "log": config.log.model_copy(update={"every_steps": LOG_EVERY_STEPS, "tensorboard": False, "trackers": []}),
        "checkpoint": Checkpoint(every_minutes=None),
        "schedule": type(config.schedule)(),
        "evaluate": type(config.evaluate)(),
    }
    length = {"max_steps": steps, "num_epochs": steps, "procs": ranks, "lanes": None, "threads": threads_of(config)}
    # The host must see when each gradient is ready, which a CUDA graph does not show.
    mode = {"step_mode": "eager"} if config.step_mode in ("auto", "graph") else {}
    return config.model_copy(update={**OF_REAL_RUN, **length, **quiet, **mode})


def threads_of(config: Config) -> int | None:
    """The threads of an operator in the real run, where they follow from its lanes."""
    from paceline.system.cores import chosen_threads

    if config.threads is not None or config.lanes is None:
        return config.threads
    return chosen_threads(config.lanes)


def keys_of(config: Config, samples: int | None, val_samples: int) -> RunKeys:
    """The keys of the real run."""
    return RunKeys(
        batch_size=config.batch_size,
        lanes=config.lanes,
        samples=samples,
        val_samples=val_samples,
        num_epochs=config.num_epochs,
        max_steps=config.max_steps,
        evaluate_every_steps=config.evaluate.every_steps,
        evaluate_every_epochs=config.evaluate.every_epochs or 1,
        is_exact=config.exact,
        compression=config.compression,
        bucket_mb=config.bucket_mb,
        shards_optimizer=config.shard_optimizer,
        save_every_minutes=config.checkpoint.every_minutes,
        save_every_steps=config.checkpoint.every_steps,
        saves_in_background=config.checkpoint.is_async,
    )
