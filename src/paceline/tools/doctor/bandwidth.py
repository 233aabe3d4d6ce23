"""How fast the ranks of a run add up tensors: a task for the launcher, as training is."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from paceline import launch
from paceline.config import Config, Log
from paceline.observe.progress import Progress
from paceline.run.layout import RunFolder
from paceline.run.outcome import write_value
from paceline.world import World

SIZE = 16_000_000  # bytes, near a bucket of gradients
WARM_UPS, ROUNDS = 2, 10


def measure(config: Config, ranks: int, run_dir: Path) -> float:
    """Seconds for one all-reduce of SIZE bytes among so many ranks, on the device and backend of a config."""
    # Without the config's functions and data: nothing of them is needed.
    bare = Config(
        run_dir=run_dir, launcher="local", procs=ranks, device=config.device, backend=config.backend, max_restarts=0,
        log=Log(tensorboard=False),
    )  # fmt: skip
    seconds: float = launch.start(bare, time_reduction, config.folder or Path()).load_value()
    return seconds


def time_reduction(config: Config, folder: RunFolder, world: World, progress: Progress) -> None:
    """Leave the seconds of one all-reduce, by the clock of the slowest rank, as the job's value. All ranks."""
    progress.phase = "measuring the all-reduce"
    tensor = torch.zeros(SIZE // 4, device=world.device)
    _reduce(tensor, WARM_UPS)
    began = time.perf_counter()
    _reduce(tensor, ROUNDS)
    mine = torch.tensor((time.perf_counter() - began) / ROUNDS, device=world.device)
    slowest = max(float(seconds) for seconds in world.gather_equal(mine))
    if world.is_main:
        write_value(folder, slowest)


def _reduce(tensor: torch.Tensor, rounds: int) -> None:
    """All ranks."""
    for _ in range(rounds):
        dist.all_reduce(tensor)
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
