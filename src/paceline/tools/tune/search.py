"""The search on this machine: trains several trials in parallel, and watches them in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.system.signals import StopRequest, listening
from paceline.tools.tune.ledger import RunningTrial, TrialLedger
from paceline.tools.tune.report import best_of, shown
from paceline.tools.tune.study import Candidate
from paceline.tools.tune.worker import TrialOutcome

POLL_S = 0.1


class TrainingRun(Protocol):
    """The training of one trial."""

    @property
    def seconds(self) -> float: ...
    def epochs(self) -> Iterator[dict[str, Any]]: ...
    def stop(self) -> None: ...
    def outcome(self) -> TrialOutcome | None: ...


@dataclass(kw_only=True)
class LocalTrial(RunningTrial):
    """A trial that is being trained in one of the parallel slots of this machine."""

    run: TrainingRun
    place: int


class Search:
    """Trains trials until the ledger has no more. `start` trains a candidate in one of `parallel` slots."""

    def __init__(
        self,
        ledger: TrialLedger,
        parallel: int,
        start: Callable[[Candidate, int], TrainingRun],
        show_status: Callable[[str], None] = lambda text: None,
        poll_s: float = POLL_S,
    ) -> None:
        self._ledger, self._parallel, self._start = ledger, parallel, start
        self._show_status, self._poll_s = show_status, poll_s
        self._active: list[LocalTrial] = []
        self._request = StopRequest()

    def run(self) -> bool:
        """Search to the end. False if a signal stopped it: trials have saved, and the next search resumes them."""
        totals, is_stopping = self._totals(), False
        with listening(self._request, "run the same command to resume the study"):
            while True:
                if self._request.signal and not is_stopping:
                    is_stopping = True
                    self._stop_all()
                before = list(self._active)
                self._fill()
                if not self._active:
                    return not self._request.signal
                for trial in list(self._active):
                    self._check(trial)
                if self._active != before:  # not every time, because the storage may be on another machine
                    totals = self._totals()
                running = "; ".join(f"trial {trial.candidate.number}: {trial.progress}" for trial in self._active)
                self._show_status(f"{totals}  {running}")
                time.sleep(self._poll_s)

    def _fill(self) -> None:
        """Start trials in the free slots."""
        while not self._request.signal and len(self._active) < self._parallel:
            candidate = self._ledger.next_candidate()
            if candidate is None:
                return
            place = min(set(range(self._parallel)) - {trial.place for trial in self._active})
            reported, run = candidate.reported_epochs, self._start(candidate, place)
            self._active.append(LocalTrial(candidate=candidate, reported=reported, run=run, place=place))

    def _check(self, trial: LocalTrial) -> None:
        """Report the new epochs of a trial, and end it if it is pruned or has ended."""
        outcome = trial.run.outcome()  # before the epochs, so that all epochs of a trial that has ended are read
        for epoch in trial.run.epochs():
            self._ledger.report(trial, int(epoch["epoch"]) - 1, epoch.get(self._ledger.study.goal.metric))
        if outcome is None:
            if trial.is_pruned:
                trial.run.stop()
            return
        self._active.remove(trial)
        if outcome.state != "done" and not trial.is_pruned and self._request.signal:
            self._ledger.leave(trial, trial.run.seconds)
        else:
            self._ledger.close(trial, outcome, trial.run.seconds)

    def _stop_all(self) -> None:
        """Forward a stop request to all trials."""
        self._ledger.log(f"{self._request.name}: the running trials save and stop; a second signal ends them at once")
        for trial in self._active:
            trial.run.stop()

    def _totals(self) -> str:
        """The number of trials and the best value so far, as text."""
        study = self._ledger.study
        rows = study.rows()
        best = best_of(rows, study.goal)
        best_text = "" if best is None else f", best {shown(best.value)} (trial {best.number})"
        return f"{sum(row.state != 'running' for row in rows)} of {self._ledger.total} trials{best_text}"
