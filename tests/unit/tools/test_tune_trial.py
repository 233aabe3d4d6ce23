"""A trial without a process: its config, its run as the search sees it, and the outcome that it writes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("optuna")

from paceline.cli import tune as command
from paceline.config import dump_yaml, read_yaml
from paceline.errors import ConfigError, MissingExtra, RankFailed, Stopped
from paceline.tools.tune import tune, worker
from paceline.tools.tune.folder import StudyFolder
from paceline.tools.tune.goal import Goal
from paceline.tools.tune.space import parse
from paceline.tools.tune.trial import TrialRun
from paceline.tools.tune.tune import TunePlan
from paceline.tools.tune.worker import TrialOutcome


class FakeProcess:
    """Stands for the process that trains trials."""

    exit_code: int | None = None

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.signals: list[int] = []

    def train(self, job: Any) -> None:
        self.jobs.append(job)

    def signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path)


def trial(folder: StudyFolder, process: Any) -> TrialRun:
    folder.run(3).mkdir()
    return TrialRun(folder, 3, {"run_dir": str(folder.run(3)), "optimizer": {"lr": 1e-5}}, process)


def test_a_folder_has_a_unique_name_that_it_keeps_when_it_is_moved(folder: StudyFolder, tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / letter).mkdir()
    name = StudyFolder(tmp_path / "a").name()
    assert StudyFolder(tmp_path / "b").name() != name
    (tmp_path / "a").rename(tmp_path / "c")
    assert StudyFolder(tmp_path / "c").name() == name


# --- in the search ------------------------------------------------------------------------------------------------


def test_a_trial_starts_with_its_config_in_a_file_and_without_an_earlier_outcome(folder: StudyFolder) -> None:
    folder.outcome(3).write_text("{}")
    process = FakeProcess()
    run = trial(folder, process)
    assert read_yaml(folder.config(3))["optimizer"] == {"lr": 1e-5}
    assert [job.config for job in process.jobs] == [str(folder.config(3))]
    assert run.outcome() is None


def test_epochs_are_read_once_as_they_are_written(folder: StudyFolder) -> None:
    run = trial(folder, FakeProcess())
    assert list(run.epochs()) == []
    events = folder.run(3) / "events.jsonl"
    events.write_text(
        '{"event": "step", "time": 1, "step": 1}\n{"event": "epoch", "time": 2, "epoch": 0, "step": 1}\n{"event": "epo'
    )
    assert [event["epoch"] for event in run.epochs()] == [0]
    assert list(run.epochs()) == []


def test_a_trial_gets_one_signal_to_stop(folder: StudyFolder) -> None:
    process = FakeProcess()
    run = trial(folder, process)
    run.stop()
    run.stop()
    assert process.signals == [signal.SIGTERM]


def test_a_written_outcome_counts_even_if_the_process_has_died_since(folder: StudyFolder) -> None:
    process = FakeProcess()
    run = trial(folder, process)
    process.exit_code = -9
    folder.outcome(3).write_text(json.dumps({"state": "done", "reason": "", "history": [{"val_loss": 1.0}]}))
    assert run.outcome() == TrialOutcome("done", "", [{"val_loss": 1.0}])


def test_a_process_that_dies_without_an_outcome_has_failed_unless_it_was_asked_to_stop(folder: StudyFolder) -> None:
    process = FakeProcess()
    run = trial(folder, process)
    process.exit_code = 1
    folder.log(3).write_text("Traceback\nMemoryError: too much\n\n")
    failed = run.outcome()
    assert failed is not None
    assert failed.reason.startswith("its process ended with exit code 1: MemoryError: too much\nsee ")
    process.exit_code = -signal.SIGTERM
    assert run.outcome() == TrialOutcome("failed", f"its process was terminated by signal 15; see {folder.log(3)}")
    run.stop()
    assert run.outcome() == TrialOutcome("stopped")


# --- in the process -------------------------------------------------------------------------------------------------


def train(folder: StudyFolder, monkeypatch: pytest.MonkeyPatch, end: Any) -> TrialOutcome:
    """The outcome of a trial whose run ends with a result or an error."""

    def start() -> Any:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(worker.Trainer, "from_config", lambda *arguments: SimpleNamespace(start=start))
    monkeypatch.setattr(worker, "build_config", lambda raw, folder: None)
    monkeypatch.setattr("paceline.launch.prepare", lambda raw, folder: None)
    folder.run(0).mkdir()
    (folder.run(0) / "events.jsonl").write_text(
        '{"event": "epoch", "time": 1, "epoch": 0, "step": 1, "val_loss": 2.0}\n'
    )
    folder.config(0).write_text(dump_yaml({"folder": str(folder.path), "run_dir": str(folder.run(0))}))
    return worker.train(folder.config(0))


@pytest.mark.parametrize(
    ("history", "value", "measured"),
    [
        ([{"val_loss": 0.5}], None, [{"val_loss": 0.5}]),
        ([], 0.25, [{"value": 0.25}]),
        ([], {"loss": 1, "name": "x"}, [{"loss": 1.0}]),
        ([], {"loss": 1, "all": numpy.zeros(3), "last": torch.zeros(2)}, [{"loss": 1.0}]),
        ([], "words", []),
        ([], None, []),
    ],
)
def test_the_history_is_that_of_the_epochs_or_the_returned_numbers(
    folder, monkeypatch, history: list[Any], value: Any, measured: list[Any]
) -> None:
    assert train(folder, monkeypatch, SimpleNamespace(history=history, value=value)) == TrialOutcome(
        "done", "", measured
    )


def test_a_run_at_its_time_limit_counts_with_what_it_has_measured(folder, monkeypatch) -> None:
    outcome = train(folder, monkeypatch, Stopped("stopped by the time limit at step 7; checkpoint saved"))
    assert outcome.state == "done"
    assert Goal("val_loss", "min").value_of(outcome.history) == 2.0


def test_a_run_that_is_stopped_or_fails_has_this_outcome(folder, monkeypatch) -> None:
    assert train(folder, monkeypatch, Stopped("stopped by SIGTERM at step 7")).state == "stopped"
    for path in folder.run(0).iterdir():
        path.unlink()
    folder.run(0).rmdir()
    assert train(folder, monkeypatch, RankFailed("rank 1 failed")) == TrialOutcome("failed", "rank 1 failed")


def test_a_run_that_is_stopped_before_it_has_a_folder_is_stopped(folder, monkeypatch) -> None:
    monkeypatch.setattr(worker, "read", lambda path: pytest.fail("there is nothing to read"))
    outcome = train(folder, monkeypatch, Stopped("stopped by SIGTERM before it started"))
    assert outcome == TrialOutcome("stopped", "stopped by SIGTERM before it started")


# --- the configs of trials ---------------------------------------------------------------------------------------


def test_a_trial_resumes_in_its_folder_and_your_own_loop_starts_in_a_new_one(folder: StudyFolder) -> None:
    assert tune.trial_run_dir(folder, 1, can_resume=False) == folder.run(1)
    folder.run(1).mkdir()
    assert tune.trial_run_dir(folder, 1, can_resume=True) == folder.run(1)
    assert tune.trial_run_dir(folder, 1, can_resume=False).name == "trial-0001-2"


def test_the_config_of_a_trial_is_for_one_machine_and_without_restarts() -> None:
    raw = tune.trial_config({"launcher": "auto", "run_dir": "x", "resume": "never"}, Path("t"), can_resume=True)
    settled = {"max_restarts": 0, "launcher": "local", "run_dir": "t", "resume": "auto"}
    assert raw == {**settled, "nodes": None, "rendezvous": None}
    assert tune.trial_config({"max_restarts": 2}, Path("t"), can_resume=False)["max_restarts"] == 2
    assert "resume" not in tune.trial_config({}, Path("t"), can_resume=False)


def test_without_a_folder_key_the_folder_is_that_of_the_config(tmp_path: Path) -> None:
    assert TunePlan({"folder": None}, tmp_path, {}).config_of({})["folder"] == str(tmp_path.resolve())


def test_mistakes_of_any_value_are_reported_before_a_trial_starts(tmp_path: Path) -> None:
    raw = {"model_fn": dict, "dataset_fn": dict, "loss_fn": "mse_loss"}
    words = ["optimizer.lr=uniform:0:1", "num_epochs=uniform:1:3", "optimizer.name={sgd,adamm}", "bach_size={1,2}"]
    space, _ = parse(words)
    with pytest.raises(ConfigError) as error:
        tune.tune(TunePlan(raw, tmp_path, space), log=print, show_status=print)
    reported = "\n".join(error.value.problems)
    for problem in ("optimizer.lr=0.0", "num_epochs=1.7", "optimizer.name='adamm'", "bach_size is not a known key"):
        assert reported.count(problem) == 1, reported
    assert not Path("runs").exists()


def test_an_empty_space_and_no_trials_are_refused(tmp_path: Path) -> None:
    raw = {"model_fn": dict, "dataset_fn": dict, "loss_fn": "mse_loss"}
    with pytest.raises(ConfigError) as error:
        tune.tune(TunePlan(raw, tmp_path, {}, trials=0), log=print, show_status=print)
    assert error.value.problems == [
        "no keys to search; give ranges and choices, such as optimizer.lr=log:1e-4:1e-1",
        "--trials 0 and --parallel 1 must be at least 1",
    ]


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_reads_choices_as_a_shell_expands_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[TunePlan] = []

    def stop_here(plan: TunePlan, **outputs: Any) -> None:
        plans.append(plan)
        raise ConfigError("enough")

    monkeypatch.setattr(tune, "tune", stop_here)
    with pytest.raises(ConfigError, match="enough"):
        command.tune(target="digits", words=["batch_size=32", "batch_size=64", "num_epochs=2"], procs="2", trials=7)
    [plan] = plans
    assert {key: str(domain) for key, domain in plan.space.items()} == {"batch_size": "{32, 64}"}
    assert (plan.raw["num_epochs"], plan.raw["procs"], plan.trials, plan.folder.name) == (2, "2", 7, "digits")


def test_without_optuna_the_command_names_the_extra(hide_package: Callable[[str], None]) -> None:
    hide_package("optuna")
    with pytest.raises(MissingExtra, match=re.escape("paceline tune needs optuna; run: pip install 'paceline[tune]'")):
        command.tune(target="digits", words=["seed={1,2}"])
