"""Damaged files of a run folder: no command ends with a traceback. `fuzz.py` does the same for longer, by hand."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from paceline.observe.screen import follower

from .fuzz import findings


def test_no_damage_to_a_run_folder_makes_a_command_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INTERVAL_S", "INCOMPLETE_S", "IDLE_S", "RESUMED_S"):
        monkeypatch.setattr(follower, name, getattr(follower, name))  # `findings` sets them; this puts them back
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    assert list(findings(rounds=8, seed=0, top=tmp_path)) == []
