"""The launcher's side of sinks: starts a process for each one, and waits for them when the run is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.observe.screen.console import Screen
from paceline.run.layout import RunFolder
from paceline.system.processes import command_of

FINISH_S = 60.0  # for the last events at the end of a run; importing MLflow alone may take ten
NOTICE_S = 3.0  # after which the screen shows that the command waits for sinks


@contextmanager
def running_sinks(names: Sequence[str], folder: RunFolder) -> Iterator[None]:
    """Run sinks beside a run, over all attempts of its ranks; an error of a sink never ends the run."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name in dict.fromkeys(names):
        try:
            started[name] = _start(name, folder)
        except OSError as error:
            Screen().note(f"warning: {name} cannot be started: {error.strerror}", style="yellow")
    try:
        yield
    finally:
        with suppress(OSError, KeyboardInterrupt):  # the screen is closed, or the user does not want to wait
            _finish(started, folder)
        for process in started.values():
            _kill(process)


def _start(name: str, folder: RunFolder) -> subprocess.Popen[bytes]:
    with folder.tracker_log(name).open("ab") as log:
        return subprocess.Popen(
            command_of("paceline.observe.sinks.process", name, str(folder.path), options=["-W", "ignore"]),
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _finish(started: dict[str, subprocess.Popen[bytes]], folder: RunFolder) -> None:
    """Signal the end of the run to the sinks, wait for them, and warn about sinks that have missed events."""
    screen, deadline = Screen(), time.monotonic() + FINISH_S
    for process in started.values():
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(b".")  # closing is not enough: a DataLoader worker may have inherited this end of the pipe
    if late := [name for name, process in started.items() if not _has_ended(process, NOTICE_S)]:
        screen.note(f"waiting for {' and '.join(late)} to receive the last events; press Ctrl-C to skip")
    for name, process in started.items():
        if not _has_ended(process, deadline - time.monotonic()) or process.returncode:
            problem = "did not receive all events" if process.returncode else f"did not finish within {FINISH_S:g} s"
            log = folder.tracker_log(name)
            screen.note(f"warning: {name} {problem}: {_last_line(log)}\n  full log: {log}", style="yellow")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")


def _has_ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, timeout_s))
    return process.returncode is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
