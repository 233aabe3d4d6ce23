"""Measures an all-reduce, with a run whose training loop does nothing else."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import Trainer
from paceline.config import Config, build

SIZE = 16_000_000  # bytes, about the size of a gradient bucket
WARM_UPS, ROUNDS = 2, 10


def measure(config: Config, ranks: int, run_dir: Path) -> float:
    """Seconds for one all-reduce of SIZE bytes among `ranks` ranks, on the device and backend of a config."""
    measuring = build(
        {
            "name": "all-reduce", "model_fn": partial(torch.nn.Linear, 1, 1), "dataset_fn": partial(range, ranks),
            "val_fraction": 0, "batch_size": 1, "train_fn": time_all_reduce, "run_dir": run_dir, "launcher": "local",
            "procs": ranks, "device": config.device, "backend": config.backend, "max_restarts": 0,
            "log": {"tensorboard": False},
        }
    )  # fmt: skip
    seconds: float = Trainer.from_config(measuring, config.folder or Path()).start().value
    return seconds


def time_all_reduce(model: Any, train_loader: Any, val_loader: Any, device: torch.device, num_epochs: int) -> float:
    """Seconds for one all-reduce, as measured by the slowest rank. All ranks."""
    tensor = torch.zeros(SIZE // 4, device=device)
    _reduce(tensor, WARM_UPS)
    began = time.perf_counter()
    _reduce(tensor, ROUNDS)
    seconds = torch.tensor((time.perf_counter() - began) / ROUNDS, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _reduce(tensor: torch.Tensor, rounds: int) -> None:
    """All ranks."""
    for _ in range(rounds):
        dist.all_reduce(tensor)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
