"""`paceline tune`: a config, a search space, many runs; the best config at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner

from paceline.config import EXECUTION_KEYS, Config, build, dump_yaml, override
from paceline.errors import ConfigError, PacelineError, Stopped
from paceline.run.folder import RunFolder, new_folder, write_text
from paceline.system.cores import which_cores
from paceline.tools.tune import report
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.goal import Goal, pick_goal
from paceline.tools.tune.report import Row
from paceline.tools.tune.search import Search
from paceline.tools.tune.shares import gpus_here, shares_of
from paceline.tools.tune.space import Space, examples_of, words_of
from paceline.tools.tune.study import Candidate, Study, make_pruner
from paceline.tools.tune.trial import TrialRun, Worker
from paceline.trainer import build_config

ENGINES = ("optuna", "ray")


@dataclass(frozen=True)
class Plan:
    """What is searched, and how."""

    raw: dict[str, Any]  # the config as written, with what holds for all trials
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
        """The config with a trial's values; it finds its functions from anywhere."""
        raw = {**self.raw, "folder": str((self.folder / (self.raw.get("folder") or "")).resolve())}
        override(raw, words_of(values))
        return raw


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    rows: list[Row]  # best first
    goal: Goal
    best: Row
    folder: StudyFolder
    notes: list[str]


def tune(plan: Plan, say: Callable[[str], None], show: Callable[[str], None]) -> Found:
    """Search, or go on with a search; `say` takes lines that stay, `show` what goes on now."""
    config = _checked(plan)
    goal = pick_goal(config, plan.metric, plan.mode)
    name = plan.study or config.name
    folder = StudyFolder(new_folder(plan.run_dir or Path("runs") / f"{name}-tune", Path()))
    is_managed = config.train_fn is None
    shares = shares_of(plan.parallel, gpus_here(config.device), sorted(which_cores()))
    with locked(RunFolder(folder.path)), ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(share))) for share in shares]
        pruner = make_pruner(plan.pruner, config.num_epochs) if isinstance(plan.pruner, str) else plan.pruner
        study = Study(
            name, plan.storage or f"sqlite:///{folder.database}", plan.space, goal, home=folder.name(),
            sampler=plan.sampler, pruner=pruner, seed=config.seed if plan.seed is None else plan.seed,
        )  # fmt: skip
        study.check_identity(_identity(plan, goal))

        def start(candidate: Candidate, place: int) -> TrialRun:
            run_dir = _run_dir(folder, candidate.number, is_managed)
            study.started(candidate, str(run_dir))
            raw = _raw_of(plan.config_of(candidate.values), run_dir, is_managed)
            return TrialRun(folder, candidate.number, raw, workers[place])

        say(f"study {name}: {folder.path}, {goal.metric} {goal.mode}")
        if plan.engine == "ray":
            is_whole = _search_by_ray(plan, study, config, folder, say)
        else:
            is_whole = Search(study, plan.trials, plan.parallel, start, say, show, may_copy=is_managed).run()
        return _report(plan, study, folder, is_whole=is_whole)


def _search_by_ray(plan: Plan, study: Study, config: Config, folder: StudyFolder, say: Callable[[str], None]) -> bool:
    """The same search on a cluster of Ray's."""
    from paceline.tools.tune import ray

    is_managed = config.train_fn is None

    def config_of(candidate: Candidate) -> dict[str, Any]:
        return _raw_of(plan.config_of(candidate.values), _run_dir(folder, candidate.number, is_managed), is_managed)

    ahead = ray.Ahead(study, plan.trials, folder, config_of, say, may_copy=is_managed)
    return ray.search(ahead, config, plan.parallel)


def _checked(plan: Plan) -> Config:
    """The config with some values of the space; all mistakes that any of them shows."""
    problems: dict[str, None] = {}
    if not plan.space:
        problems["nothing is searched; give ranges and choices, such as optimizer.lr=log:1e-4:1e-1"] = None
    if plan.trials < 1 or plan.parallel < 1:
        problems[f"--trials {plan.trials} and --parallel {plan.parallel} must be 1 or more"] = None
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


def _identity(plan: Plan, goal: Goal) -> dict[str, Any]:
    """All that must stay while a study goes on: the space, the goal, and what decides what a run computes."""
    raw = {key: value for key, value in plan.raw.items() if key not in EXECUTION_KEYS}
    space = {key: str(domain) for key, domain in plan.space.items()}
    identity: dict[str, Any] = json.loads(
        json.dumps({**raw, **space, "metric": goal.metric, "mode": goal.mode}, default=str)
    )
    return identity


def _run_dir(folder: StudyFolder, number: int, is_managed: bool) -> Path:
    """The run folder of a trial. A loop of the user's own has no checkpoint to go on from, so it begins another one."""
    run_dir = first = folder.run(number)
    attempt = 1
    while not is_managed and run_dir.exists():
        attempt += 1
        run_dir = first.with_name(f"{first.name}-{attempt}")
    return run_dir


def _raw_of(raw: dict[str, Any], run_dir: Path, is_managed: bool) -> dict[str, Any]:
    """The config of one trial: on this machine, from its last checkpoint if there is one, and not tried again."""
    launcher = raw.get("launcher") or "auto"
    changes = {"run_dir": str(run_dir), "launcher": "local" if launcher == "auto" else launcher}
    changes |= {"nodes": None, "rendezvous": None}  # a trial has a place on this machine
    if is_managed:
        changes["resume"] = "auto"
    return {"max_restarts": 0, **raw, **changes}


def _report(plan: Plan, study: Study, folder: StudyFolder, *, is_whole: bool) -> Found:
    """Write the table, the best config and the plots. Raises if there is nothing to choose from, or more to come."""
    rows, goal = study.rows(), study.goal
    report.write_table(folder.table, rows, goal)
    best = report.best_of(rows, goal)
    if best is not None:
        origin = f"# trial {best.number} of {len(rows)}: {goal.metric} {best.value}\n"
        write_text(folder.best, origin + dump_yaml(plan.config_of(best.values)))
    if not is_whole:
        done = sum(row.state != "running" for row in rows)
        raise Stopped(f"stopped after {done} of {plan.trials} trials; the same command goes on with {folder.path}")
    if best is None:
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        raise PacelineError("\n".join(["no trial was trained to its end", *list(reasons)[:1], f"see {folder.table}"]))
    note = report.write_plots(folder.plots, study.optuna, goal.metric)
    return Found(report.ranking(rows, goal), goal, best, folder, [note] if note else [])
