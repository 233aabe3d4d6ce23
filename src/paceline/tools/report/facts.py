"""The facts of a run that a report page shows, read from its run folder. `events.jsonl` may still be written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config import dotted_items, read_yaml
from paceline.formatting import ranks_text
from paceline.observe.events import damage_text, read
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.result_file import ResultFile, read_result
from paceline.tools.report.history import Attempt, RunHistory, TimelineMark
from paceline.tools.report.phases import Phases
from paceline.tools.report.planned import Planned, planned_of
from paceline.tools.report.thin import Heat, Point, heat_of, stretches, thinned

# Limits that keep the page small; limits with ALL apply to all runs of a page together.
CURVE_POINTS, ALL_CURVE_POINTS = 2_000, 12_000
HEAT_COLUMNS, ALL_HEAT_CELLS = 300, 40_000
MARKS = 200  # the number of checkpoints, and of all other kinds together


@dataclass
class Curve:
    """One number over the run, with a point for a step or an epoch; the three lists have one length."""

    per: str  # step or epoch
    step: list[int]
    seconds: list[float]
    value: list[float]


@dataclass
class RunFacts:
    """The facts about one run that a page shows."""

    name: str
    label: str  # unique among the runs of a page
    state: str
    began: float | None
    seconds: float
    step: int
    ranks: int
    curves: dict[str, Curve]
    heat: Heat | None
    phases: Phases | None
    attempts: list[Attempt]
    marks: list[TimelineMark]
    metrics: dict[str, Any]
    samples_per_s: float | None
    memory_mb: float | None
    weights_sha256: str | None
    about: list[tuple[str, str]]
    config: str
    settings: dict[str, Any]  # the config with keys such as `optimizer.lr`
    planned: Planned | None = None  # the comparison with `paceline plan`, if there is a plan


def facts_of_all(paths: Sequence[Path], points: int = CURVE_POINTS) -> list[RunFacts]:
    """The facts of runs, each once, with labels that tell them apart and at most `points` points of a curve."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    top = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    points = max(100, min(points, ALL_CURVE_POINTS // len(paths)))
    cells = ALL_HEAT_CELLS // len(paths)
    labels = [str(path.relative_to(top)) if path != top else path.name for path in paths]
    return [facts_of(RunFolder(path), label, points, cells) for path, label in zip(paths, labels, strict=True)]


def facts_of(folder: RunFolder, label: str, points: int = CURVE_POINTS, cells: int = ALL_HEAT_CELLS) -> RunFacts:
    """The facts of one run, with at most `points` points of a curve and `cells` cells of step times."""
    history, damaged = RunHistory(), list[int]()
    for event in read(folder.events, damaged) if folder.events.exists() else ():
        history.add(event)
    result = read_result(folder.result)
    settings = dict(dotted_items(read_yaml(folder.config))) if folder.config.exists() else {}
    state = history.ending or _state_without_ending(folder, history)
    ranks = max((1, *(len(times.ms) for times in history.times)))
    speeds = history.points.get("samples_per_s", [])
    samples_per_s = median(point.value for point in speeds) if speeds else None
    world_size = history.started.get("world_size", ranks)
    memory = history.points.get("memory_mb", [])
    return RunFacts(
        name=history.started.get("name", folder.path.name),
        label=label,
        state=state,
        began=history.began,
        seconds=history.seconds,
        step=history.step,
        ranks=world_size,
        curves={name: _curve(history.per[name], thinned(all_, points)) for name, all_ in history.points.items()},
        heat=heat_of(history.times, max(20, min(HEAT_COLUMNS, cells // ranks))) if history.times else None,
        phases=history.phases.mean(),
        attempts=history.attempts,
        marks=_thinned_marks(history.marks),
        metrics=(result.metrics if result is not None else {}) or history.metrics,
        samples_per_s=samples_per_s,
        memory_mb=max(point.value for point in memory) if memory else None,
        weights_sha256=result.weights_sha256 if result is not None else None,
        about=[*_about(folder, history, result, state), *([("damage", damage_text(damaged))] if damaged else [])],
        config=folder.config.read_text(encoding="utf-8") if settings else "",
        settings=settings,
        planned=planned_of(
            folder.path, settings, world_size, history.started.get("lanes", world_size), samples_per_s,
            history.seconds if state == "finished" else None,
        ),
    )  # fmt: skip


def _curve(per: str, points: Sequence[Point]) -> Curve:
    step, seconds, value = (list(column) for column in zip(*points, strict=True))
    return Curve(per, step, seconds, value)


def _thinned_marks(marks: Sequence[TimelineMark]) -> list[TimelineMark]:
    saved = [mark for mark in marks if mark.kind == "checkpoint"]
    others = [mark for mark in marks if mark.kind != "checkpoint"][-MARKS:]
    return sorted([*(part[-1] for part in stretches(saved, MARKS)), *others], key=lambda mark: mark.seconds)


def _state_without_ending(folder: RunFolder, history: RunHistory) -> str:
    """The state of a run whose events do not report an end."""
    return "running" if is_locked(folder) else "ended early" if history.attempts else "not started"


def _about(folder: RunFolder, history: RunHistory, result: ResultFile | None, state: str) -> Iterator[tuple[str, str]]:
    """The rows of the table "Run details"."""
    started = history.started
    if folder.fetched.exists():
        yield "mirror", folder.fetched.read_text(encoding="utf-8").strip()
    else:
        yield "run folder", str(folder.path)
    yield "state", f"{state}, step {history.step:,}"
    if history.began is not None:
        yield "began", datetime.fromtimestamp(history.began).isoformat(" ", "seconds")
    if started:
        ranks = ranks_text(started["world_size"])
        yield "ranks", f"{ranks} on {started['device']} ({started['backend']}), lanes {started['lanes']}"
        yield "seed", str(started["seed"])
    if commit := started.get("commit"):
        yield "commit", f"{commit.replace('-dirty', '')}{', with changes' if commit.endswith('-dirty') else ''}"
    if machine := started.get("machine"):
        words = (machine["host"], machine["system"], f"{machine['cores']} cores", machine["gpu"])
        yield "machine", ", ".join(word for word in words if word)
    if versions := started.get("versions") or (result.versions if result is not None else {}):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if result is not None:
        held = f", {history.held_s:.3g} s paused for checkpoints" if history.held_s else ""
        yield "time", f"{history.seconds:,.1f} s, {result.seconds:,.1f} s of it in training steps{held}"
        yield "samples", f"{result.samples:,}"
    yield from _lineage(history.attempts)
    for name in ("weights", "ema", "optimizer"):
        if digest := getattr(result, f"{name}_sha256", None):
            yield f"{name} sha256", digest


def _lineage(attempts: Sequence[Attempt]) -> Iterator[tuple[str, str]]:
    """The checkpoint from which the run started, and each later start of its ranks."""
    if attempts and attempts[0].source:
        yield "lineage", f"started from {attempts[0].source}, step {attempts[0].step:,}"
    later = [f"from step {attempt.step:,} on {attempt.ranks}" for attempt in attempts[1:]]
    if later:
        yield "starts", f"{len(attempts)}: {attempts[0].ranks} ranks at first, then {'; '.join(later[-8:])}"
