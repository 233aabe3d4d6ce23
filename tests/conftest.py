"""What all tests share: run folders go to a temporary folder, and warnings are errors in the ranks too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command of the installed environment to its end and gives what it printed."""

    def run(*command: str, timeout_s: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        program = BIN / command[0]
        return subprocess.run(
            [str(program) if program.exists() else command[0], *command[1:]],
            cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip

    return run
