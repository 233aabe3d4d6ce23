"""What the launchers share: what the environment and a `.env` file say, and how a run's end is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import ConfigError, PacelineError, RankFailed, Stopped
from paceline.launch import stopped_error
from paceline.launch.environment import load_dotenv
from paceline.launch.local import failure_told
from paceline.observe.events import read
from paceline.run.layout import RunFolder
from paceline.run.outcome import Outcome


def test_a_dotenv_file_adds_to_the_environment_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THERE", "before")
    monkeypatch.setenv("NEW", "")
    monkeypatch.delenv("NEW")  # and it is gone again after the test
    (tmp_path / ".env").write_text("THERE=after\nNEW=here\nBARE\n")
    load_dotenv(tmp_path)
    assert [os.environ.get(name) for name in ("THERE", "NEW", "BARE")] == ["before", "here", None]


def test_a_dotenv_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"NAME=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env cannot be read \(.*\); write NAME=VALUE lines in UTF-8"):
        load_dotenv(tmp_path)


def test_the_way_to_go_on_can_be_pasted_into_a_shell() -> None:
    stopped = '{"reason": "SIGTERM", "step": 7, "is_saved": true}'
    error = stopped_error(Outcome(Path("/my runs/a"), "", None, stopped))
    assert isinstance(error, Stopped)
    assert str(error).endswith("resume with --resume '/my runs/a'")


@pytest.mark.parametrize("kind", [RankFailed, ConfigError])
def test_a_failure_is_left_for_whoever_watches_from_elsewhere(kind: type[PacelineError], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(kind), failure_told(folder):
        raise kind("lanes=6 is odd")
    with pytest.raises(Stopped), failure_told(folder):
        raise Stopped("no failure")
    assert [(event["event"], event["text"]) for event in read(folder.events)] == [("run_failed", "lanes=6 is odd")]
