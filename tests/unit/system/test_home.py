"""The shared folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.system.home import in_home


def test_a_tilde_in_paceline_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_HOME", "~/shared")
    assert in_home("models", "bert") == tmp_path / "shared/models/bert"
    monkeypatch.setenv("PACELINE_HOME", "")
    assert in_home("models") == Path("shared_data/models")
