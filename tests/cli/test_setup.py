"""setup.sh in a copy of the checkout. The Makefile is the real one; only Python's venv and pip are replaced."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Replaces Python: `-m venv DIR` copies this script, `-m pip …` is logged, and Python runs everything else.
PYTHON = """#!/bin/sh
case "$2" in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) shift 2; echo "$@" >> "$PIP_LOG"; exit "${PIP_EXIT:-0}" ;;
    *) exec python3 "$@" ;;
esac
"""


class Checkout:
    """A folder with the files that setup.sh needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.folder.mkdir()
        for name in ("setup.sh", "Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.pip_log = folder / "pip.log"

    def start(self, **variables: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in ("PACELINE_HOME", "MAKEFLAGS")}
        env = {**inherited, "PYTHON": str(self.python), "PIP_LOG": str(self.pip_log), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([self.folder / "setup.sh"], env=env, text=True, **pipes)

    def run(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output

    def pip_calls(self) -> list[str]:
        return self.pip_log.read_text().splitlines() if self.pip_log.exists() else []

    def files(self) -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in self.folder.rglob("*")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def leave_lock(checkout: Checkout, process: int) -> Path:
    lock = checkout.folder / ".setup.lock"
    lock.mkdir()
    (lock / "owner").write_text(f"{socket.gethostname()} {process}\n")
    return lock


def test_the_second_time_nothing_is_changed_and_a_line_reports_it(checkout: Checkout) -> None:
    code, output = checkout.run()
    assert code == 0, output
    assert "Everything is set up." in output
    assert "paceline train mnist" in output
    shared = checkout.folder / "shared_data"
    assert sorted(path.name for path in shared.iterdir()) == ["datasets", "models"]
    [call] = checkout.pip_calls()
    assert re.search(r"^install .*--constraint constraints.txt --editable \.\[dev\]$", call)
    before = checkout.files()
    code, output = checkout.run()
    assert code == 0, output
    assert "nothing was changed" in output
    assert checkout.files() == before
    assert len(checkout.pip_calls()) == 1


def test_only_what_is_missing_is_done(checkout: Checkout) -> None:
    checkout.run()
    models = checkout.folder / "shared_data" / "models"
    models.rmdir()
    leave_lock(checkout, os.getpid())  # the lock is not waited for if nothing has to be installed
    code, output = checkout.run()
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("created ")] == [f"created {models}"]
    assert "nothing was changed" not in output
    assert len(checkout.pip_calls()) == 1


def test_other_constraints_are_installed(checkout: Checkout) -> None:
    checkout.run()
    later = (checkout.folder / ".venv" / ".installed").stat().st_mtime + 1
    os.utime(checkout.folder / "constraints.txt", (later, later))
    code, output = checkout.run()
    assert code == 0, output
    assert "nothing was changed" not in output
    assert len(checkout.pip_calls()) == 2


def test_the_shared_folders_go_to_paceline_home(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "home" / "datasets").mkdir(parents=True)
    code, output = checkout.run(PACELINE_HOME="home")  # from where the script is called, as in `paceline`
    assert code == 0, output
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["datasets", "models"]
    assert f"export PACELINE_HOME={tmp_path / 'home'}" in output
    assert not (checkout.folder / "shared_data").exists()


def test_only_one_of_several_processes_installs(checkout: Checkout) -> None:
    started = [checkout.start() for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4, outputs
    assert len(checkout.pip_calls()) == 1
    assert not (checkout.folder / ".setup.lock").exists()


def test_setup_waits_for_another_process_that_installs(checkout: Checkout) -> None:
    lock = leave_lock(checkout, os.getpid())
    process = checkout.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"waiting for process {os.getpid()} on "):
            break
    assert checkout.pip_calls() == []
    shutil.rmtree(lock)
    assert "Everything is set up." in process.communicate(timeout=60)[0]
    assert process.returncode == 0


def test_a_lock_of_a_killed_process_is_named(checkout: Checkout) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = leave_lock(checkout, ended.pid)
    code, output = checkout.run()
    assert code == 1
    assert f"process {ended.pid} ended without removing {lock}; remove that folder" in output


def test_an_install_that_failed_is_tried_again(checkout: Checkout) -> None:
    code, output = checkout.run(PIP_EXIT="1")
    assert code == 1
    assert "the installation failed, see above" in output
    assert not (checkout.folder / ".setup.lock").exists()
    assert checkout.run()[0] == 0
    assert len(checkout.pip_calls()) == 2


def test_a_missing_python_is_named(checkout: Checkout) -> None:
    code, output = checkout.run(PYTHON="python9")
    assert code == 1
    assert output.endswith("python9 is not Python 3.10 or newer with venv; install it, or name another one: "
                           "PYTHON=python3.12 ./setup.sh\n")  # fmt: skip
