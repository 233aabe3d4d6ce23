"""What the hosts train in benchmarks/plan.py, and the callback that changes their links while they do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from shaping import set_link
from torch import nn
from torch.utils.data import TensorDataset

import paceline

TIMED = 5  # steps with each link, after those in which TCP adapts to it
SAMPLES = 100_000


def mlp(width: int, layers: int) -> nn.Module:
    """Layers of `width` × `width` weights: many bytes for little work."""
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*inner, nn.Linear(width, 10))


def vectors(width: int) -> TensorDataset:
    """Random vectors with classes."""
    return TensorDataset(torch.randn(1, width).expand(SAMPLES, width), torch.arange(SAMPLES) % 10)


def convolutions() -> nn.Module:
    """Much work for few bytes."""
    layers = [part for _ in range(4) for part in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def images() -> TensorDataset:
    """Random images with classes."""
    return TensorDataset(torch.randn(1, 3, 32, 32).expand(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 10)


class Sweep(paceline.Callback):
    """Sets one link after the other, and writes the median step time with each."""

    needs_step_metrics = False

    def __init__(self) -> None:
        # {"links": [[rate, delay in µs, steps to settle], …], "spaces": [network namespaces], "delay": file}
        self.plan = json.loads(Path("sweep.json").read_text())
        self.times: list[list[float]] = []
        self.last = self.due = 0.0

    def on_step(self, run: paceline.Run, metrics: Mapping[str, float | None]) -> None:
        """After each step: keep its time, and set the next link when this one was timed."""
        if self.times:
            self.times[-1].append(time.perf_counter() - self.last)
        if run.step_number > self.due:
            if len(self.times) == len(self.plan["links"]):
                if run.is_main:
                    Path("times.json").write_text(json.dumps([median(each[-TIMED:]) for each in self.times]))
                run.stop("all links were timed")
                return
            rate, delay_us, settling = self.plan["links"][len(self.times)]
            self.due = run.step_number + settling + TIMED
            self.times.append([])
            if run.is_main:
                set_link(self.plan["spaces"], self.plan["delay"], rate, delay_us)
        self.last = time.perf_counter()
