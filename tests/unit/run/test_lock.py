from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Config
from paceline.errors import ConfigError
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import open_run
from paceline.run.lock import is_locked, locked
from support.runs import create_run

MakeConfig = Callable[..., Config]


def test_a_run_is_trained_by_one_process_at_a_time(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    assert not is_locked(folder)
    with locked(folder):
        assert is_locked(folder)
        text = f"{folder.path} is being trained by another process; wait for it"
        with pytest.raises(ConfigError, match=text), locked(RunFolder(folder.path)):
            pytest.fail("two processes hold the lock")
        assert is_locked(folder)  # the refused attempt has not released it
    assert not is_locked(folder)
    with locked(folder):  # a second time
        pass


def test_the_lock_of_a_killed_process_is_free(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder.lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        assert is_locked(folder)
        process.kill()
        process.wait(20)
    assert not is_locked(folder)


CHECKING = """
import sys, threading
from pathlib import Path
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked

folder, ended = RunFolder(Path(sys.argv[1])), threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
print("up", flush=True)
print(sum(is_locked(folder) for _ in range(3000)), flush=True)
while not ended.is_set():
    is_locked(folder)
"""


def test_checking_the_lock_disturbs_neither_other_checks_nor_a_start(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    with locked(folder):
        pass  # creates the lock file
    command = [sys.executable, "-c", CHECKING, str(folder.path)]
    with ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        checking = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(2)]
        for text in ("up\n", "0\n"):  # both check at once, and neither finds the run locked
            assert [process.stdout.readline() for process in checking if process.stdout is not None] == [text, text]
        for _ in range(2000):
            with locked(folder):
                pass
    assert [process.returncode for process in checking] == [0, 0]


def test_a_child_of_the_training_process_does_not_keep_the_run_locked(make_config: MakeConfig) -> None:
    folder = create_run(make_config(run_dir="run"))
    with locked(folder):
        command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=False)
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
    assert not is_locked(folder)
    child.communicate(timeout=20)


def test_a_file_system_without_locks_is_accepted(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    folder = create_run(make_config(run_dir="run"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(folder):
        assert not is_locked(folder)


def refuse_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a read-only file system, also for root."""
    plain = Path.open

    def open_to_read(path: Path, mode: str = "r", **options: Any) -> Any:
        if mode != "r":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return plain(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_to_read)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)


def test_a_read_only_run_cannot_be_resumed_and_is_not_locked(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = create_run(make_config(run_dir="run"))
    with locked(folder):
        pass
    refuse_writing(monkeypatch)
    message = f"{folder.path} cannot be written to: Read-only file system; resume a copy of it, or start a new run"
    with pytest.raises(ConfigError, match=message), open_run(make_config(), folder.path):
        pytest.fail("it cannot be locked")
    assert not is_locked(folder)


def test_a_lock_in_a_read_only_folder_is_detected(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_run(make_config(run_dir="run"))
    with locked(folder):
        refuse_writing(monkeypatch)
        assert is_locked(folder)


def test_the_lock_is_free_again_after_an_error(make_config: MakeConfig) -> None:
    config = make_config(run_dir="run")
    with pytest.raises(ZeroDivisionError), open_run(config, None):
        raise ZeroDivisionError
    assert not is_locked(RunFolder(Path("run")))
