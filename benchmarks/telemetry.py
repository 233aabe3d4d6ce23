"""What it costs to tell how a run is doing: the same training with and without, in turns.

    python benchmarks/telemetry.py [--turns 5] [--procs 1 2]

With: phases of every step, log points with memory and stragglers, events, TensorBoard, the screen, as a user has them
by default. Without: none of it, only the loss of each step is summed. The last column is what the rank itself spends
on it, timed call by call; on a noisy machine it says more than the difference of two runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import Trainer
from paceline.clock import DATA, Clock
from paceline.loop import LossRecord
from paceline.telemetry.events import Events

NEVER = 10**9
MODELS = {"64-32-10": 15_000, "784-256-10": 3_000}  # layers, and steps that take a few seconds


def silent(model_fn: Callable[[], nn.Module]) -> nn.Module:
    """Called in each rank: from here on it tells nothing."""
    Clock.enter = lambda self, phase: None  # type: ignore[method-assign]
    Events.write = lambda self, event, **fields: None  # type: ignore[method-assign]
    return model_fn()


def timed(model_fn: Callable[[], nn.Module], note: Path) -> nn.Module:
    """Called in each rank: rank 0 notes how long its log points take, and how long the clock of the phases does."""
    spent = [0.0]
    close = LossRecord._close_window

    def close_window(self: LossRecord, *arguments: Any) -> None:
        began = time.perf_counter()
        close(self, *arguments)
        spent[0] += time.perf_counter() - began
        note.write_text(str(spent[0]))

    if os.environ["RANK"] == "0":
        LossRecord._close_window = close_window  # type: ignore[method-assign]
    return model_fn()


def seconds(model: str, procs: int, folder: Path, way: str) -> float:
    """Of training."""
    width, hidden, classes = map(int, model.split("-"))
    note = folder / "spent"

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    model_fns = {"with": make, "without": lambda: silent(make), "timed": lambda: timed(make, note)}

    def data() -> torch.utils.data.TensorDataset:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(40_960, width, generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randint(0, classes, (40_960,), generator=generator))

    result = Trainer(
        model_fn=model_fns[way], dataset_fn=data, loss_fn=functional.cross_entropy, batch_size=64 // procs,
        num_epochs=NEVER, max_steps=MODELS[model], val_fraction=0, procs=procs, threads=1, resume="never", lanes=procs,
        run_dir=str(folder / "run"), log={"every_steps": NEVER, "tensorboard": False} if way == "without" else {},
    ).start()  # fmt: skip
    return float(note.read_text()) if way == "timed" else float(result.seconds)


def clock_cost(calls: int = 100_000) -> float:
    """Seconds for one phase."""
    clock, began = Clock(torch.device("cpu")), time.perf_counter()
    for _ in range(calls):
        clock.enter(DATA)
    return (time.perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}: medians of {arguments.turns} runs\n")
    print("| model | processes | with, µs a step | without | ratio | spent in the rank |\n|---|---|---|---|---|---|")
    for model in MODELS:
        for procs in arguments.procs:
            measure(model, procs, arguments.turns)


def measure(model: str, procs: int, turns: int) -> None:
    found: dict[str, list[float]] = {"with": [], "without": [], "timed": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for way, times in found.items():
                path = Path(folder) / f"{way}-{turn}"
                path.mkdir()
                times.append(1e6 * seconds(model, procs, path, way) / MODELS[model])
    with_, without, log_points = (statistics.median(times) for times in found.values())
    ratio = statistics.median(a / b for a, b in zip(found["with"], found["without"], strict=True))
    share = (log_points + 6 * 1e6 * clock_cost()) / without
    print(f"| {model} | {procs} | {with_:,.0f} | {without:,.0f} | {ratio:.3f} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
