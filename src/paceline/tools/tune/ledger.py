"""The trials of one search: the next trial to train, and the outcome of each. Searches with and without Ray use it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.tools.tune.study import Candidate, Study
from paceline.tools.tune.worker import TrialOutcome


@dataclass(kw_only=True)
class RunningTrial:
    """A trial that is being trained, and the epochs that were reported to the study."""

    candidate: Candidate
    reported: set[int]  # the epochs whose metric was reported to the study
    is_pruned: bool = False
    progress: str = "starting"


class TrialLedger:
    """Trials until the study has `total` of them, each logged in a line when it ends."""

    def __init__(self, study: Study, total: int, log: Callable[[str], None], *, may_copy: bool = False) -> None:
        self.study, self.total, self.log = study, total, log
        self.may_copy = may_copy  # equal values give equal results, so they are trained once
        self._unfinished = study.unfinished()

    def next_candidate(self) -> Candidate | None:
        """The next trial to train; None if there are enough. Returns unfinished trials of an earlier search first."""
        while True:
            candidate = self._unfinished.pop(0) if self._unfinished else self.study.ask(self.total)
            if candidate is None or not self.may_copy:
                return candidate
            same = self.study.finished_like(candidate)
            if same is None or same.value is None:
                return candidate
            self.study.start(candidate, same.run_dir)
            self.study.finish(candidate, same.value, 0.0)
            self._log_end(candidate, f"  (the same as trial {same.number})")

    def report(self, trial: RunningTrial, epoch: int, value: float | None) -> None:
        """Report the metric after an epoch to the study, once. The study decides whether the trial is pruned."""
        if value is None or epoch in trial.reported or trial.is_pruned:
            return
        trial.reported.add(epoch)
        trial.progress = f"epoch {epoch + 1}, {self.study.goal.metric} {value:.4g}"
        trial.is_pruned = self.study.report(trial.candidate, epoch, float(value))

    def close(self, trial: RunningTrial, outcome: TrialOutcome, seconds: float) -> None:
        """Record the outcome of a trial that will not be resumed."""
        study, candidate = self.study, trial.candidate
        value = study.goal.value_of(outcome.history)
        if outcome.state == "done" and value is not None and math.isfinite(value):
            study.finish(candidate, value, seconds)
        elif outcome.state == "done":
            problem = "was not measured" if value is None else f"is {value}"
            study.fail(candidate, f"{study.goal.metric} {problem}", seconds)
        elif trial.is_pruned:
            study.prune(candidate, seconds)
        else:
            study.fail(candidate, outcome.reason, seconds)
        self._log_end(candidate)

    def leave(self, trial: RunningTrial, seconds: float) -> None:
        """Record that a trial was stopped, and that the next search resumes it."""
        self.study.add_seconds(trial.candidate, seconds)
        self.log(f"trial {trial.candidate.number}  stopped; the next search resumes it")

    def _log_end(self, candidate: Candidate, note: str = "") -> None:
        self.log(self.study.row(candidate.number).describe(self.study.goal) + note)
