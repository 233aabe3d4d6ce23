"""The launcher's end of trackers: starts a process for each, and gives them some time when the run is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import MissingExtra
from paceline.observe.console import Screen
from paceline.run.layout import RunFolder
from paceline.system.child import command_of

PATIENCE_S = 60.0  # for what is left to send at the end; to import MLflow alone may take ten
QUIET_S = 3.0  # until it is said what the command waits for


def check(names: Sequence[str]) -> None:
    """A MissingExtra if a tracker is not installed; before anything is done for the run."""
    for name in names:
        if find_spec(name) is None:
            raise MissingExtra(name, name, f"log.trackers={name}")


@contextmanager
def tracking(names: Sequence[str], folder: RunFolder) -> Iterator[None]:
    """Have trackers told of a run, over all lives of its ranks; whatever happens to them does not concern the run."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in names:
        try:
            started[name] = _start(name, folder)
        except OSError as error:
            Screen().note(f"warning: {name} cannot be started: {error.strerror}", style="yellow")
    try:
        yield
    finally:
        with suppress(OSError, KeyboardInterrupt):  # a screen that is gone; somebody who does not want to wait
            _finish(started, folder)
        for process in started.values():
            _end(process)


def _start(name: str, folder: RunFolder) -> subprocess.Popen[bytes]:
    with folder.tracker_log(name).open("ab") as log:
        return subprocess.Popen(
            command_of("paceline.observe.sinks.process", name, str(folder.path), options=["-W", "ignore"]),
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _finish(started: dict[str, subprocess.Popen[bytes]], folder: RunFolder) -> None:
    """Let them send what is left, for a while."""
    screen, deadline = Screen(), time.monotonic() + PATIENCE_S
    for process in started.values():
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b".")  # a DataLoader worker may hold this end of the pipe, too, and keep it open
    if late := [name for name, process in started.items() if not _has_ended(process, QUIET_S)]:
        screen.note(f"waiting for {' and '.join(late)} to take the last numbers; Ctrl-C goes on without")
    for name, process in started.items():
        if not _has_ended(process, deadline - time.monotonic()) or process.returncode:
            why = "could not be told everything" if process.returncode else "was not done in time"
            log = folder.tracker_log(name)
            screen.note(f"warning: {name} {why}: {_last_line(log)}\n  full log: {log}", style="yellow")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it has said nothing")


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, seconds))
    return process.returncode is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
