"""The search: trials in so many places side by side, watched by one thread until the study has enough of them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from paceline.errors import Interrupted
from paceline.system.signals import SIGNALS, handled, heeded
from paceline.tools.tune.report import best_of, shown
from paceline.tools.tune.study import Candidate, Study
from paceline.tools.tune.worker import Outcome

LOOK_S = 0.1


class Run(Protocol):
    """The training of one trial."""

    @property
    def seconds(self) -> float: ...
    def epochs(self) -> Iterator[dict[str, Any]]: ...
    def stop(self) -> None: ...
    def outcome(self) -> Outcome | None: ...


@dataclass
class Active:
    """A trial that is being trained, and in which place."""

    candidate: Candidate
    run: Run
    place: int
    told: set[int]  # the epochs whose metric the study knows
    is_pruned: bool = False
    last: str = "starting"


def take_over(study: Study, candidate: Candidate) -> int | None:
    """The number of a trial with the same values, whose result this one gets; None if it must be trained."""
    same = study.same_as(candidate)
    if same is None or same.value is None:
        return None
    study.started(candidate, same.run_dir)
    study.done(candidate, same.value, 0.0)
    return same.number


def settle(study: Study, candidate: Candidate, outcome: Outcome, seconds: float, *, is_pruned: bool) -> None:
    """Tell the study how a trial has ended that will not go on."""
    value = study.goal.value_of(outcome.history)
    if outcome.state == "done" and value is not None and math.isfinite(value):
        study.done(candidate, value, seconds)
    elif outcome.state == "done":
        what = "was not measured" if value is None else f"is {value}"
        study.failed(candidate, f"{study.goal.metric} {what}", seconds)
    elif is_pruned:
        study.pruned(candidate, seconds)
    else:
        study.failed(candidate, outcome.reason, seconds)


@dataclass
class Search:
    """Trials until the study has `total` of them. `start` trains a candidate in one of `parallel` places."""

    study: Study
    total: int
    parallel: int
    start: Callable[[Candidate, int], Run]
    say: Callable[[str], None]  # a line that stays
    show: Callable[[str], None] = lambda text: None  # what goes on now
    may_copy: bool = False  # the same values give the same result, so they are trained once
    signal: int = 0
    _active: list[Active] = field(default_factory=list)
    _so_far: str = ""
    _is_stopping: bool = False

    def run(self) -> bool:
        """Search to the end. False if a signal has stopped it: trials have saved, and go on with the next search."""
        waiting = self.study.left_behind()
        self._count()
        with handled(heeded((*SIGNALS, signal.SIGHUP)), self._hear):
            while True:
                if self.signal:
                    self._stop_all()
                self._fill(waiting)
                if not self._active:
                    return not self.signal
                for active in list(self._active):
                    self._look(active)
                running = "; ".join(f"trial {each.candidate.number}: {each.last}" for each in self._active)
                self.show(f"{self._so_far}  {running}")
                time.sleep(LOOK_S)

    def _fill(self, waiting: list[Candidate]) -> None:
        """Start trials while there are free places."""
        while not self.signal and len(self._active) < self.parallel:
            candidate = waiting.pop(0) if waiting else self.study.ask(self.total)
            if candidate is None:
                return
            same = take_over(self.study, candidate) if self.may_copy else None
            if same is not None:
                self._tell(candidate, f"  (the same as trial {same})")
                continue
            place = min(set(range(self.parallel)) - {active.place for active in self._active})
            run = self.start(candidate, place)
            self._active.append(Active(candidate, run, place, told=candidate.epochs_told))

    def _look(self, active: Active) -> None:
        outcome = active.run.outcome()  # before the epochs: all that it has written by then is read
        for epoch in active.run.epochs():
            self._take(active, epoch)
        if outcome is not None:
            self._active.remove(active)
            self._close(active, outcome)
        elif active.is_pruned:
            active.run.stop()

    def _take(self, active: Active, epoch: dict[str, Any]) -> None:
        """Tell the study of an epoch, once; it decides whether the trial is worth going on with."""
        metric, number = self.study.goal.metric, int(epoch["epoch"]) - 1  # Optuna counts from 0
        value = epoch.get(metric)
        if value is None or number in active.told or active.is_pruned:
            return
        active.told.add(number)
        active.last = f"epoch {number + 1}, {metric} {value:.4g}"
        active.is_pruned = self.study.measured(active.candidate, number, float(value))

    def _close(self, active: Active, outcome: Outcome) -> None:
        """Tell the study how a trial has ended."""
        candidate, seconds = active.candidate, active.run.seconds
        if outcome.state != "done" and not active.is_pruned and self.signal:
            self.study.left(candidate, seconds)
            self.say(f"trial {candidate.number}  stopped; it goes on with the next search")
            return
        settle(self.study, candidate, outcome, seconds, is_pruned=active.is_pruned)
        self._tell(candidate)

    def _stop_all(self) -> None:
        """Pass a request to stop on."""
        if self._is_stopping:
            return
        self._is_stopping = True
        name = signal.Signals(self.signal).name
        self.say(f"{name}: the running trials save and stop; a second signal ends them at once")
        for active in self._active:
            active.run.stop()

    def _count(self) -> None:
        """How far the search is, in words; the storage may be far away, so this is not asked all the time."""
        rows = self.study.rows()
        best = best_of(rows, self.study.goal)
        best_words = "" if best is None else f", best {shown(best.value)} (trial {best.number})"
        self._so_far = f"{sum(row.state != 'running' for row in rows)} of {self.total} trials{best_words}"

    def _tell(self, candidate: Candidate, more: str = "") -> None:
        """One line about a trial that has ended."""
        self.say(self.study.row(candidate.number).describe(self.study.goal) + more)
        self._count()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Take the first signal as a request to stop, a second one as the end."""
        if self.signal:
            raise Interrupted(f"ended by {signal.Signals(number).name}; the same command goes on with the study")
        self.signal = number
