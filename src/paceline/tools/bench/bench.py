"""The benchmark: measures each loop in several rounds, and compares the medians."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch

import paceline
from paceline.errors import ConfigError, PacelineError
from paceline.system.cores import usable_cores
from paceline.tools.bench.contenders import CONTENDERS
from paceline.tools.bench.models import WORKLOADS
from paceline.tools.bench.processes import LEAST_WINDOWS, jobs_of, run_jobs
from paceline.tools.bench.worker import BenchJob

DEVICES = ("auto", "cpu", "cuda")
BASE = "hand-written"
SCALED = (BASE, "paceline")


@dataclass(frozen=True)
class BenchPlan:
    """The models and loops to measure, and the numbers of processes and rounds."""

    models: Sequence[str] = tuple(WORKLOADS)
    contenders: Sequence[str] = ()  # empty for all
    procs: int = 1
    scaling: Sequence[int] = ()  # further numbers of processes, for the loops in SCALED
    steps: int | None = None  # None for the default of the model
    rounds: int = 3
    workers: int = 0
    device: str = "auto"

    def check(self) -> None:
        """Raise one ConfigError with all mistakes."""
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
        problems += [f"--{flag} {n} is too few; use at least {low}" for flag, (n, low) in least.items() if n < low]
        if problems:
            raise ConfigError(problems)


class Cell(NamedTuple):
    """One combination to measure."""

    model: str
    contender: str
    procs: int

    def __str__(self) -> str:
        processes = "process" if self.procs == 1 else "processes"
        return f"{CONTENDERS[self.contender].title}, {self.procs} {processes}"


@dataclass
class Measurements:
    """The step times of one cell."""

    us_per_step: list[float]  # of each round
    has_ddp: bool = True
    error: str = ""

    @property
    def median(self) -> float | None:
        """The median of the rounds; None after an error."""
        return statistics.median(self.us_per_step) if self.us_per_step and not self.error else None

    def add(self, outcome: Mapping[str, Any]) -> None:
        """Add the outcome of a round."""
        self.error = outcome.get("error", "")
        if not self.error:
            self.us_per_step.append(outcome["us_per_step"])
            self.has_ddp = outcome["has_ddp"]

    @property
    def latest(self) -> str:
        """The outcome of the last round as text."""
        return self.error or f"{self.us_per_step[-1]:,.0f} µs per step"


def bench(
    plan: BenchPlan,
    log: Callable[[str], None],
    run: Callable[[Sequence[BenchJob]], Mapping[str, Any]] = run_jobs,
) -> dict[str, Any]:
    """Run the plan, and return the figures as plain values; `log` is called with a line after each measurement."""
    plan.check()
    device = device_type(plan.device)
    present, missing = _choose_contenders(plan, device, log)
    measured = {cell: Measurements([]) for cell in cells_of(plan, present)}
    turns = [
        cell for _ in range(plan.rounds) for cell in measured
    ]  # alternating the cells spreads noise over all of them
    for turn, cell in enumerate(turns, 1):
        if not measured[cell].error:
            with jobs_of(*cell, plan.steps, plan.workers, device) as jobs:
                measured[cell].add(run(jobs))
            log(f"{turn}/{len(turns)} {cell.model}  {cell}: {measured[cell].latest}")
    if not any(found.us_per_step for found in measured.values()):
        errors = [f"{cell}: {found.error}" for cell, found in measured.items()]
        raise PacelineError("\n".join(["all measurements failed", *errors]))
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
                "rows": ratio_rows(measured, model, plan.procs, present),
                "scaling": scaling_rows(measured, model, plan.scaling, WORKLOADS[model].batch_size),
            }
            for model in plan.models
        ],
    }


def _choose_contenders(plan: BenchPlan, device: str, log: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """The loops that can run here; logs the packages that other loops need."""
    names = plan.contenders or list(CONTENDERS)
    lacks = {name: [p for p in CONTENDERS[name].packages if version_of(p) is None] for name in names}
    missing = list(dict.fromkeys(package for packages in lacks.values() for package in packages))
    for package in missing:
        log(f"not installed: {package} (pip install {package})")
    present = [name for name in lacks if not lacks[name]]
    if device != "cuda" or plan.procs > 1:
        for name in [name for name in present if CONTENDERS[name].needs_one_gpu]:
            present.remove(name)
            if name in plan.contenders:
                log(f"{CONTENDERS[name].title} needs one GPU and one process; skipped")
    return present, missing


def device_type(wanted: str) -> str:
    """cpu or cuda; `auto` is cuda if torch finds a GPU."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU; use --device cpu, or check `nvidia-smi`")
    return "cuda" if has_gpu and wanted != "cpu" else "cpu"


def cells_of(plan: BenchPlan, present: Sequence[str]) -> list[Cell]:
    """The cells to measure in one round, in order, each once (pure)."""
    scaled = [name for name in SCALED if name in present]
    cells = [
        cell
        for model in plan.models
        for cell in (
            *(Cell(model, name, plan.procs) for name in present),
            *(Cell(model, name, procs) for procs in plan.scaling for name in scaled),
        )
    ]
    return list(dict.fromkeys(cells))


def ratio_rows(
    measured: Mapping[Cell, Measurements], model: str, procs: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The step times of one model in each loop, as ratios to the hand-written loop."""
    base = measured.get(Cell(model, BASE, procs), Measurements([])).median
    rows = []
    for name in names:
        found = measured[Cell(model, name, procs)]
        rows.append(
            {
                "contender": name,
                "title": CONTENDERS[name].title,
                "package": CONTENDERS[name].package,
                "version": version_of(CONTENDERS[name].package),
                "us_per_step": found.median,
                "ratio": found.median / base if found.median and base else None,
                "has_ddp": found.has_ddp,
                "rounds": found.us_per_step,
                "error": found.error,
            }
        )
    return rows


def scaling_rows(
    measured: Mapping[Cell, Measurements], model: str, numbers: Sequence[int], batch_size: int
) -> list[dict[str, Any]]:
    """The speed on each number of ranks, relative to the same loop on the fewest ranks (pure)."""
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
    """The machine and the versions with which the figures were measured."""
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
    """The version of a package, or None if it is not installed; Paceline itself can run without being installed."""
    if package == "paceline":
        return paceline.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
