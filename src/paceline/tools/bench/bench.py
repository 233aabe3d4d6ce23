"""Starts the contenders in turn, each in fresh processes, several rounds of them, and compares the medians."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

import paceline
from paceline.errors import ConfigError, PacelineError
from paceline.system.cores import chosen_threads, usable_cores
from paceline.tools.bench.contenders import CONTENDERS
from paceline.tools.bench.models import WORKLOADS
from paceline.tools.bench.worker import Job
from paceline.world import pick_device

DEVICES = ("auto", "cpu", "cuda")
BASE = "hand-written"
SCALED = (BASE, "paceline")
LONGEST_WINDOW = 400  # steps
LEAST_WINDOWS = 5
LIMIT_S = 900.0  # for one contender in one round
POLL_S = 0.05


@dataclass(frozen=True)
class Plan:
    """What to compare, on how many processes, how often."""

    models: Sequence[str] = tuple(WORKLOADS)
    contenders: Sequence[str] = ()  # all
    procs: int = 1
    scaling: Sequence[int] = ()
    steps: int | None = None  # as many as the model says
    rounds: int = 3
    workers: int = 0
    device: str = "auto"

    def check(self) -> None:
        """Raises one ConfigError with every mistake."""
        problems = [
            f"--{flag} {name} is not known; use {', '.join(known)}"
            for flag, names, known in (
                ("models", self.models, WORKLOADS),
                ("only", self.contenders, CONTENDERS),
                ("device", [self.device], DEVICES),
            )
            for name in names
            if name not in known
        ]
        least = {"procs": (self.procs, 1), "rounds": (self.rounds, 1), "workers": (self.workers, 0)}
        least["steps"] = (LEAST_WINDOWS if self.steps is None else self.steps, LEAST_WINDOWS)
        least["scaling"] = (min(self.scaling, default=1), 1)
        problems += [f"--{flag} {n} is too few; use {low} or more" for flag, (n, low) in least.items() if n < low]
        if problems:
            raise ConfigError(problems)


class Cell(NamedTuple):
    """What one measurement is of."""

    model: str
    contender: str
    procs: int


@dataclass
class Measured:
    """What the rounds gave for one cell."""

    us_per_step: list[float]  # of each round
    has_ddp: bool = True
    error: str = ""

    @property
    def median(self) -> float | None:
        """The figure that counts; None if there is none."""
        return statistics.median(self.us_per_step) if self.us_per_step and not self.error else None


def bench(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all that the plan names, and give it as plain values; `say` takes a line after each measurement."""
    plan.check()
    device = pick_device(plan.device, 0).type
    versions = {name: version_of(CONTENDERS[name].package) for name in plan.contenders or CONTENDERS}
    lacks = {name: [p for p in CONTENDERS[name].packages if version_of(p) is None] for name in versions}
    missing = list(dict.fromkeys(package for packages in lacks.values() for package in packages))
    for package in missing:
        say(f"not installed: {package} (pip install {package})")
    present = [name for name in versions if not lacks[name]]
    if device != "cuda" or plan.procs > 1:
        for name in [name for name in present if CONTENDERS[name].wants_one_gpu]:
            present.remove(name)
            if name in plan.contenders:
                say(f"{CONTENDERS[name].title} needs one GPU and one process; it is left out")
    cells = list(dict.fromkeys(cells_of(plan, present)))
    measured = {cell: Measured([]) for cell in cells}
    turns = [cell for _ in range(plan.rounds) for cell in cells]
    for turn, cell in enumerate(turns, 1):
        if not measured[cell].error:
            _measure(cell, plan, device, measured[cell])
            say(f"{turn}/{len(turns)} {cell.model}  {describe(cell)}: {_news(measured[cell])}")
    if not any(found.us_per_step for found in measured.values()):
        errors = [f"{describe(cell)}: {found.error}" for cell, found in measured.items()]
        raise PacelineError("\n".join(["nothing could be measured", *errors]))
    return {
        "machine": machine(device),
        "rounds": plan.rounds,
        "workers": plan.workers,
        "missing": missing,
        "models": [
            {
                "model": model,
                "title": WORKLOADS[model].title,
                "procs": plan.procs,
                "rows": ratio_rows(measured, model, plan.procs, present, versions),
                "scaling": scaling_rows(measured, model, plan.scaling, WORKLOADS[model].batch_size),
            }
            for model in plan.models
        ],
    }


def cells_of(plan: Plan, present: Sequence[str]) -> list[Cell]:
    """Everything to measure in one round, in order; a cell may be there twice (pure)."""
    scaled = [name for name in SCALED if name in present]
    return [
        cell
        for model in plan.models
        for cell in (
            *(Cell(model, name, plan.procs) for name in present),
            *(Cell(model, name, procs) for procs in plan.scaling for name in scaled),
        )
    ]


def ratio_rows(
    measured: Mapping[Cell, Measured], model: str, procs: int, names: Sequence[str], versions: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """The contenders of one model against the hand-written loop (pure)."""
    base = measured.get(Cell(model, BASE, procs), Measured([])).median
    rows = []
    for name in names:
        found = measured[Cell(model, name, procs)]
        rows.append(
            {
                "contender": name,
                "title": CONTENDERS[name].title,
                "package": CONTENDERS[name].package,
                "version": versions[name],
                "us_per_step": found.median,
                "ratio": found.median / base if found.median and base else None,
                "has_ddp": found.has_ddp,
                "rounds": found.us_per_step,
                "error": found.error,
            }
        )
    return rows


def scaling_rows(
    measured: Mapping[Cell, Measured], model: str, numbers: Sequence[int], batch_size: int
) -> list[dict[str, Any]]:
    """Speed by the number of ranks, against the same loop on the fewest ranks (pure)."""
    rows = []
    for name in SCALED:
        base: tuple[int, float] | None = None
        for procs in sorted(set(numbers)):
            found = measured.get(Cell(model, name, procs))
            if found is None:
                continue
            row = {"contender": name, "title": CONTENDERS[name].title, "procs": procs, "error": found.error}
            if found.median is not None:
                speed = procs * batch_size / found.median * 1e6
                base = base or (procs, speed)
                speed_up = speed / base[1]
                row |= {
                    "samples_per_s": speed,
                    "speed_up": speed_up,
                    "efficiency": speed_up * base[0] / procs,
                    "rounds": found.us_per_step,
                }
            rows.append(row)
    return rows


def machine(device: str) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cores": usable_cores(),
        "architecture": platform.machine(),
        "device": device,
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "gpus": torch.cuda.device_count() if device == "cuda" else 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package; this one may run without being installed."""
    if package == "paceline":
        return paceline.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe(cell: Cell) -> str:
    """A cell in words."""
    return f"{CONTENDERS[cell.contender].title}, {cell.procs} {'process' if cell.procs == 1 else 'processes'}"


def window_of(steps: int, per_epoch: int) -> int:
    """The steps of one window (pure): an epoch is a whole number of them, because its end cuts a window short."""
    longest = min(LONGEST_WINDOW, steps // LEAST_WINDOWS)
    return max((length for length in range(1, longest + 1) if per_epoch % length == 0), default=1)


# --- one measurement ------------------------------------------------------------------------------------------------


def _measure(cell: Cell, plan: Plan, device: str, found: Measured) -> None:
    """Run one contender once, in processes and a folder of its own, and add what it gave to `found`."""
    workload = WORKLOADS[cell.model]
    steps = plan.steps or workload.steps[device]
    window = window_of(steps, -(-workload.samples // (workload.batch_size * cell.procs)))
    threads = chosen_threads(cell.procs)
    ranks = 1 if CONTENDERS[cell.contender].starts_ranks else cell.procs
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        jobs = [
            Job(
                contender=cell.contender, model=cell.model, procs=cell.procs, rank=rank, device=device,
                threads=threads, workers=plan.workers, steps=steps, window=window, folder=folder,
                parent=os.getpid(),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        outcome = _run(jobs)
    found.error = outcome.get("error", "")
    if not found.error:
        found.us_per_step.append(outcome["us_per_step"])
        found.has_ddp = outcome["has_ddp"]


def _run(jobs: Sequence[Job]) -> dict[str, Any]:
    """The outcome of rank 0, or of the first rank that fails."""
    with (Path(jobs[0].folder) / "log.txt").open("wb") as log:
        processes = [_start(job, log) for job in jobs]
        try:
            first = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if first is None:
        return {"error": f"not done after {LIMIT_S:.0f} s"}
    with suppress(OSError):
        outcome: dict[str, Any] = json.loads(jobs[first].outcome.read_text(encoding="utf-8"))
        return outcome
    return {"error": f"rank {first} ended with exit code {processes[first].returncode}"}


def _start(job: Job, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.tools.bench.worker", job.to_json()]
    variables = [f"{name}={value}" for name, value in _environment(job).items()]
    # In a folder of its own: Python would look for modules where the user is, and find a folder such as `datasets`.
    return subprocess.Popen(
        ["env", *variables, *command], cwd=job.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


def _environment(job: Job) -> dict[str, object]:
    """What torchrun would tell a rank, and the same threads for all (launch/local.py)."""
    same: dict[str, object] = {"OMP_NUM_THREADS": job.threads}
    if job.procs > 1:
        same["OMP_WAIT_POLICY"] = "passive"
    if CONTENDERS[job.contender].starts_ranks:
        return same
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return same | {
        "RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.procs, "LOCAL_WORLD_SIZE": job.procs,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,  # never used: the group is there already
        "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback,
    }  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that fails, or 0 when all are done; None when it takes too long."""
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return 0
        time.sleep(POLL_S)
    return None


def _news(found: Measured) -> str:
    return found.error or f"{found.us_per_step[-1]:,.0f} µs a step"
