"""The search through Ray Tune, which places the trials on a cluster. The study stays in the process of the search."""

from __future__ import annotations

import functools
import shutil
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
from paceline.launch.ray_cluster import RayResources, connected, in_thread
from paceline.run.layout import RunFolder
from paceline.system.signals import StopRequest, listening
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.ledger import RunningTrial, TrialLedger
from paceline.tools.tune.search import POLL_S
from paceline.tools.tune.shares import MachineShare
from paceline.tools.tune.study import Candidate
from paceline.tools.tune.trial import TrialProcess, TrialRun
from paceline.tools.tune.worker import TrialOutcome


@dataclass(kw_only=True)
class RayTrial(RunningTrial):
    """A trial that Ray Tune trains."""

    began: float = field(default_factory=time.monotonic)


class StudySearcher(Searcher):  # type: ignore[misc]
    """Passes the trials of the study to Ray Tune, and their results to the study."""

    def __init__(
        self, ledger: TrialLedger, folder: StudyFolder, config_of: Callable[[Candidate], dict[str, Any]]
    ) -> None:
        super().__init__()  # without a metric: a trial that fails early has none
        self.ledger, self.folder, self.config_of = ledger, folder, config_of
        self.active: dict[str, RayTrial] = {}
        self.is_stopping = False

    def suggest(self, trial_id: str) -> Any:
        """The next trial: its number and its config."""
        candidate = None if self.is_stopping else self.ledger.next_candidate()
        if candidate is None:
            return Searcher.FINISHED
        self.active[trial_id] = RayTrial(candidate=candidate, reported=candidate.reported_epochs)
        raw = self.config_of(candidate)
        self.ledger.study.start(candidate, raw["run_dir"])
        self.folder.outcome(candidate.number).unlink(missing_ok=True)  # from an earlier attempt
        return {"number": candidate.number, "config": dump_yaml(raw)}

    def is_pruned(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Report an epoch to the study; returns whether the trial is pruned."""
        trial, value, epoch = self.active[trial_id], result.get(self.ledger.study.goal.metric), result.get("epoch")
        if epoch is not None:
            self.ledger.report(trial, epoch, value)
        return trial.is_pruned

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record a trial that has ended, or has been stopped."""
        trial = self.active.pop(trial_id, None)
        if trial is None:
            return
        number, seconds = trial.candidate.number, time.monotonic() - trial.began
        outcome = TrialOutcome.read(self.folder.outcome(number))
        if outcome is None and self.is_stopping and not trial.is_pruned:
            self.ledger.leave(trial, seconds)
            return
        lost = TrialOutcome("failed", f"its Ray worker was lost or failed; see {self.folder.log(number)}")
        self.ledger.close(trial, outcome or lost, seconds)

    def set_search_properties(self, *given: Any, **more: Any) -> bool:
        """Accept any metric and mode, because the study has its own."""
        return True

    def save_to_dir(self, *given: Any, **more: Any) -> None:
        """Save nothing, because the study has its own storage."""

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Ray Tune pickles searchers for a later process, which the study does not need."""
        return {}


class TrialStopper(tune.Stopper):  # type: ignore[misc]
    """Makes Ray Tune end trials that are pruned, or all trials."""

    def __init__(self, searcher: StudySearcher) -> None:
        self.searcher = searcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to end a trial."""
        return self.searcher.is_pruned(trial_id, result)

    def stop_all(self) -> bool:
        """Whether to end all trials."""
        return self.searcher.is_stopping

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, as for the searcher."""
        return {}


def search(searcher: StudySearcher, config: Config, parallel: int) -> bool:
    """Train at most `parallel` trials at a time until there are enough. False if a signal stopped the search."""
    home, storage = searcher.folder.path, RunFolder(searcher.folder.path).ray
    with connected(config.device) as resources:
        share = share_of(config, resources)
        threads = max(1, int(share["CPU"]) // most_ranks(config))
        metric = searcher.ledger.study.goal.metric
        train = functools.partial(train_trial, folder=str(home), metric=metric, threads=threads)
        tuner = tune.Tuner(
            tune.with_resources(train, share),
            tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, max_concurrent_trials=parallel),
            run_config=tune.RunConfig(name="tune", storage_path=str(storage), stop=TrialStopper(searcher), verbose=0),
        )
        request = StopRequest()
        with listening(request, f"the study is in {home}"):
            done = in_thread(tuner.fit)
            while not done.done():
                time.sleep(POLL_S)
                if request.signal and not searcher.is_stopping:
                    searcher.is_stopping = True
                    searcher.ledger.log(f"{request.name}: the running trials end; a second signal ends at once")
        for trial_id in list(searcher.active):  # Ray Tune does not report trials that it was asked to end
            searcher.on_trial_complete(trial_id)
        shutil.rmtree(storage, ignore_errors=True)
        if (error := done.exception()) is not None:
            raise PacelineError(f"Ray Tune failed: {str(error).strip().splitlines()[-1]}") from error
        return not searcher.is_stopping


def most_ranks(config: Config) -> int:
    """The largest number of ranks that a trial may have."""
    return (config.procs_range or (1, 1))[1] if config.ddp else 1


def share_of(config: Config, resources: RayResources) -> dict[str, float]:
    """The resources of a trial: a CPU per rank, but no more than a node has, and a GPU per rank if there are any."""
    ranks = most_ranks(config)
    share: dict[str, float] = {"CPU": max(1, min(ranks, resources.cpus // resources.nodes))}
    return {**share, "GPU": ranks} if resources.gpus else share


def train_trial(given: dict[str, Any], *, folder: str, metric: str, threads: int) -> None:
    """In a worker of Ray Tune: train one trial in a separate process, and report its epochs."""
    with closing(TrialProcess(MachineShare(None, None))) as process:
        raw = {"threads": threads, **yaml.safe_load(given["config"])}
        run = TrialRun(StudyFolder(Path(folder)), given["number"], raw, process)
        outcome = None
        while outcome is None:
            time.sleep(POLL_S)
            outcome = run.outcome()  # before the epochs, so that all epochs of a trial that has ended are read
            for epoch in run.epochs():
                tune.report({"epoch": int(epoch["epoch"]) - 1, metric: epoch.get(metric)})
