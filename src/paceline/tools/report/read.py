"""A run folder as plain facts, which a page can be made of. `events.jsonl` is the source; it may still be written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config import read_yaml
from paceline.formatting import ranks_text, size_text
from paceline.observe.event_types import complete
from paceline.observe.events import damage_text, read
from paceline.observe.sinks.sink import NOT_PLOTTED, hparams_in
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.result_file import ResultFile, read_result
from paceline.tools.report.phases import Phases, PhaseSums, own_ms
from paceline.tools.report.thin import Heat, Point, Times, heat_of, stretches, thinned

POINTS = 2_000  # of a curve; with many runs fewer each, so that the page stays small
POINTS_OF_ALL = 12_000
COLUMNS = 300  # of a heat strip
CELLS_OF_ALL = 40_000
MARKS = 200  # of checkpoints on a time line, and as many others


@dataclass
class Curve:
    """One number over the run, a point a step or an epoch; three lists of one length."""

    per: str
    step: list[int]
    seconds: list[float]
    value: list[float]


@dataclass
class Life:
    """From one start of the ranks to their end."""

    start: float  # seconds since the run began
    end: float
    ranks: int
    step: int = 0  # where it began
    source: str = ""  # the checkpoint that it began from


@dataclass
class Mark:
    """Something that happened once."""

    kind: str
    seconds: float
    step: int | None
    text: str


@dataclass
class Facts:
    """What a page says of one run."""

    name: str
    label: str  # which one it is among the runs on the page
    state: str
    began: float | None
    seconds: float
    step: int
    ranks: int
    curves: dict[str, Curve]
    heat: Heat | None
    phases: Phases | None
    lives: list[Life]
    marks: list[Mark]
    metrics: dict[str, Any]
    samples_per_s: float | None
    memory_mb: float | None
    weights_sha256: str | None
    about: list[tuple[str, str]]
    config: str
    settings: dict[str, Any]  # of the config, with dots


def facts_of_all(paths: Sequence[Path]) -> list[Facts]:
    """The facts of runs, each once, with names that tell them apart."""
    paths = list(dict.fromkeys(path.resolve() for path in paths))
    top = Path(os.path.commonpath(paths)) if len(paths) > 1 else paths[0].parent
    points = max(100, min(POINTS, POINTS_OF_ALL // len(paths)))
    cells = CELLS_OF_ALL // len(paths)
    labels = [str(path.relative_to(top)) if path != top else path.name for path in paths]
    return [facts_of(RunFolder(path), label, points, cells) for path, label in zip(paths, labels, strict=True)]


def facts_of(folder: RunFolder, label: str, points: int = POINTS, cells: int = CELLS_OF_ALL) -> Facts:
    """The facts of one run."""
    story = Story()
    damaged: list[int] = []
    for event in read(folder.events, damaged) if folder.events.exists() else ():
        story.take(event)
    result = read_result(folder.result)
    settings = dict(hparams_in(read_yaml(folder.config))) if folder.config.exists() else {}
    state = story.ending or ("running" if _is_running(folder) else "ended early" if story.lives else "not started")
    ranks = max((1, *(len(times.ms) for times in story.times)))
    speeds = story.points.get("samples_per_s", [])
    memory = story.points.get("memory_mb", [])
    return Facts(
        name=story.started.get("name", folder.path.name),
        label=label,
        state=state,
        began=story.began,
        seconds=story.seconds,
        step=story.step,
        ranks=story.started.get("world_size", ranks),
        curves={name: _curve(story.per[name], thinned(all_, points)) for name, all_ in story.points.items()},
        heat=heat_of(story.times, max(20, min(COLUMNS, cells // ranks))) if story.times else None,
        phases=story.phases.mean(),
        lives=story.lives,
        marks=_fewer(story.marks),
        metrics=(result.metrics if result is not None else {}) or story.metrics,
        samples_per_s=median(point.value for point in speeds) if speeds else None,
        memory_mb=max(point.value for point in memory) if memory else None,
        weights_sha256=result.weights_sha256 if result is not None else None,
        about=[*_about(folder, story, result, state), *([("damage", damage_text(damaged))] if damaged else [])],
        config=folder.config.read_text(encoding="utf-8") if settings else "",
        settings=settings,
    )


class Story:
    """The events of a run in their order, and what they add up to."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.seconds = 0.0
        self.step = 0
        self.timed = 0  # the step of the last times
        self.started: dict[str, Any] = {}  # the last event of this kind
        self.ending = ""
        self.points: dict[str, list[Point]] = {}
        self.per: dict[str, str] = {}
        self.times: list[Times] = []
        self.phases = PhaseSums()
        self.lives: list[Life] = []
        self.marks: list[Mark] = []
        self.metrics: dict[str, Any] = {}
        self.held_s = 0.0

    def take(self, event: dict[str, Any]) -> None:
        """One event; kinds that it does not know only say that the run was alive."""
        if self.began is None:
            self.began = event["time"]
        self.seconds = max(self.seconds, round(event["time"] - self.began, 3))  # clocks may be set back
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(complete(event))
        if self.lives and event["event"] != "restarted":  # which the launcher says, between two lives
            self.lives[-1].end = self.seconds

    def _on_run_started(self, event: dict[str, Any]) -> None:
        self.started, self.ending = event, ""
        self.lives.append(Life(self.seconds, self.seconds, event.get("world_size", 1)))

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.step = self.timed = event["step"]
        if self.lives:
            self.lives[-1].step, self.lives[-1].source = event["step"], event["checkpoint"]
        self._mark("resumed", event, "; ".join(event["changes"]))

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self._plot("step", event)
        if "step_ms" in event:  # a `pace`; in version 1 of the events, a `step`
            self._time(event)

    def _on_pace(self, event: dict[str, Any]) -> None:
        self._on_step(event)

    def _time(self, event: dict[str, Any]) -> None:
        """The times of the steps since the last ones, rank by rank."""
        step_ms, phase_ms = event["step_ms"], event.get("phase_ms", {})
        steps, self.timed = max(1, event["step"] - self.timed), event["step"]
        _add(self.times, Times(event["step"], own_ms(step_ms, phase_ms)))
        if phase_ms:
            self.phases.take(steps, step_ms, phase_ms)

    def _on_epoch(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self._plot("epoch", event)
        known = {"event", "time", "epoch", "step", "train_loss"}
        self.metrics = {name: value for name, value in event.items() if name not in known}

    def _on_saving(self, event: dict[str, Any]) -> None:
        self.held_s += event["held_s"]

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self._mark("checkpoint", event, f"{size_text(event['bytes'])} in {event['seconds']} s")

    def _on_restarted(self, event: dict[str, Any]) -> None:
        self._mark("restarted", event, event["text"])

    def _on_straggler(self, event: dict[str, Any]) -> None:
        self._mark("straggler", event, event["text"])

    def _on_warning(self, event: dict[str, Any]) -> None:
        self._mark("warning", event, event["text"])

    def _on_run_stopped(self, event: dict[str, Any]) -> None:
        self.ending = "stopped"
        self._mark("stopped", event, event["reason"])

    def _on_run_finished(self, event: dict[str, Any]) -> None:
        self.ending, self.step = "finished", event.get("step") or self.step
        self._mark("finished", event, "")

    def _mark(self, kind: str, event: dict[str, Any], text: str) -> None:
        self.marks.append(Mark(kind, self.seconds, event.get("step"), text))

    def _plot(self, per: str, event: dict[str, Any]) -> None:
        for name, value in _numbers(event):
            self.per[name] = per
            _add(self.points.setdefault(name, []), Point(event["step"], self.seconds, value))


def _add(points: list[Any], point: Point | Times) -> None:
    """Add a point, and forget those that it says again: a run that went on from an earlier step."""
    while points and points[-1].step >= point.step:
        points.pop()
    points.append(point)


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is drawn of a step or an epoch; of memory, that of the rank with most."""
    for name, value in event.items():
        number = max(value, default=None) if name == "memory_mb" else value
        if name not in (*NOT_PLOTTED, "epoch") and isinstance(number, (int, float)) and math.isfinite(number):
            yield name, number


def _curve(per: str, points: Sequence[Point]) -> Curve:
    step, seconds, value = (list(column) for column in zip(*points, strict=True))
    return Curve(per, step, seconds, value)


def _fewer(marks: Sequence[Mark]) -> list[Mark]:
    saved = [mark for mark in marks if mark.kind == "checkpoint"]
    others = [mark for mark in marks if mark.kind != "checkpoint"][-MARKS:]
    return sorted([*(part[-1] for part in stretches(saved, MARKS)), *others], key=lambda mark: mark.seconds)


def _is_running(folder: RunFolder) -> bool:
    try:
        return is_locked(folder)
    except OSError:  # somebody else's folder, which cannot be asked
        return False


def _about(folder: RunFolder, story: Story, result: ResultFile | None, state: str) -> Iterator[tuple[str, str]]:
    """What ran where, in words."""
    started = story.started
    yield "run folder", str(folder.path)
    yield "state", f"{state}, step {story.step:,}"
    if story.began is not None:
        yield "began", datetime.fromtimestamp(story.began).isoformat(" ", "seconds")
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
        held = f", {story.held_s:.3g} s held for checkpoints" if story.held_s else ""
        yield "time", f"{story.seconds:,.1f} s, {result.seconds:,.1f} s of it in training steps{held}"
        yield "samples", f"{result.samples:,}"
    yield from _lineage(story)
    for name in ("weights", "ema", "optimizer"):
        if digest := getattr(result, f"{name}_sha256", None):
            yield f"{name} sha256", digest


def _lineage(story: Story) -> Iterator[tuple[str, str]]:
    for number, life in enumerate(story.lives):
        if life.source and number == 0:
            yield "lineage", f"began from {life.source}, step {life.step:,}"
    later = [f"from step {life.step:,} on {life.ranks}" for life in story.lives[1:]]
    if later:
        yield "starts", f"{len(story.lives)}: {story.lives[0].ranks} ranks at first, then {'; '.join(later[-8:])}"
