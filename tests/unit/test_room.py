"""A disk that is full: noticed, told, and waited for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import room
from paceline.progress import Progress
from paceline.room import is_full, is_of_full_disk, write_patiently


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(room.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


@pytest.mark.parametrize(("user", "is_expected"), [(0, False), (1000, True)])
def test_what_is_kept_for_root_is_room_for_root_alone(
    user: int, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bfree=1000, f_bavail=0, f_frsize=4096))
    assert is_full(Path()) is is_expected


def test_it_is_written_as_soon_as_there_is_room(clock: list[float]) -> None:
    progress, tries = Progress(), []

    def write() -> None:
        tries.append(progress.batch)
        if clock[0] < 30:
            raise OSError("weights cannot be written: I/O error: No space left on device (os error 28)")

    write_patiently(write, progress)
    assert 30 <= clock[0] < 40
    assert len(set(tries)) == len(tries)  # it moves in the eyes of the watch
    assert progress.phase == "waiting for room on the disk"


def test_the_wait_has_an_end(clock: list[float]) -> None:
    def write() -> None:
        raise OSError(28, "No space left on device", "weights")

    with pytest.raises(OSError, match="weights"):
        write_patiently(write, Progress())
    assert clock[0] >= room.PATIENCE_S


def test_other_errors_are_not_waited_for(clock: list[float]) -> None:
    def write() -> None:
        raise OSError(13, "Permission denied")

    with pytest.raises(OSError, match="Permission denied"):
        write_patiently(write, Progress())
    assert clock[0] == 0
    assert is_of_full_disk("[Errno 122] Disk quota exceeded")
