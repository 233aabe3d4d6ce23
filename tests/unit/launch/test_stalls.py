"""launch/silence.py: how long no rank has beaten, as the launcher counts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.launch import stalls
from paceline.launch.stalls import StallDetector
from paceline.observe.hangs import RankPosition
from paceline.observe.watchdog import ENDED
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[StallDetector, int], bool]:
    """Looks once a second for so many seconds; whether there was a hang in the end."""
    now = [1000.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])

    def pass_s(judge: StallDetector, seconds: int, gap_s: float = 1.0) -> bool:
        found = False
        for _ in range(seconds):
            now[0] += gap_s
            found = judge.is_hang()
        return found

    return pass_s


def beat(folder: RunFolder, rank: int, number: int) -> None:
    write_json(folder.place(rank), asdict(RankPosition(rank, "here", 7, beat=number)))


def test_silence_of_all_ranks_is_a_hang_and_one_beat_ends_it(folder: RunFolder, pass_s: Callable[..., bool]) -> None:
    judge = StallDetector(folder, 2, timeout_s=5)
    beat(folder, 0, 3)
    beat(folder, 1, 3)
    assert not pass_s(judge, 20)
    assert pass_s(judge, 3)
    beat(folder, 1, 4)
    assert not pass_s(judge, 19)


def test_ranks_that_have_not_begun_or_have_ended_are_not_silent(folder: RunFolder, pass_s: Callable[..., bool]) -> None:
    judge = StallDetector(folder, 2, timeout_s=5)
    assert not pass_s(judge, 100)
    beat(folder, 0, ENDED)
    assert not pass_s(judge, 100)
    beat(folder, 1, 3)
    assert pass_s(judge, 100)


def test_time_in_which_the_launcher_was_stopped_too_is_not_counted(
    folder: RunFolder, pass_s: Callable[..., bool]
) -> None:
    judge = StallDetector(folder, 1, timeout_s=5)
    beat(folder, 0, 3)
    pass_s(judge, 2)
    assert not pass_s(judge, 1, gap_s=3600)


def test_without_a_timeout_there_is_no_hang(folder: RunFolder, pass_s: Callable[..., bool]) -> None:
    judge = StallDetector(folder, 1, timeout_s=0)
    beat(folder, 0, 3)
    assert not pass_s(judge, 100)
