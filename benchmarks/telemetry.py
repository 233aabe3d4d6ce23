"""What logging costs: one training that alternates between logging and no logging.

    python benchmarks/telemetry.py [--turns 30] [--procs 1 2] [--layers 64-32-10 784-256-10]

Logging is what a run does by default: phases of every step, log points with memory and stragglers, events, TensorBoard
and the screen. A run switches it on and off about every second, on all ranks at the same step, so that both have
the same conditions; each round with logging is compared with the rounds without before and after it. The losses
of steps are summed in both. The second ratio is that of the CPU time of rank 0, without the launcher, which reads the
events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import Trainer
from paceline.engine.clock import DeviceClock, PhaseClock
from paceline.observe.events import Events
from paceline.worker.step_log import StepLog

NEVER = 10**9
TRIAL = 2_000  # steps, to find how many take a second


class Switch:
    """Switches logging off and on in this rank, and measures the time of each round."""

    def __init__(self, steps: int, note: Path) -> None:
        self.steps, self.note, self.done, self.is_logging = steps, note, 0, True
        self.us: list[tuple[float, float]] = []  # of a step, and its CPU time; without logging, with, without …
        self.kept = PhaseClock.enter, DeviceClock.enter, StepLog.is_due, Events.write
        add = StepLog.add

        def counted(record: StepLog, *arguments: Any) -> None:
            if self.done and self.done % steps == 0:
                record._clock.discard_sample()
                record.collect()
                self.change()
            add(record, *arguments)
            self.done += 1

        StepLog.add = counted  # type: ignore[method-assign]

    def change(self) -> None:
        """Record the time of this round, and start the other kind."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.done > self.steps:  # the first round is incomplete
            began, used = self.began
            took = time.perf_counter() - began, time.process_time() - used
            self.us.append((1e6 * took[0] / self.steps, 1e6 * took[1] / self.steps))
        if os.environ["RANK"] == "0":
            self.note.write_text(json.dumps(self.us))
        self.is_logging = not self.is_logging
        enter, is_due, write = (lambda *_: None), (lambda *_: False), (lambda *_, **fields: None)
        PhaseClock.enter, DeviceClock.enter, StepLog.is_due, Events.write = (  # type: ignore[method-assign]
            self.kept if self.is_logging else (enter, enter, is_due, write)  # type: ignore[assignment]
        )
        self.began = time.perf_counter(), time.process_time()


def train(layers: str, procs: int, steps: int, folder: Path, turn: int | None = None) -> float:
    """The seconds of training; with `turn`, logging is switched after this number of steps."""
    widths = [int(width) for width in layers.split("-")]

    def model() -> nn.Module:
        if turn is not None:  # called in each rank
            Switch(turn, folder / "note")
        return nn.Sequential(*(part for pair in pairwise(widths) for part in (nn.ReLU(), nn.Linear(*pair))))

    def data() -> torch.utils.data.TensorDataset:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(40_960, widths[0], generator=generator)
        return torch.utils.data.TensorDataset(inputs, torch.randint(0, widths[-1], (40_960,), generator=generator))

    result = Trainer(
        model_fn=model, dataset_fn=data, loss_fn=functional.cross_entropy, batch_size=64 // procs, lanes=procs,
        num_epochs=NEVER, max_steps=steps, val_fraction=0, procs=procs, threads=1, resume="never",
        run_dir=str(folder / ("run" if turn is None else "turns")),
    ).start()  # fmt: skip
    return float(result.seconds)


def measure(layers: str, procs: int, turns: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turn = max(1, round(TRIAL / train(layers, procs, TRIAL, folder)))
        train(layers, procs, turn * (2 * turns + 2), folder, turn)
        wall, used = zip(*json.loads((folder / "note").read_text()), strict=True)
    logging, without = wall[1::2], wall[::2]
    print(
        f"| {layers} | {procs} | {statistics.median(logging):,.0f} | {statistics.median(without):,.0f} "
        f"| {compared(wall)} | {compared(used)} |", flush=True,
    )  # fmt: skip


def compared(us: Sequence[float]) -> str:
    """The ratio of each round with logging to the rounds without before and after it."""
    without, logging = us[::2], us[1::2]
    ratios = [each / ((before + after) / 2) for (before, after), each in zip(pairwise(without), logging, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", nargs="+", default=["64-32-10", "784-256-10"])
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(f"{device}, torch {torch.__version__}: {arguments.turns} turns of about a second each\n")
    print("| layers | processes | logging, µs per step | no logging | ratio (quartiles) | ratio of CPU time |")
    print("|---|---|---|---|---|---|")
    for layers in arguments.layers:
        for procs in arguments.procs:
            measure(layers, procs, arguments.turns)


if __name__ == "__main__":
    main()
