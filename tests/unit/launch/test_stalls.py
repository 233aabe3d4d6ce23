"""How the launcher measures the time without a heartbeat of any rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.launch.stalls import StallDetector
from paceline.observe.hangs import RankPosition
from paceline.observe.watchdog import ENDED
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from support.clocks import FakeClock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


@pytest.fixture
def pass_s(clock: FakeClock) -> Callable[[StallDetector, int], bool]:
    """Checks once a second for this number of seconds; whether there is a hang at the end."""

    def pass_s(detector: StallDetector, seconds: int, gap_s: float = 1.0) -> bool:
        found = False
        for _ in range(seconds):
            clock.advance(gap_s)
            found = detector.check()
        return found

    return pass_s


def beat(folder: RunFolder, rank: int, number: int) -> None:
    write_json(folder.place(rank), asdict(RankPosition(rank, "here", 7, beat=number)))


def test_silence_of_all_ranks_is_a_hang_until_one_has_a_heartbeat(
    folder: RunFolder, pass_s: Callable[..., bool]
) -> None:
    detector = StallDetector(folder, 2, timeout_s=5)
    beat(folder, 0, 3)
    beat(folder, 1, 3)
    assert not pass_s(detector, 20)
    assert pass_s(detector, 3)
    beat(folder, 1, 4)
    assert not pass_s(detector, 19)


def test_ranks_that_have_not_started_or_have_ended_do_not_count(folder: RunFolder, pass_s: Callable[..., bool]) -> None:
    detector = StallDetector(folder, 2, timeout_s=5)
    assert not pass_s(detector, 100)
    beat(folder, 0, ENDED)
    assert not pass_s(detector, 100)
    beat(folder, 1, 3)
    assert pass_s(detector, 100)


def test_time_during_which_the_launcher_was_suspended_is_not_counted(
    folder: RunFolder, pass_s: Callable[..., bool]
) -> None:
    detector = StallDetector(folder, 1, timeout_s=5)
    beat(folder, 0, 3)
    pass_s(detector, 2)
    assert not pass_s(detector, 1, gap_s=3600)


def test_without_a_timeout_there_is_no_hang(folder: RunFolder, pass_s: Callable[..., bool]) -> None:
    detector = StallDetector(folder, 1, timeout_s=0)
    beat(folder, 0, 3)
    assert not pass_s(detector, 100)
