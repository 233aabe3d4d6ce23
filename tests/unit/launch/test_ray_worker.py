"""What a worker of Ray does with its rank, and reads from the run folder; no process is started here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch import ray_worker
from paceline.launch.restarts import Restarts
from paceline.launch.stalls import StallDetector
from paceline.observe import events, failures
from paceline.observe.failures import Failure
from paceline.run.layout import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


class FakeRanks:
    """One rank, which calls one of `actions` at each poll, then ends."""

    def __init__(self, *actions: Callable[[], object], code: int = 0) -> None:
        self.pids, self.codes = {0: 1}, {}
        self.signals: list[int] = []
        self._actions, self._code = list(actions), code

    def poll(self, timeout_s: float) -> None:
        if self._actions:
            self._actions.pop(0)()
        else:
            self.pids, self.codes = {}, {0: self._code}

    def signal(self, number: int) -> None:
        self.signals.append(number)


def failed(rank: int, error: str = "ValueError", **facts: object) -> Failure:
    failure = Failure(rank, "here", "training, step 4", error, "broken", None, "log", time.time())
    return replace(failure, **facts)  # type: ignore[arg-type]


def quiet(folder: RunFolder, ranks: int) -> StallDetector:
    """A detector that never finds a hang."""
    return StallDetector(folder, ranks, timeout_s=0)


def save(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / f"step-{step:08}").mkdir(parents=True)


def test_a_rank_that_finished_is_no_failure(folder: RunFolder) -> None:
    assert ray_worker.watch(FakeRanks(), folder, 0, quiet(folder, 2)) is None  # type: ignore[arg-type]


def test_the_failure_of_a_killed_rank_is_written_for_the_other_workers(folder: RunFolder) -> None:
    first = ray_worker.watch(FakeRanks(code=-9), folder, 1, quiet(folder, 2))  # type: ignore[arg-type]
    assert first is not None
    assert (first.rank, first.error, first.is_killed) == (1, "SIGKILL", True)
    assert failures.read(folder, [1])[1] == first


def test_the_cause_is_reported_and_not_its_echo(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failures.write(failed(0, "RuntimeError", is_echo=True), folder)
    actions = iter([lambda: None, lambda: failures.write(failed(1), folder)])
    monkeypatch.setattr(ray_worker.time, "sleep", lambda seconds: next(actions)())
    first = ray_worker.watch(FakeRanks(code=1), folder, 0, quiet(folder, 2))  # type: ignore[arg-type]
    assert first is not None
    assert first.rank == 1


def test_a_failure_elsewhere_ends_the_wait(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "FOLDER_S", 0.0)
    ranks = FakeRanks(lambda: failures.write(failed(1), folder), lambda: pytest.fail("it did not stop"))
    first = ray_worker.watch(ranks, folder, 0, quiet(folder, 2))  # type: ignore[arg-type]
    assert first is not None
    assert first.rank == 1
    assert ranks.pids  # the caller ends the rank


def test_a_request_to_stop_reaches_the_rank(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "FOLDER_S", 0.0)
    ray_worker.write_request(folder, 0)
    ranks = FakeRanks(lambda: None, lambda: ray_worker.write_request(folder, signal.SIGTERM))
    assert ray_worker.watch(ranks, folder, 0, quiet(folder, 1)) is None  # type: ignore[arg-type]
    assert set(ranks.signals) == {signal.SIGTERM}


@pytest.mark.parametrize(
    ("first", "saved_step", "is_restarted"),
    [
        (failed(0, "SIGKILL", is_killed=True), None, True),
        (failed(0), 4, True),
        (failed(0), None, False),  # before the first checkpoint, most likely an error in the user's code
        (failed(0, "ConfigError"), 4, False),
        (failed(0, place="building the model"), 4, False),
        (failed(0, failures.HANG), 4, True),
        (failed(0, failures.HANG), None, True),
        (failed(0, failures.MISMATCH), 4, False),
    ],
)
def test_ranks_are_restarted_unless_the_failure_would_repeat(
    folder: RunFolder, first: Failure, saved_step: int | None, is_restarted: bool
) -> None:
    if saved_step is not None:
        save(folder, saved_step)
    folder.job.touch()
    assert Restarts(1).allow_in(folder, first) == is_restarted
    folder.job.unlink()  # with the run folder, which was deleted
    assert not Restarts(1).allow_in(folder, first)


def test_a_new_attempt_reports_what_ended_the_last_one_and_removes_its_files(folder: RunFolder) -> None:
    save(folder, 6)
    failures.write(failed(1), folder)
    ray_worker.begin_attempt(folder, 2)
    [event] = events.read(folder.events)
    assert event["event"] == "restarted"
    assert event["text"] == "rank 1 failed (training, step 4): ValueError; restarting from step 6"
    assert ray_worker.first_failure(folder, 2) is None


def test_a_checkpoint_later_than_the_last_known_place_of_a_killed_rank_is_reported(folder: RunFolder) -> None:
    save(folder, 200)
    killed = failed(1, "SIGKILL", place="last seen training, epoch 2, step 189", step=189, is_killed=True)
    failures.write(killed, folder)
    ray_worker.begin_attempt(folder, 2)
    [event] = events.read(folder.events)
    assert event["text"] == "rank 1 failed (after step 200): SIGKILL; restarting from step 200"


def test_a_new_attempt_after_a_hang_reports_the_blocking_rank_and_keeps_the_table(folder: RunFolder) -> None:
    folder.hang.write_text("a table")
    failures.write(failed(0, failures.HANG, text="rank 1 is in `x.py:1`; rank 0 waits for it in barrier"), folder)
    ray_worker.begin_attempt(folder, 2)
    [event] = events.read(folder.events)
    assert event["text"] == (
        "hang: rank 1 is in `x.py:1`; rank 0 waits for it in barrier; restarting from the beginning; "
        f"all ranks are in {folder.logs}/hang-1.txt"
    )
    assert (folder.logs / "hang-1.txt").read_text() == "a table"
    assert not folder.hang.exists()


def test_a_first_attempt_reports_nothing(folder: RunFolder) -> None:
    ray_worker.begin_attempt(folder, 2)
    assert not folder.events.exists()
