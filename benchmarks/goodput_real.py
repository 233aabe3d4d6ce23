"""Real runs of two ranks that are killed at random times, against the simulation of `goodput.py`.

The numbers of the simulation come from three short runs: one without saves (the times of steps), one with saves (their
cost), one in which ranks are killed at fixed steps (the time of a restart). The disturbed runs are others. A failure is
a SIGKILL to one of the two ranks; the time from the first step of an attempt to it is drawn from an exponential
distribution, and the simulation gets the same draws.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from goodput import Costs, StepTimes, exponential, simulate

STEPS, EVERY, MTBF_S = 1000, 40, 6.0
WARM_UP = 10  # steps
RUN = """
import os, sys, time
import torch
from torch import nn
from paceline import Callback, Trainer

def model():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 2))

def data():
    x = torch.randn(4096, 512, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(x, (x.mean(1) > 0).long())

class Marks(Callback):
    needs_step_metrics = False
    def __init__(self, path):
        self.path = path
    def on_step(self, run, metrics):
        if run.is_main:
            with open(self.path, "a") as file:
                print(os.getpid(), run.step_number, time.time(), file=file)

every = int(sys.argv[3])
Trainer(
    model, data, loss_fn=nn.functional.cross_entropy, batch_size=64, lanes=2, procs=2, threads=1, device="cpu",
    optimizer="adamw", max_steps=int(sys.argv[2]), num_epochs=1000, val_fraction=0, callbacks=[Marks(sys.argv[4])],
    checkpoint={"every_steps": every or None, "every_minutes": None}, max_restarts=1000, run_dir=sys.argv[1],
).start()
"""


@dataclass(frozen=True)
class Mark:
    """The end of a step."""

    attempt: int
    step: int
    time: float


class RealRun:
    """A run whose steps are followed while it trains."""

    def __init__(self, folder: Path, steps: int, every: int) -> None:
        self.folder, self.path, self.marks = folder, folder.with_suffix(".marks"), list[Mark]()
        script, self.output = folder.with_suffix(".py"), folder.with_suffix(".txt")
        script.write_text(RUN)
        command = [sys.executable, script, folder, steps, every, self.path]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        with self.output.open("w") as file:
            self.launcher = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=environment)

    def follow(self) -> Iterator[list[Mark]]:
        """All steps so far, every few milliseconds until the run has ended."""
        pids: list[int] = []
        while True:
            is_over = self.launcher.poll() is not None
            with suppress(FileNotFoundError):
                lines = self.path.read_text().splitlines(keepends=True)[len(self.marks) :]
                for pid, step, at in (line.split() for line in lines if line.endswith("\n")):
                    if int(pid) not in pids:
                        pids.append(int(pid))
                    self.marks.append(Mark(len(pids) - 1, int(step), float(at)))
            yield self.marks
            if is_over:
                assert self.launcher.returncode == 0, self.output.read_text()[-3000:]
                return
            time.sleep(0.005)

    def kill_rank(self, index: int) -> float:
        """SIGKILL to a rank; returns the time."""
        ranks = [rank for server in psutil.Process(self.launcher.pid).children() for rank in server.children()]
        ranks = sorted((rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE), key=lambda rank: rank.pid)
        os.kill(ranks[index % len(ranks)].pid, signal.SIGKILL)
        return time.time()

    def checkpoints(self) -> list[dict[str, Any]]:
        events = map(json.loads, (self.folder / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["event"] == "checkpoint"]

    def step_times(self) -> list[float]:
        """Seconds between the ends of steps."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [after.time - before.time for before, after in pairs if after.attempt == before.attempt]


def undisturbed(folder: Path, steps: int, every: int) -> RealRun:
    real = RealRun(folder, steps, every)
    for _ in real.follow():
        pass
    return real


def restart_times(folder: Path, kills: int, step_s: float) -> list[float]:
    """Seconds of restarts, with their first steps, which are slower; for kills at the 50th step of an attempt."""
    real, killed_at, found = RealRun(folder, 60 * (kills + 1), 20), list[float](), list[float]()
    for marks in real.follow():
        mine = [mark for mark in marks if mark.attempt == len(killed_at)]  # of the attempt after the last kill
        if len(mine) >= WARM_UP and len(found) < len(killed_at):
            found.append(mine[WARM_UP - 1].time - killed_at[-1] - WARM_UP * step_s)
        if len(mine) >= 50 and len(killed_at) < kills:
            killed_at.append(real.kill_rank(len(killed_at)))
    return found


def disturbed(folder: Path, step_s: float, seed: int) -> tuple[float, int]:
    """The seconds of a run from its first step to its last, and the number of kills."""
    real, kills = RealRun(folder, STEPS, EVERY), 0
    draws = exponential(MTBF_S, np.random.default_rng(seed))
    until = next(draws)
    for marks in real.follow():
        if not marks or marks[-1].attempt < kills or marks[-1].step == STEPS:
            continue  # failures happen while the run trains
        first = next(mark for mark in marks if mark.attempt == kills)
        if time.time() - first.time + step_s >= until:
            real.kill_rank(kills)
            kills, until = kills + 1, next(draws)
    return real.marks[-1].time - real.marks[0].time + step_s, kills


def measure(folder: Path) -> tuple[Costs, list[float]]:
    """The numbers for the simulation."""
    step_times = undisturbed(folder / "steps", 200, 0).step_times()[20:]
    saves = undisturbed(folder / "saves", 200, EVERY).checkpoints()[:-1]  # the last one is waited for
    save_s, publish_s = (statistics.median(save[name] for save in saves) for name in ("cost_s", "seconds"))
    restarts = restart_times(folder / "restarts", 4, statistics.mean(step_times))
    print(f"step {statistics.mean(step_times):.4f} s; a save costs {save_s:.3f} s, published after {publish_s:.2f} s; "
          f"restarts {', '.join(f'{each:.2f}' for each in restarts)} s", flush=True)  # fmt: skip
    return Costs(save_s, publish_s, statistics.median(restarts)), step_times


def main(runs: int, seed: int, out: Path | None) -> None:
    """Measure, run and simulate; print a table of all results in `out`."""
    results = json.loads(out.read_text()) if out is not None and out.exists() else []
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as path:
        folder = Path(path)
        costs, step_times = measure(folder)
        for number in range(runs):
            of_run = seed + number
            steps = StepTimes(step_times, 1, np.random.default_rng(of_run))
            wall_s, kills = disturbed(folder / str(of_run), steps.mean_s, of_run)
            draws = exponential(MTBF_S, np.random.default_rng(of_run))
            simulated = simulate(steps, costs, total=STEPS, every=EVERY, failures=draws, in_restart=False)
            result = {
                "seed": of_run, "wall_s": wall_s, "kills": kills, "costs": asdict(costs),
                "useful_s": simulated.useful_s, "simulated_s": simulated.wall_s, "simulated_kills": simulated.failures,
            }  # fmt: skip
            results.append(result)
            print(json.dumps(result), flush=True)
            if out is not None:
                out.write_text(json.dumps(results))
    print_table(results)


def print_table(results: list[dict[str, Any]]) -> None:
    columns = (
        "seed", "kills", "simulated", "step, s", "a save costs, s", "published after, s", "a restart takes, s",
        "wall time, s", "simulated, s", "ratio", "goodput", "simulated",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in results:
        costs, useful_s, wall_s, simulated_s = (row[name] for name in ("costs", "useful_s", "wall_s", "simulated_s"))
        cells = [
            row["seed"], row["kills"], row["simulated_kills"], f"{useful_s / STEPS:.4f}", f"{costs['save_s']:.3f}",
            f"{costs['publish_s']:.2f}", f"{costs['restart_s']:.2f}", f"{wall_s:.1f}", f"{simulated_s:.1f}",
            f"{simulated_s / wall_s:.2f}", f"{useful_s / wall_s:.0%}", f"{useful_s / simulated_s:.0%}",
        ]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
    walls, simulated = (sum(row[name] for row in results) for name in ("wall_s", "simulated_s"))
    print(f"\nall runs together: ratio {simulated / walls:.3f}")
