"""A disk that is full is noticed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.system.disk import is_full, is_of_full_disk


@pytest.mark.parametrize(("user", "is_expected"), [(0, False), (1000, True)])
def test_what_is_kept_for_root_is_room_for_root_alone(
    user: int, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bfree=1000, f_bavail=0, f_frsize=4096))
    assert is_full(Path()) is is_expected


def test_errors_of_libraries_say_that_a_disk_is_full() -> None:
    assert is_of_full_disk("[Errno 122] Disk quota exceeded")
    assert is_of_full_disk("I/O error: No space left on device (os error 28)")
    assert not is_of_full_disk("[Errno 13] Permission denied")
