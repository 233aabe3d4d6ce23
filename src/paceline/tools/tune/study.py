"""The Optuna study: which values to try next, which trials are hopeless, and what is known of all of them.

It knows nothing of runs and processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from paceline.errors import ConfigError
from paceline.tools.tune.goal import Goal
from paceline.tools.tune.report import Row
from paceline.tools.tune.space import Choices, Range, Space

PRUNERS = ("median", "hyperband", "none")
SAMPLERS = ("tpe", "random")
UNDER_WAY = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
# Attributes of a trial and of the study.
HOME, RUN_DIR, SECONDS, REASON, IDENTITY = "home", "run_dir", "seconds", "reason", "identity"


@dataclass(frozen=True)
class Candidate:
    """One trial: values to train with, and what Optuna knows it by."""

    number: int
    values: dict[str, Any]
    handle: optuna.Trial
    is_continued: bool = False

    @property
    def epochs_told(self) -> set[int]:
        """The epochs whose metric is known already."""
        return set(self.handle.study.trials[self.number].intermediate_values)


class Study:
    """A study in its storage. Several folders may share it; `home` names the one whose trials these are."""

    def __init__(
        self,
        name: str,
        storage: str,
        space: Space,
        goal: Goal,
        *,
        home: str,
        sampler: str = "tpe",
        pruner: BasePruner | None = None,
        seed: int = 0,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.goal, self._home = space, goal, home
        self._distributions = {key: _distribution(domain) for key, domain in space.items()}
        try:
            self._study = optuna.create_study(
                study_name=name, storage=storage, load_if_exists=True, pruner=pruner or NopPruner(),
                direction="minimize" if goal.mode == "min" else "maximize",
            )  # fmt: skip
        except Exception as error:  # of any database and its driver
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"--storage {storage} cannot be used: {why}; give a database's URL") from error
        # The same seed would draw the same values again when the study goes on.
        self._study.sampler = make_sampler(sampler, seed + len(self._study.trials))

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Refuse to mix trials that cannot be compared: of another space, goal or config."""
        then = self._study.user_attrs.get(IDENTITY)
        if then is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
            return
        problems = [
            f"{key}={identity.get(key)} but the study {self._study.study_name} began with {key}={then.get(key)}; "
            "keep that, or begin another with --study NAME"
            for key in sorted(then.keys() | identity.keys())
            if then.get(key) != identity.get(key)
        ]
        if problems:
            raise ConfigError(problems)

    # --- what to try -------------------------------------------------------------------------------------------

    def left_behind(self) -> list[Candidate]:
        """The trials that were running here when the search was last stopped or killed."""
        trials = self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        return [self._candidate(trial) for trial in trials if trial.user_attrs.get(HOME) == self._home]

    def ask(self, total: int) -> Candidate | None:
        """The next trial, or None if the study has so many already."""
        trials = self._study.get_trials(deepcopy=False, states=UNDER_WAY)
        if sum(trial.state.is_finished() or HOME in trial.user_attrs for trial in trials) >= total:
            return None
        asked = self._study.ask(self._distributions)
        asked.set_user_attr(HOME, self._home)
        return Candidate(asked.number, self._values(asked.params), asked)

    def same_as(self, candidate: Candidate) -> Row | None:
        """A trial that has been trained to its end with the same values."""
        done = (row for row in self.rows() if row.state == "done")
        return next((row for row in done if row.values == candidate.values), None)

    # --- what has come of it -----------------------------------------------------------------------------------

    def started(self, candidate: Candidate, run_dir: str) -> None:
        """The trial is being trained."""
        candidate.handle.set_user_attr(RUN_DIR, run_dir)

    def measured(self, candidate: Candidate, epoch: int, value: float) -> bool:
        """Take in the metric after an epoch; whether the trial is not worth going on with."""
        candidate.handle.report(value, epoch)
        return candidate.handle.should_prune()

    def done(self, candidate: Candidate, value: float, seconds: float) -> None:
        """The trial has been trained to its end."""
        self._add_seconds(candidate, seconds)
        self._study.tell(candidate.number, value)

    def pruned(self, candidate: Candidate, seconds: float) -> None:
        """The trial was given up."""
        self._add_seconds(candidate, seconds)
        self._study.tell(candidate.number, state=TrialState.PRUNED)

    def failed(self, candidate: Candidate, reason: str, seconds: float) -> None:
        """The trial has crashed, run out of memory, or measured nothing."""
        self._add_seconds(candidate, seconds)
        candidate.handle.set_user_attr(REASON, reason)
        self._study.tell(candidate.number, state=TrialState.FAIL)

    def left(self, candidate: Candidate, seconds: float) -> None:
        """The trial is stopped and will go on later."""
        self._add_seconds(candidate, seconds)

    # --- what is known -----------------------------------------------------------------------------------------

    @property
    def optuna(self) -> optuna.Study:
        """The study, for Optuna's own plots."""
        return self._study

    def rows(self) -> list[Row]:
        """All trials, in the order in which they were asked for."""
        return [self._row(trial) for trial in self._study.get_trials(deepcopy=False, states=UNDER_WAY)]

    def row(self, number: int) -> Row:
        """One trial."""
        return next(row for row in self.rows() if row.number == number)

    def _row(self, trial: FrozenTrial) -> Row:
        facts = trial.user_attrs
        return Row(
            number=trial.number,
            values=self._values(trial.params),
            value=trial.value,
            state=STATES.get(trial.state, "running"),
            epochs=len(trial.intermediate_values),
            seconds=facts.get(SECONDS, 0.0),
            run_dir=facts.get(RUN_DIR, ""),
            reason=facts.get(REASON, ""),
        )

    def _candidate(self, trial: FrozenTrial) -> Candidate:
        handle = optuna.Trial(self._study, trial._trial_id)
        return Candidate(trial.number, self._values(trial.params), handle, is_continued=True)

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values that Optuna means, in the order of the space."""
        return {key: _from_label(self.space[key], params[key]) for key in self.space if key in params}

    def _add_seconds(self, candidate: Candidate, seconds: float) -> None:
        before = candidate.handle.user_attrs.get(SECONDS, 0.0)
        candidate.handle.set_user_attr(SECONDS, round(before + seconds, 1))


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler of that name."""
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler {name} is not known; use {', '.join(SAMPLERS)}")
    if name == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():  # some versions call the liar an experiment
        warnings.simplefilter("ignore")
        return TPESampler(seed=seed, constant_liar=True)  # for trials side by side: not all the same values


def make_pruner(name: str, num_epochs: int) -> BasePruner:
    """Optuna's pruner of that name; it counts epochs."""
    if name not in PRUNERS:
        raise ConfigError(f"--pruner {name} is not known; use {', '.join(PRUNERS)}")
    if name == "hyperband":
        return HyperbandPruner(min_resource=1, max_resource=num_epochs)
    return MedianPruner(n_startup_trials=5, n_warmup_steps=1) if name == "median" else NopPruner()


def _distribution(domain: Range | Choices) -> BaseDistribution:
    if isinstance(domain, Choices):
        return CategoricalDistribution([_label(value) for value in domain.values])
    if domain.is_int:
        return IntDistribution(int(domain.low), int(domain.high), log=domain.is_log, step=int(domain.step or 1))
    return FloatDistribution(domain.low, domain.high, log=domain.is_log, step=domain.step)


def _label(value: Any) -> str | int | float | bool | None:
    """A choice as Optuna keeps it: what is no plain value, by its text."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _from_label(domain: Range | Choices, label: Any) -> Any:
    if isinstance(domain, Range):
        return label
    return next(value for value in domain.values if _label(value) == label and type(_label(value)) is type(label))
