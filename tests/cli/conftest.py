"""Fixtures of the tests of commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from paceline import cli


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `paceline` in this process, which has imported torch: for commands that end before they start a rank."""

    def run_here(*command: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [*command])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), shown.out, shown.err)

    return run_here
