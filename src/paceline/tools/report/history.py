"""The history of a run, computed from its events: curves, step times, attempts, and marks on the time line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.formatting import size_text
from paceline.observe.event_types import complete, values_in
from paceline.tools.report.phases import PhaseSums, own_ms
from paceline.tools.report.thin import Point, StepTimes

NOT_DRAWN = ("event", "time", "step", "steps", "epoch", "epochs")


@dataclass
class Attempt:
    """The time from one start of the ranks to their end."""

    start: float  # seconds since the run began
    end: float
    ranks: int
    step: int = 0  # the step it started at
    source: str = ""  # the checkpoint it started from


@dataclass
class TimelineMark:
    """One event on the time line."""

    kind: str
    seconds: float
    step: int | None
    text: str


class RunHistory:
    """Computes the history of a run from its events, which are added in order."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.seconds = 0.0
        self.step = 0
        self.started: dict[str, Any] = {}  # the last `run_started` event
        self.ending = ""
        self.points: dict[str, list[Point]] = {}
        self.per: dict[str, str] = {}  # for each curve, "step" or "epoch"
        self.times: list[StepTimes] = []
        self.phases = PhaseSums()
        self.attempts: list[Attempt] = []
        self.marks: list[TimelineMark] = []
        self.metrics: dict[str, Any] = {}
        self.held_s = 0.0
        self._last_timed = 0  # the step of the last step times

    def add(self, event: dict[str, Any]) -> None:
        """Add one event. An event of an unknown kind only moves the end of the run."""
        if self.began is None:
            self.began = event["time"]
        self.seconds = max(self.seconds, round(event["time"] - self.began, 3))  # the clock may be set back
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(complete(event))
        if self.attempts and event["event"] != "restarted":  # the launcher writes this event between two attempts
            self.attempts[-1].end = self.seconds

    def _on_run_started(self, event: dict[str, Any]) -> None:
        self.started, self.ending = event, ""
        self.attempts.append(Attempt(self.seconds, self.seconds, event.get("world_size", 1)))

    def _on_resumed(self, event: dict[str, Any]) -> None:
        self.step = self._last_timed = event["step"]
        if self.attempts:
            self.attempts[-1].step, self.attempts[-1].source = event["step"], event["checkpoint"]
        self._mark("resumed", event, "; ".join(event["changes"]))

    def _on_step(self, event: dict[str, Any]) -> None:
        self.step = event["step"]
        self._plot("step", event)
        if "step_ms" in event:  # a `pace` event, or a `step` event of version 1
            self._add_times(event)

    def _on_pace(self, event: dict[str, Any]) -> None:
        self._on_step(event)

    def _add_times(self, event: dict[str, Any]) -> None:
        """Add the times of the steps since the last event with times, for each rank."""
        step_ms, phase_ms = event["step_ms"], event.get("phase_ms", {})
        steps, self._last_timed = max(1, event["step"] - self._last_timed), event["step"]
        _append(self.times, StepTimes(event["step"], own_ms(step_ms, phase_ms)))
        if phase_ms:
            self.phases.add(steps, step_ms, phase_ms)

    def _on_logged(self, event: dict[str, Any]) -> None:
        self._plot("step", event)

    def _on_evaluation(self, event: dict[str, Any]) -> None:
        self._on_epoch(event)

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
        self._mark("finished", event, event.get("reason", ""))

    def _mark(self, kind: str, event: dict[str, Any], text: str) -> None:
        self.marks.append(TimelineMark(kind, self.seconds, event.get("step"), text))

    def _plot(self, per: str, event: dict[str, Any]) -> None:
        for name, value in _numbers(event):
            self.per[name] = per
            _append(self.points.setdefault(name, []), Point(event["step"], self.seconds, value))


def _append(points: list[Any], point: Point | StepTimes) -> None:
    """Append a point, after removing those of the same and later steps: a resumed run repeats them."""
    while points and points[-1].step >= point.step:
        points.pop()
    points.append(point)


def _numbers(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step or an epoch that are drawn; for memory, the largest of all ranks."""
    for name, value in (*event.items(), *values_in(event)):
        number = max(value, default=None) if name == "memory_mb" else value
        if name not in NOT_DRAWN and isinstance(number, (int, float)) and math.isfinite(number):
            yield name, number
