"""`paceline tune`: checks a config and a search space, runs the trials, and writes the best config and a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner

from paceline.config import EXECUTION_KEYS, Config, dump_yaml, override
from paceline.errors import ConfigError, PacelineError, Stopped
from paceline.run.atomic_files import write_text
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import new_folder
from paceline.run.lock import locked
from paceline.system.cores import which_cores
from paceline.tools.tune import report
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.goal import Goal, pick_goal
from paceline.tools.tune.ledger import TrialLedger
from paceline.tools.tune.report import TrialRow
from paceline.tools.tune.search import Search
from paceline.tools.tune.shares import shares_of, visible_gpus
from paceline.tools.tune.space import Space, examples_of, words_of
from paceline.tools.tune.study import Candidate, Study, make_pruner
from paceline.tools.tune.trial import TrialProcess, TrialRun
from paceline.trainer import build_config

ENGINES = ("optuna", "ray")


@dataclass(frozen=True)
class TunePlan:
    """The settings of a search."""

    raw: dict[str, Any]  # the config as written, with the values that all trials share
    folder: Path  # of the config
    space: Space
    trials: int = 20
    parallel: int = 1
    metric: str | None = None
    mode: str | None = None
    study: str | None = None
    storage: str | None = None
    sampler: str = "tpe"
    pruner: str | BasePruner = "median"
    engine: str = "optuna"
    seed: int | None = None
    run_dir: Path | None = None

    def config_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The config with the values of a trial, and an absolute `folder`, so that it can be stored anywhere."""
        raw = {**self.raw, "folder": str((self.folder / (self.raw.get("folder") or "")).resolve())}
        override(raw, words_of(values))
        return raw


@dataclass(frozen=True)
class TuneResult:
    """The result of a search that has finished."""

    rows: list[TrialRow]  # best first
    goal: Goal
    best: TrialRow
    folder: StudyFolder
    notes: list[str]


def tune(plan: TunePlan, log: Callable[[str], None], show_status: Callable[[str], None]) -> TuneResult:
    """Search, or resume a search. `log` prints permanent lines, `show_status` a line that replaces the last one."""
    config = _checked(plan)
    goal = pick_goal(config, plan.metric, plan.mode)
    name = plan.study or config.name
    folder = StudyFolder(new_folder(plan.run_dir or Path("runs") / f"{name}-tune", Path()))
    can_resume = config.keeps_state
    with locked(RunFolder(folder.path)), ExitStack() as stack:
        pruner = make_pruner(plan.pruner, config.num_epochs) if isinstance(plan.pruner, str) else plan.pruner
        study = Study(
            name, plan.storage or f"sqlite:///{folder.database}", plan.space, goal, home=folder.name(),
            sampler=plan.sampler, pruner=pruner, seed=config.seed if plan.seed is None else plan.seed,
        )  # fmt: skip
        study.check_identity(_identity(plan, goal))
        ledger = TrialLedger(study, plan.trials, log, may_copy=can_resume)

        def config_of(candidate: Candidate) -> dict[str, Any]:
            run_dir = trial_run_dir(folder, candidate.number, can_resume)
            return trial_config(plan.config_of(candidate.values), run_dir, can_resume)

        def start(candidate: Candidate, place: int) -> TrialRun:
            raw = config_of(candidate)
            study.start(candidate, raw["run_dir"])
            return TrialRun(folder, candidate.number, raw, processes[place])

        log(f"study {name}: {folder.path}, {goal.metric} {goal.mode}")
        if plan.engine == "ray":
            from paceline.tools.tune import ray

            is_whole = ray.search(ray.StudySearcher(ledger, folder, config_of), config, plan.parallel)
        else:
            shares = shares_of(plan.parallel, visible_gpus(config.device), sorted(which_cores()))
            processes = [stack.enter_context(closing(TrialProcess(share))) for share in shares]
            is_whole = Search(ledger, plan.parallel, start, show_status).run()
        return _report(plan, study, folder, is_whole=is_whole)


def _checked(plan: TunePlan) -> Config:
    """The config with values of the space. Raises ConfigError with the mistakes of all examples of the space."""
    problems: dict[str, None] = {}
    if not plan.space:
        problems["no keys to search; give ranges and choices, such as optimizer.lr=log:1e-4:1e-1"] = None
    if plan.trials < 1 or plan.parallel < 1:
        problems[f"--trials {plan.trials} and --parallel {plan.parallel} must be at least 1"] = None
    if plan.engine not in ENGINES:
        problems[f"--engine {plan.engine} is not known; use {', '.join(ENGINES)}"] = None
    for values in examples_of(plan.space):
        try:
            config = build_config(plan.config_of(values), plan.folder)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))
    return config


def _identity(plan: TunePlan, goal: Goal) -> dict[str, Any]:
    """The settings that must not change when a study is resumed: the space, the goal, and keys that affect results."""
    raw = {key: value for key, value in plan.raw.items() if key not in EXECUTION_KEYS}
    space = {key: str(domain) for key, domain in plan.space.items()}
    identity: dict[str, Any] = json.loads(
        json.dumps({**raw, **space, "metric": goal.metric, "mode": goal.mode}, default=str)
    )
    return identity


def trial_run_dir(folder: StudyFolder, number: int, can_resume: bool) -> Path:
    """The run folder of a trial; a new one for each attempt of the user's own loop, which cannot be resumed."""
    run_dir = first = folder.run(number)
    attempt = 1
    while not can_resume and run_dir.exists():
        attempt += 1
        run_dir = first.with_name(f"{first.name}-{attempt}")
    return run_dir


def trial_config(raw: dict[str, Any], run_dir: Path, can_resume: bool) -> dict[str, Any]:
    """The config of one trial: on one machine, resumed from its last checkpoint, and not restarted after a failure."""
    launcher = raw.get("launcher") or "auto"
    changes = {"run_dir": str(run_dir), "launcher": "local" if launcher == "auto" else launcher}
    changes |= {"nodes": None, "rendezvous": None}
    if can_resume:
        changes["resume"] = "auto"
    return {"max_restarts": 0, **raw, **changes}


def _report(plan: TunePlan, study: Study, folder: StudyFolder, *, is_whole: bool) -> TuneResult:
    """Write the table, the best config and the plots. Raises if the search was stopped, or no trial finished."""
    rows, goal = study.rows(), study.goal
    report.write_table(folder.table, rows, goal)
    best = report.best_of(rows, goal)
    if best is not None:
        origin = f"# trial {best.number} of {len(rows)}: {goal.metric} {best.value}\n"
        write_text(folder.best, origin + dump_yaml(plan.config_of(best.values)))
    if not is_whole:
        done = sum(row.state != "running" for row in rows)
        again = f"run the same command to resume {folder.path}"
        raise Stopped(f"stopped after {done} of {plan.trials} trials; {again}")
    if best is None:
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        raise PacelineError("\n".join(["no trial finished", *list(reasons)[:1], f"see {folder.table}"]))
    note = report.write_plots(folder.plots, study.optuna, goal.metric)
    return TuneResult(report.ranking(rows, goal), goal, best, folder, [note] if note else [])
