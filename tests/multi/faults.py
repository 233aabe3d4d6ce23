"""Data sets that disturb the run they belong to, at a moment that does not depend on time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from exactness_cases import ADAMW, ODD, Images, conv_net
from torch.nn import functional

from paceline import Trainer
from paceline.errors import Stopped

INDEX = 5  # the sample whose fetching is counted: once an epoch


def count(path: Path) -> int:
    """Adds one to a number that survives every process, and gives it."""
    with path.open("ab", buffering=0) as file:
        file.write(b"x")
        return file.tell()


class Disturbed(Images):
    """Acts when sample INDEX is fetched for the first, second … time, over all attempts of the run."""

    def __init__(
        self, log: Path, visits: Sequence[int], act: Callable[[], None], size: int = ODD, augment: bool = True
    ) -> None:
        super().__init__(size, augment)
        self.log, self.visits, self.act = log, visits, act

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == INDEX and count(self.log) in self.visits:
            self.act()
        return super().__getitem__(index)


def send(number: signal.Signals, launcher: int) -> Callable[[], None]:
    """A request that has to be passed on, and has been when the sample is there."""

    def act() -> None:
        os.kill(launcher, number)
        time.sleep(1)

    return act


def send_self(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def options(**changes: Any) -> dict[str, Any]:
    """A run with everything that a checkpoint must hold: BatchNorm, dropout, averages, AdamW, a schedule, bf16."""
    defaults: dict[str, Any] = {
        "model_fn": conv_net, "dataset_fn": lambda: Images(ODD, augment=True), "val_dataset_fn": lambda: Images(61),
        "loss_fn": functional.cross_entropy, "metrics": ["accuracy"], "optimizer": ADAMW, "ema": 0.8,
        "schedule": {"name": "cosine", "warmup_steps": 3}, "precision": "bf16", "batch_size": 3, "lanes": 4,
        "num_epochs": 3, "threads": 1, "log": {"every_steps": 2}, "check_replicas_every": 5, "run_dir": "run",
        "procs": 1,
    }  # fmt: skip
    return {**defaults, **changes}


def start(**changes: Any) -> Any:
    return Trainer(**options(**changes)).start()


def stop_step(**changes: Any) -> int:
    """Starts a run that is stopped on request, and gives the step at which it was."""
    try:
        start(**changes)
    except Stopped:
        return int(json.loads(Path("run/logs/stopped.json").read_text())["step"])
    raise AssertionError("the run was not stopped")


def outcome(result: Any) -> dict[str, Any]:
    """What must be equal."""
    return {
        "weights": result.weights_sha256, "ema": result.ema_sha256, "optimizer": result.optimizer_sha256,
        "history": result.history, "metrics": result.metrics, "step": result.step, "samples": result.samples,
        "losses": [(event["step"], event["loss"]) for event in events("step", result.run_dir)],
    }  # fmt: skip


def events(kind: str, run_dir: Path | str = "run") -> list[dict[str, Any]]:
    lines = (Path(run_dir) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, filter(None, lines)) if event["event"] == kind]


def saved_steps(run_dir: Path | str = "run") -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(run_dir, "checkpoints").glob("step-*"))
