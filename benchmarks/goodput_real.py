"""Real runs of two ranks that are killed at random times, against the simulation of `goodput.py`.

The numbers of each simulation come from another run directly before the real one. It is not disturbed at first (the
times of steps, the cost of saves), then its ranks are killed at fixed steps (the time of a restart). In the real run,
the time from the first step of an attempt to a SIGKILL to one of the two ranks is drawn from an exponential
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

from paceline.checkpoint.store import step_of

STEPS, EVERY, MTBF_S = 300, 10, 8.0
UNDISTURBED, KILLS = 105, 4  # steps and kills of the run that is measured
WARM_UP = 5  # steps
# Seconds that a step waits as if a device computed, so that other processes on the cores change little, and the matrix
# products that it computes.
COMPUTING = {False: ("0.1", "0"), True: ("0", "25")}
RUN = """
import os, sys, time
import torch
from torch import nn
from paceline import Callback, Trainer

WAIT_S, PRODUCTS, MATRIX = float(sys.argv[1]), int(sys.argv[2]), torch.ones(512, 512)

def model():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 2))

def data():
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(7))
    return torch.utils.data.TensorDataset(x, (x.mean(1) > 0).long())

def loss(output, target):
    for _ in range(PRODUCTS):
        torch.mm(MATRIX, MATRIX)
    time.sleep(WAIT_S)
    return nn.functional.cross_entropy(output, target)

class Marks(Callback):
    needs_step_metrics = False
    def __init__(self, path):
        self.path = path
    def on_step(self, run, metrics):
        if run.is_main:
            with open(self.path, "a") as file:
                print(os.getpid(), run.step_number, time.time(), file=file)

for line in sys.stdin:  # one process for all runs: only the first one waits for imports
    folder, steps, every = line.split()
    Trainer(
        model, data, loss_fn=loss, batch_size=16, lanes=2, procs=2, threads=1, device="cpu", optimizer="adamw",
        max_steps=int(steps), num_epochs=1000, val_fraction=0, callbacks=[Marks(folder + ".marks")],
        checkpoint={"every_steps": int(every), "every_minutes": None}, max_restarts=1000, run_dir=folder,
    ).start()
    open(folder + ".ended", "w").close()
"""


@dataclass(frozen=True)
class Mark:
    """The end of a step."""

    attempt: int
    step: int
    time: float


class Launcher:
    """A process that starts one run after the other."""

    def __init__(self, folder: Path, *, computes: bool) -> None:
        script, self.output = folder / "run.py", folder / "output.txt"
        script.write_text(RUN)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, script, *COMPUTING[computes]],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                text=True,
            )

    def start(self, folder: Path, steps: int) -> RealRun:
        assert self.process.stdin is not None
        print(folder, steps, EVERY, file=self.process.stdin, flush=True)
        return RealRun(self, folder)

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)


class RealRun:
    """A run whose steps are followed while it trains."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder, self.marks = launcher, folder, list[Mark]()
        self._published = dict[int, float]()  # when the folder of each checkpoint was first seen, by its step

    def follow(self) -> Iterator[list[Mark]]:
        """All steps so far, every few milliseconds until the run has ended."""
        pids, offset = list[int](), 0
        while True:
            is_over = self._folder.with_suffix(".ended").exists()
            for path in self._folder.glob("checkpoints/step-*[0-9]"):
                self._published.setdefault(step_of(path), time.time())
            with suppress(FileNotFoundError), self._folder.with_suffix(".marks").open() as file:
                file.seek(offset)
                for line in file.read().splitlines(keepends=True):
                    if not line.endswith("\n"):
                        break
                    offset += len(line)
                    pid, step, at = line.split()
                    if int(pid) not in pids:
                        pids.append(int(pid))
                    self.marks.append(Mark(len(pids) - 1, int(step), float(at)))
            yield self.marks
            if is_over:
                return
            assert self._launcher.process.poll() is None, self._launcher.output.read_text()[-3000:]
            time.sleep(0.005)

    def kill_rank(self, index: int) -> float:
        """SIGKILL to a rank; returns the time."""
        ranks = [rank for server in psutil.Process(self._launcher.process.pid).children() for rank in server.children()]
        ranks = sorted((rank for rank in ranks if rank.status() != psutil.STATUS_ZOMBIE), key=lambda rank: rank.pid)
        os.kill(ranks[index % len(ranks)].pid, signal.SIGKILL)
        return time.time()

    def saves(self) -> list[tuple[float, float]]:
        """The times at which saves began and at which they could be used, which the loop notices a step later."""
        events = list(map(json.loads, (self._folder / "events.jsonl").read_text().splitlines()))
        began = {event["step"]: event["time"] - event["held_s"] for event in events if event["event"] == "saving"}
        return [(began[step], at) for step, at in sorted(self._published.items()) if step in began]


class OtherLoad:
    """Counts the cores that processes of others use."""

    def __init__(self) -> None:
        self._began, self._others_s = time.monotonic(), self._cpu_of_others_s()

    @staticmethod
    def _cpu_of_others_s() -> float:
        me, cpu = psutil.Process(), psutil.cpu_times()
        own_s = sum(sum(each.cpu_times()[:4]) for each in [me, *me.children(recursive=True)])
        return sum(cpu) - cpu.idle - cpu.iowait - cpu.guest - cpu.guest_nice - own_s

    def cores(self) -> float:
        """The mean since the start; call this while no rank runs."""
        return (self._cpu_of_others_s() - self._others_s) / (time.monotonic() - self._began)


def restart_times(marks: list[Mark], killed_at: list[float], step_s: float) -> list[float]:
    """Seconds from each kill to the next step; the first steps after it are slower, which counts as part of it."""
    found = []
    for attempt, at in enumerate(killed_at, start=1):
        ends = [mark.time for mark in marks if mark.attempt == attempt][:WARM_UP]
        if len(ends) == WARM_UP:
            found.append(ends[-1] - at - WARM_UP * step_s)
    return found


def measure(launcher: Launcher, folder: Path) -> tuple[list[float], Costs, list[float]]:
    """The seconds of steps without a save, the costs, and the seconds of restarts.

    Of a run that is not disturbed for some time; then a rank is killed at each 15th step of an attempt.
    """
    real, killed_at = launcher.start(folder, UNDISTURBED + (KILLS + 1) * EVERY), list[float]()
    for marks in real.follow():
        done = sum(mark.attempt == len(killed_at) for mark in marks)
        if done >= (15 if killed_at else UNDISTURBED) and len(killed_at) < KILLS:
            killed_at.append(real.kill_rank(len(killed_at)))
    saves = [(began, ended) for began, ended in real.saves() if ended < killed_at[0]]
    step_times, saving_times = list[float](), list[float]()
    for before, after in list(zip(real.marks, real.marks[1:], strict=False))[WARM_UP : UNDISTURBED - 1]:
        is_saving = any(began < after.time and before.time < ended for began, ended in saves)
        (saving_times if is_saving else step_times).append(after.time - before.time)
    step_s = statistics.mean(step_times)
    cost_s = max((sum(saving_times) - len(saving_times) * step_s) / len(saves), 0.0)
    restarts_s = restart_times(real.marks, killed_at, step_s)
    published_s = statistics.median(ended - began for began, ended in saves)
    return step_times, Costs(cost_s, published_s, statistics.mean(restarts_s)), restarts_s


def killed_at_random(launcher: Launcher, folder: Path, step_s: float, seed: int) -> tuple[RealRun, list[float]]:
    """A run whose ranks are killed at random times, and the times of the kills."""
    real, killed_at = launcher.start(folder, STEPS), list[float]()
    draws = exponential(MTBF_S, np.random.default_rng(seed))
    until = next(draws)
    first: Mark | None = None  # of the attempt that trains
    for marks in real.follow():
        if not marks or marks[-1].attempt < len(killed_at) or marks[-1].step == STEPS:
            continue  # failures happen while the run trains
        if first is None:
            first = next(mark for mark in marks if mark.attempt == len(killed_at))
        if time.time() - first.time + step_s >= until:
            killed_at.append(real.kill_rank(len(killed_at)))
            first, until = None, next(draws)
    return real, killed_at


def main(runs: int, seed: int, out: Path | None, *, computes: bool) -> None:
    """Measure, run and simulate; print a table of all results in `out`."""
    results = json.loads(out.read_text()) if out is not None and out.exists() else []
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as path:
        launcher = Launcher(Path(path), computes=computes)
        for of_run in range(seed, seed + runs):
            folder = Path(path) / str(of_run)
            folder.mkdir()
            load = OtherLoad()
            step_times, costs, restarts_s = measure(launcher, folder / "measured")
            steps = StepTimes(step_times, 1, np.random.default_rng(of_run))
            loads, load = [load.cores()], OtherLoad()
            real, killed_at = killed_at_random(launcher, folder / "killed", steps.mean_s, of_run)
            loads.append(load.cores())
            draws = exponential(MTBF_S, np.random.default_rng(of_run))
            simulated = simulate(steps, costs, total=STEPS, every=EVERY, failures=draws, in_restart=False)
            result = {
                "seed": of_run, "costs": asdict(costs), "useful_s": simulated.useful_s,
                "wall_s": real.marks[-1].time - real.marks[0].time + steps.mean_s, "simulated_s": simulated.wall_s,
                "kills": len(killed_at), "simulated_kills": simulated.failures,
                "repeated": len(real.marks) - STEPS, "simulated_repeated": simulated.repeated_steps,
                "restarts_s": restart_times(real.marks, killed_at, steps.mean_s),
                "measured_restarts_s": restarts_s, "other_cores": loads,
            }  # fmt: skip
            results.append(result)
            print(json.dumps(result), flush=True)
            if out is not None:
                out.write_text(json.dumps(results))
        launcher.close()
    print_table(results)


def print_table(results: list[dict[str, Any]]) -> None:
    columns = (
        "seed", "step", "a save costs", "published after", "a restart", "cores used by others", "kills",
        "repeated steps", "wall time", "goodput", "ratio",
    )  # fmt: skip
    print(
        "with two numbers in a cell: measured / simulated; the ratio is that of the simulated wall time to the real one"
    )
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in results:
        costs, useful_s, wall_s, simulated_s = (row[name] for name in ("costs", "useful_s", "wall_s", "simulated_s"))
        cells = [
            row["seed"], f"{1000 * useful_s / STEPS:.0f} ms", f"{costs['save_s']:.3f} s",
            f"{costs['publish_s']:.2f} s", f"{costs['restart_s']:.2f} s", f"{row['other_cores'][-1]:.2f}",
            f"{row['kills']} / {row['simulated_kills']}", f"{row['repeated']} / {row['simulated_repeated']}",
            f"{wall_s:.1f} s / {simulated_s:.1f} s", f"{useful_s / wall_s:.1%} / {useful_s / simulated_s:.1%}",
            f"{simulated_s / wall_s:.2f}",
        ]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |")
    walls, simulated = (sum(row[name] for row in results) for name in ("wall_s", "simulated_s"))
    print(f"\nall runs together: ratio {simulated / walls:.3f}")
