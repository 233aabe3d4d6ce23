"""home.py: where shared things are."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.system.home import in_home


def test_the_home_of_a_user_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_HOME", "~/shared")
    assert in_home("models", "bert") == tmp_path / "shared/models/bert"
    monkeypatch.setenv("PACELINE_HOME", "")
    assert in_home("models") == Path("shared_data/models")
