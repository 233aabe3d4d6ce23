"""When a disk counts as full."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.system.disk import is_full, is_of_full_disk


@pytest.mark.parametrize(("user", "is_expected"), [(0, False), (1000, True)])
def test_reserved_blocks_are_free_space_for_root_only(
    user: int, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bfree=1000, f_bavail=0, f_frsize=4096))
    assert is_full(Path()) is is_expected


def test_the_errors_of_a_full_disk_are_recognized() -> None:
    assert is_of_full_disk("[Errno 122] Disk quota exceeded")
    assert is_of_full_disk("I/O error: No space left on device (os error 28)")
    assert not is_of_full_disk("[Errno 13] Permission denied")
