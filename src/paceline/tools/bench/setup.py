"""The inputs of every benchmark loop: the model, the data, the device, and a timer that ends the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline.tools.bench.models import Workload


@dataclass
class WindowTimer:
    """Times windows of an equal number of steps."""

    steps: int  # in total, including the warm-up
    window: int
    device: torch.device
    seconds: list[float] = field(default_factory=list)  # of each window
    step: int = 0
    since: float = field(default_factory=time.perf_counter)

    def tick(self) -> bool:
        """Count a step; returns whether it was the last. Waits for the device at the end of a window."""
        self.step += 1
        if self.step % self.window == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            self.seconds.append(now - self.since)
            self.since = now
        return self.step == self.steps


@dataclass
class LoopSetup:
    """The arguments of a loop."""

    workload: Workload
    rank: int
    procs: int
    device: torch.device
    workers: int
    timer: WindowTimer

    def model(self) -> nn.Module:
        """A new model on the CPU, with the same weights each time."""
        torch.manual_seed(0)
        return self.workload.model_fn()

    def adam(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that all loops use."""
        return torch.optim.Adam(model.parameters(), lr=self.workload.lr)

    def loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """A DataLoader with persistent workers, and pinned memory for a GPU."""
        return DataLoader(
            dataset, batch_size=self.workload.batch_size, num_workers=self.workers, persistent_workers=self.workers > 0,
            pin_memory=self.device.type == "cuda", **options,
        )  # fmt: skip
