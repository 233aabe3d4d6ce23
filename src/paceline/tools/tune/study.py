"""The Optuna study: the next values to try, the trials to prune, and the results of all trials.

It does not depend on runs and processes. Samplers, pruners and storage are Optuna's own. Its retry of failed trials is
not used: it needs `optimize()` and starts a new trial, where `unfinished` (3 lines) resumes the same one.
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
from paceline.tools.tune.report import TrialRow
from paceline.tools.tune.space import Choices, Range, Space

PRUNERS = ("median", "hyperband", "none")
SAMPLERS = ("tpe", "random")
ASKED = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
STATES = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
# User attributes of a trial, and IDENTITY of the study.
HOME, RUN_DIR, SECONDS, REASON, IDENTITY = "home", "run_dir", "seconds", "reason", "identity"


@dataclass(frozen=True)
class Candidate:
    """One trial to train: its values, and its handle in Optuna."""

    number: int
    values: dict[str, Any]
    handle: optuna.Trial

    @property
    def reported_epochs(self) -> set[int]:
        """The epochs whose metric was reported already."""
        return set(self.handle.study.trials[self.number].intermediate_values)


class Study:
    """A study in its storage. Several folders may share it; `home` is the name of the one that this search uses."""

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
        except Exception as error:  # each database driver has its own errors
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"--storage {storage} cannot be used: {why}; give a database's URL") from error
        # A resumed study needs another seed, or the sampler would draw the same values again.
        self._study.sampler = make_sampler(sampler, seed + len(self._study.trials))

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise ConfigError if the study began with another space, goal or config: its trials cannot be compared."""
        then = self._study.user_attrs.get(IDENTITY)
        if then is None:
            self._study.set_user_attr(IDENTITY, dict(identity))
            return
        problems = [
            f"{key}={identity.get(key)} but the study {self._study.study_name} started with {key}={then.get(key)}; "
            "use that value, or start another study with --study NAME"
            for key in sorted(then.keys() | identity.keys())
            if then.get(key) != identity.get(key)
        ]
        if problems:
            raise ConfigError(problems)

    # --- trials to train ---------------------------------------------------------------------------------------

    def unfinished(self) -> list[Candidate]:
        """The trials of this folder that were running when a search was stopped or killed."""
        trials = self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        return [self._candidate(trial) for trial in trials if trial.user_attrs.get(HOME) == self._home]

    def ask(self, total: int) -> Candidate | None:
        """The next trial, or None if the study has `total` trials already."""
        trials = self._study.get_trials(deepcopy=False, states=ASKED)
        if sum(trial.state.is_finished() or HOME in trial.user_attrs for trial in trials) >= total:
            return None
        asked = self._study.ask(self._distributions)
        asked.set_user_attr(HOME, self._home)
        return Candidate(asked.number, self._values(asked.params), asked)

    def finished_like(self, candidate: Candidate) -> TrialRow | None:
        """A finished trial with the same values; None if there is none."""
        done = (row for row in self.rows() if row.state == "done")
        return next((row for row in done if row.values == candidate.values), None)

    # --- results of trials -------------------------------------------------------------------------------------

    def start(self, candidate: Candidate, run_dir: str) -> None:
        """Record the run folder of a trial that is about to be trained."""
        candidate.handle.set_user_attr(RUN_DIR, run_dir)

    def report(self, candidate: Candidate, epoch: int, value: float) -> bool:
        """Report the metric after an epoch; returns whether the trial should be pruned."""
        candidate.handle.report(value, epoch)
        return candidate.handle.should_prune()

    def finish(self, candidate: Candidate, value: float, seconds: float) -> None:
        """Record the value of a trial that finished."""
        self.add_seconds(candidate, seconds)
        self._study.tell(candidate.number, value)

    def prune(self, candidate: Candidate, seconds: float) -> None:
        """Record that a trial was pruned."""
        self.add_seconds(candidate, seconds)
        self._study.tell(candidate.number, state=TrialState.PRUNED)

    def fail(self, candidate: Candidate, reason: str, seconds: float) -> None:
        """Record that a trial crashed, ran out of memory, or measured nothing."""
        self.add_seconds(candidate, seconds)
        candidate.handle.set_user_attr(REASON, reason)
        self._study.tell(candidate.number, state=TrialState.FAIL)

    def add_seconds(self, candidate: Candidate, seconds: float) -> None:
        """Add to the training time of a trial; the only record of a trial that is stopped and will be resumed."""
        before = candidate.handle.user_attrs.get(SECONDS, 0.0)
        candidate.handle.set_user_attr(SECONDS, round(before + seconds, 1))

    # --- all trials --------------------------------------------------------------------------------------------

    @property
    def optuna(self) -> optuna.Study:
        """Optuna's object, for its plots."""
        return self._study

    def rows(self) -> list[TrialRow]:
        """All trials, in the order in which they were asked for."""
        return [self._row(trial) for trial in self._study.get_trials(deepcopy=False, states=ASKED)]

    def row(self, number: int) -> TrialRow:
        """One trial."""
        return self._row(self._study.get_trials(deepcopy=False)[number])

    def _row(self, trial: FrozenTrial) -> TrialRow:
        facts = trial.user_attrs
        return TrialRow(
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
        return Candidate(trial.number, self._values(trial.params), handle)

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The values behind Optuna's parameters, in the order of the space."""
        return {key: _from_label(self.space[key], params[key]) for key in self.space if key in params}


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Optuna's sampler with this name."""
    if name not in SAMPLERS:
        raise ConfigError(f"--sampler {name} is not known; use {', '.join(SAMPLERS)}")
    if name == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():  # some versions warn that constant_liar is experimental
        warnings.simplefilter("ignore")
        return TPESampler(seed=seed, constant_liar=True)  # so that parallel trials get different values


def make_pruner(name: str, num_epochs: int) -> BasePruner:
    """Optuna's pruner with this name; its steps are epochs."""
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
    """A choice as Optuna stores it: a list or another structure becomes text."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _from_label(domain: Range | Choices, label: Any) -> Any:
    if isinstance(domain, Range):
        return label
    return next(value for value in domain.values if _label(value) == label and type(_label(value)) is type(label))
