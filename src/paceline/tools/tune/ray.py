"""The same search through Ray Tune, which places the trials on a cluster; the study stays here, with all it knows."""

from __future__ import annotations

import functools
import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ray import tune
from ray.tune.search import Searcher

from paceline.config import Config, dump_yaml
from paceline.errors import PacelineError
from paceline.launch.local import StopRequest, hearing
from paceline.launch.ray import Cluster, cluster, in_thread
from paceline.run.layout import RunFolder
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.search import LOOK_S, settle, take_over
from paceline.tools.tune.shares import Share
from paceline.tools.tune.study import Candidate, Study
from paceline.tools.tune.trial import TrialRun, Worker
from paceline.tools.tune.worker import Outcome


@dataclass
class Active:
    """A trial that Ray Tune has been given."""

    candidate: Candidate
    told: set[int]  # the epochs whose metric the study knows
    began: float = field(default_factory=time.monotonic)
    is_pruned: bool = False


class Ahead(Searcher):  # type: ignore[misc]
    """Ray Tune asks here for values; what comes of them goes to the study."""

    def __init__(
        self,
        study: Study,
        total: int,
        folder: StudyFolder,
        config_of: Callable[[Candidate], dict[str, Any]],
        say: Callable[[str], None],
        *,
        may_copy: bool,
    ) -> None:
        super().__init__()  # without a metric: not every trial comes so far that it has one
        self.study, self.total, self.folder, self.config_of, self.say = study, total, folder, config_of, say
        self.waiting, self.active = study.left_behind(), dict[str, Active]()
        self.may_copy, self.is_stopping = may_copy, False

    def suggest(self, trial_id: str) -> Any:
        """The next trial, by its number and its config."""
        candidate = self._next()
        if candidate is None:
            return Searcher.FINISHED
        self.active[trial_id] = Active(candidate, candidate.epochs_told)
        raw = self.config_of(candidate)
        self.study.started(candidate, raw["run_dir"])
        self.folder.outcome(candidate.number).unlink(missing_ok=True)  # of an earlier life
        return {"number": candidate.number, "config": dump_yaml(raw)}

    def _next(self) -> Candidate | None:
        while not self.is_stopping:
            candidate = self.waiting.pop(0) if self.waiting else self.study.ask(self.total)
            same = take_over(self.study, candidate) if candidate is not None and self.may_copy else None
            if candidate is None or same is None:
                return candidate
            self.say(f"{self.study.row(candidate.number).describe(self.study.goal)}  (the same as trial {same})")
        return None

    def is_hopeless(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Take in an epoch; whether the trial is not worth going on with."""
        active, value, epoch = self.active[trial_id], result.get(self.study.goal.metric), result.get("epoch")
        if value is not None and epoch is not None and epoch not in active.told:
            active.told.add(epoch)
            active.is_pruned = active.is_pruned or self.study.measured(active.candidate, epoch, float(value))
        return active.is_pruned

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A trial has ended, or has been stopped."""
        active = self.active.pop(trial_id, None)
        if active is None:
            return
        number, seconds = active.candidate.number, time.monotonic() - active.began
        outcome = read_outcome(self.folder, number)
        if outcome is None and self.is_stopping and not active.is_pruned:
            self.study.left(active.candidate, seconds)
            self.say(f"trial {number}  stopped; it goes on with the next search")
            return
        outcome = outcome or Outcome("failed", f"its Ray worker was lost or failed; see {self.folder.log(number)}")
        settle(self.study, active.candidate, outcome, seconds, is_pruned=active.is_pruned)
        self.say(self.study.row(number).describe(self.study.goal))

    def set_search_properties(self, *given: Any, **more: Any) -> bool:
        """The study knows what counts."""
        return True

    def save_to_dir(self, *given: Any, **more: Any) -> None:
        """The study keeps itself."""

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune would keep a copy of it, too."""
        return {}


class Stopper(tune.Stopper):  # type: ignore[misc]
    """Has Ray Tune end what is hopeless, or everything."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to end a trial."""
        return self.ahead.is_hopeless(trial_id, result)

    def stop_all(self) -> bool:
        """Whether to end all of them."""
        return self.ahead.is_stopping

    def __getstate__(self) -> dict[str, Any]:
        """Not for a later process."""
        return {}


def search(ahead: Ahead, config: Config, parallel: int) -> bool:
    """Trials until there are enough of them, so many side by side. False if a signal has stopped it."""
    home, storage = ahead.folder.path, RunFolder(ahead.folder.path).ray
    with cluster(config.device) as there:
        share = share_of(config, there)
        threads = max(1, int(share["CPU"]) // most_ranks(config))
        train = functools.partial(train_trial, folder=str(home), metric=ahead.study.goal.metric, threads=threads)
        tuner = tune.Tuner(
            tune.with_resources(train, share),
            tune_config=tune.TuneConfig(search_alg=ahead, num_samples=-1, max_concurrent_trials=parallel),
            run_config=tune.RunConfig(name="tune", storage_path=str(storage), stop=Stopper(ahead), verbose=0),
        )
        request = StopRequest()
        with hearing(request, f"the study is in {home}"):
            done = in_thread(tuner.fit)
            while not done.done():
                time.sleep(LOOK_S)
                if request.signal and not ahead.is_stopping:
                    ahead.is_stopping = True
                    name = signal.Signals(request.signal).name
                    ahead.say(f"{name}: the running trials end; a second signal ends at once")
        for trial_id in list(ahead.active):  # Ray Tune says nothing of those that it was asked to end
            ahead.on_trial_complete(trial_id)
        shutil.rmtree(storage, ignore_errors=True)
        if (error := done.exception()) is not None:
            raise PacelineError(f"Ray Tune has given up: {str(error).strip().splitlines()[-1]}") from error
        return not ahead.is_stopping


def most_ranks(config: Config) -> int:
    """The most ranks that a trial may have."""
    return (config.procs_range or (1, 1))[1] if config.ddp else 1


def share_of(config: Config, there: Cluster) -> dict[str, float]:
    """What a trial asks for: for each of its ranks a CPU, as far as a node has so many, and a GPU if there are any."""
    ranks = most_ranks(config)
    share: dict[str, float] = {"CPU": max(1, min(ranks, there.cpus // there.nodes))}
    return {**share, "GPU": ranks} if there.gpus else share


def read_outcome(folder: StudyFolder, number: int) -> Outcome | None:
    """How a trial has ended, if it says so."""
    path = folder.outcome(number)
    return Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def train_trial(given: dict[str, Any], *, folder: str, metric: str, threads: int) -> None:
    """In a worker of Ray Tune: train one trial in a process of its own, and tell of its epochs."""
    with closing(Worker(Share(None, None))) as worker:
        raw = {"threads": threads, **yaml.safe_load(given["config"])}
        run = TrialRun(StudyFolder(Path(folder)), given["number"], raw, worker)
        outcome = None
        while outcome is None:
            time.sleep(LOOK_S)
            outcome = run.outcome()  # before the epochs: all that it has written by then is read
            for epoch in run.epochs():
                tune.report({"epoch": int(epoch["epoch"]) - 1, metric: epoch.get(metric)})
