"""The result of a run is written also if the disk is full for a while."""

from __future__ import annotations

import time

import pytest

from paceline.observe.progress import Progress
from paceline.worker import result
from paceline.worker.result import write_patiently
from support.clocks import FakeClock


@pytest.fixture
def clock(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock.now = 0.0
    monkeypatch.setattr(time, "sleep", clock.advance)
    return clock


def test_it_is_written_as_soon_as_there_is_free_space(clock: FakeClock) -> None:
    progress, tries = Progress(), []

    def write() -> None:
        tries.append(progress.batch)
        if clock.now < 30:
            raise OSError("weights cannot be written: I/O error: No space left on device (os error 28)")

    write_patiently(write, progress)
    assert 30 <= clock.now < 40
    assert len(set(tries)) == len(tries)  # it moves in the eyes of the watch
    assert progress.phase == "waiting for free space on the disk"


def test_the_wait_has_an_end(clock: FakeClock) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device", "weights")

    with pytest.raises(OSError, match="weights"):
        write_patiently(write, Progress())
    assert clock.now >= result.GIVE_UP_AFTER_S


def test_other_errors_are_not_waited_for(clock: FakeClock) -> None:
    def write() -> None:
        raise OSError(13, "Permission denied")

    with pytest.raises(OSError, match="Permission denied"):
        write_patiently(write, Progress())
    assert clock.now == 0
