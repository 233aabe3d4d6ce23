"""Stopping on request: all ranks agree and save, and the run can be resumed to the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from exactness_cases import ODD, Images, layer_net
from faults import INDEX, Disturbed, count, events, outcome, saved_steps, send_self, start, stop_step

import paceline
from paceline.checkpoint.store import Store, verify
from paceline.errors import ConfigError
from paceline.run.lock import locked


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(start(run_dir=str(tmp_path_factory.mktemp("undisturbed") / "run")))


def disturbed(visit: int, act: Callable[[], None]) -> Callable[[], Images]:
    log = Path("fetched").resolve()
    return lambda: Disturbed(log, [visit], act)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_and_loses_nothing(undisturbed: dict, number: signal.Signals) -> None:
    stopped_at = stop_step(dataset_fn=disturbed(2, send_self(number)), procs=2)
    assert events("run_stopped")[-1]["reason"] == number.name
    assert saved_steps()[-1] == stopped_at
    assert outcome(start(resume="auto")) == undisturbed


def test_a_signal_to_all_processes_of_a_run_stops_it_and_loses_nothing(undisturbed: dict) -> None:
    """As `scancel` and `systemctl stop` do it."""
    launcher = os.getpid()

    def all_of_them() -> None:
        for pid in (os.getppid(), launcher, os.getpid()):
            os.kill(pid, signal.SIGTERM)

    stopped_at = stop_step(dataset_fn=disturbed(2, all_of_them), procs=2)
    assert saved_steps()[-1] == stopped_at
    assert outcome(start(resume="auto")) == undisturbed


def test_a_terminal_that_closes_stops_a_run_which_loses_nothing(undisturbed: dict) -> None:
    launcher = os.getpid()

    def hang_up() -> None:
        for _ in range(3):  # from the shell, and from the system
            os.kill(launcher, signal.SIGHUP)
            time.sleep(0.3)

    stopped_at = stop_step(dataset_fn=disturbed(2, hang_up), procs=2)
    assert saved_steps()[-1] == stopped_at
    assert outcome(start(resume="auto")) == undisturbed


def test_a_signal_during_evaluation_stops_there_and_evaluates_again_later(undisturbed: dict) -> None:
    log, ask = Path("fetched").resolve(), send_self(signal.SIGTERM)
    validation = {"size": 61, "augment": False}
    # Once when the evaluation is tried, then in each of them.
    stopped_at = stop_step(val_dataset_fn=lambda: Disturbed(log, [3], ask, **validation), procs=2)
    assert stopped_at == 14
    assert [row["step"] for row in events("epoch")] == [7]  # the second evaluation has not ended
    assert outcome(start(resume="auto")) == undisturbed


def test_the_best_checkpoint_is_the_best_though_its_evaluation_was_cut_short() -> None:
    first, second = (row["val_loss"] for row in start(num_epochs=2, run_dir="whole").history)
    mode = "min" if second < first else "max"
    options: dict[str, Any] = {"num_epochs": 2, "checkpoint": {"best": {"metric": "val_loss", "mode": mode}, "keep": 1}}
    log, ask = Path("fetched").resolve(), send_self(signal.SIGTERM)
    validation = {"size": 61, "augment": False}
    stopped_at = stop_step(val_dataset_fn=lambda: Disturbed(log, [2], ask, **validation), **options)
    assert start(resume="auto", **options).metrics["val_loss"] == second
    run = paceline.load("run", checkpoint="best")
    assert (run.step, run.metrics["val_loss"]) == (stopped_at, second)


def test_a_stop_while_a_checkpoint_is_being_written_waits_for_it(undisturbed: dict) -> None:
    stopped_at = stop_step(
        dataset_fn=disturbed(2, send_self(signal.SIGTERM)), procs=2, checkpoint={"every_steps": 1, "keep": 100}
    )
    assert saved_steps()[-1] == stopped_at
    for path in Store(Path("run/checkpoints")).paths():
        verify(path)
    assert not list(Path("run/checkpoints").glob(".*"))
    assert outcome(start(resume="auto")) == undisturbed


def test_the_time_limit_stops_and_saves() -> None:
    class Slow(Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(0.01)
            return super().__getitem__(index)

    stopped_at = stop_step(dataset_fn=lambda: Slow(ODD), model_fn=layer_net, num_epochs=1000, time_limit="6s", procs=2)
    assert events("run_stopped")[-1]["reason"] == "the time limit"
    assert saved_steps()[-1] == stopped_at > 0


def test_signals_to_dataloader_workers_change_nothing(undisturbed: dict) -> None:
    def all_of_them() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)

    assert outcome(start(dataset_fn=disturbed(2, all_of_them), workers=1, procs=2)) == undisturbed


def test_a_second_ctrl_c_ends_at_once_and_leaves_the_checkpoints_whole(undisturbed: dict) -> None:
    launcher, log = os.getpid(), Path("fetched").resolve()

    class Stuck(Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if index == INDEX and count(log) == 2:
                os.kill(launcher, signal.SIGINT)
                time.sleep(1)
                os.kill(launcher, signal.SIGINT)
                threading.Event().wait()
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        start(dataset_fn=lambda: Stuck(ODD, augment=True), procs=2, checkpoint={"every_steps": 1})
    fork_server = psutil.Process().children()  # which stays for the next run
    assert not [rank for one in fork_server for rank in one.children(recursive=True) if rank.status() != "zombie"]
    assert saved_steps()
    for path in Store(Path("run/checkpoints")).paths():
        verify(path)
    assert outcome(start(resume="auto")) == undisturbed


def test_the_programs_own_handlers_are_back_after_a_run() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    stop_step(dataset_fn=disturbed(1, send_self(signal.SIGTERM)), model_fn=layer_net)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_folder_in_use_is_not_trained_twice() -> None:
    from paceline.run.layout import RunFolder

    start(num_epochs=1, model_fn=layer_net)
    with locked(RunFolder(Path("run"))), pytest.raises(ConfigError, match="is being trained by another process"):
        start(model_fn=layer_net, resume="auto")
    with pytest.raises(ConfigError, match="does not fit"):  # nothing was lost of the first run meanwhile
        start(resume="auto")
