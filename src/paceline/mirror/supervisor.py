"""The launcher's side of a mirror: starts the process that copies, and waits for it when the run is over.

The wait is limited, shows what is left, and is skipped by Ctrl-C. A run that was stopped, perhaps because its machine
is taken away, waits for a shorter time; the newest checkpoint is copied first.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from paceline.config import Config
from paceline.formatting import size_text
from paceline.observe.screen.console import Screen
from paceline.observe.tail import file_identity
from paceline.run.layout import RunFolder
from paceline.system.processes import command_of
from paceline.system.signals import handled

FINISH_S, STALLED_S = 3600.0, 60.0  # the longest wait after a finished run, and without any progress
STOP_S = 60.0  # the longest wait after a run that was stopped or has failed
FIRST_NOTICE_S, NOTICE_S = 3.0, 10.0  # until the first line about the wait, and between two of them
LISTED = 4  # names in a message


@contextmanager
def mirroring(config: Config, folder: RunFolder, *, is_active: bool = True) -> Iterator[None]:
    """Mirror a run inside, over all attempts of its ranks, if its config has a mirror; no error of it ends the run."""
    if config.checkpoint.mirror is None or not is_active:
        yield
        return
    folder.mirror_state.unlink(missing_ok=True)
    process = _start(config, folder)
    try:
        yield
    finally:
        if process is not None:
            with suppress(OSError, KeyboardInterrupt):  # the screen is closed, or there was a second Ctrl-C
                _finish(process, folder)
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(config: Config, folder: RunFolder) -> subprocess.Popen[bytes] | None:
    options = {
        "mirror": config.checkpoint.mirror, "name": config.name, "keep": config.checkpoint.keep,
        "best": config.checkpoint.best.model_dump() if config.checkpoint.best is not None else None,
    }  # fmt: skip
    arguments = (str(folder.path), json.dumps(options), str(file_identity(folder.events)))
    try:
        with folder.tracker_log("mirror").open("ab") as log:
            return subprocess.Popen(
                command_of("paceline.mirror.process", *arguments, options=["-W", "ignore"]),
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        Screen().note(f"warning: the run is not mirrored: {error.strerror}", style="yellow")
        return None


def _finish(process: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Wait until the mirror has everything, within the limits; print what is left, and at the end where it is."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(b".")  # closing is not enough: a DataLoader worker may have inherited this end of the pipe
    screen, wait = Screen(), _Wait(time.monotonic(), is_short=not folder.has_result())
    with suppress(KeyboardInterrupt), handled([signal.SIGINT], _skip), handled([signal.SIGTERM], wait.shorten):
        while process.poll() is None and not wait.is_over(time.monotonic()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            wait.observe(_state_of(folder), time.monotonic())
            if wait.is_notice_due(time.monotonic()):
                screen.note(f"mirror: {_left_text(wait.state)}; press Ctrl-C to skip")
    state = _state_of(folder)
    if process.poll() == 0:
        if "place" in state:
            screen.note(f"mirror: complete; resume on any machine with --resume {state['place']}")
        return
    problem = state.get("error") or "the copying was ended"
    screen.note(f"warning: the mirror is not complete: {_left_text(state)}: {problem}", style="yellow")
    screen.note(f"  the run folder has everything; --resume {folder.path} copies the rest", style="yellow")


def _skip(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Wait:
    """How long to wait: until a limit, or until there has been no progress for some time."""

    def __init__(self, now: float, *, is_short: bool) -> None:
        self.state: dict[str, Any] = {}
        self._deadline = now + (STOP_S if is_short else FINISH_S)
        self._progress_at, self._notice_at = now, now + FIRST_NOTICE_S
        self._began = now
        self._is_shortened = False
        self._least_work: int | None = None

    def shorten(self, number: int, frame: object) -> None:
        """Wait less: this process was asked to end."""
        self._is_shortened = True

    def observe(self, state: dict[str, Any], now: float) -> None:
        """Take the newest state of the process."""
        work = state.get("left_work")  # less than ever: a file that fails again and again is no progress
        if work is not None and (self._least_work is None or work < self._least_work):
            self._least_work, self._progress_at = work, now
        self.state = state

    def is_over(self, now: float) -> bool:
        """Whether to wait no longer."""
        if self._is_shortened:
            self._deadline, self._is_shortened = min(self._deadline, now + STOP_S / 3), False
        return now >= self._deadline or now - self._progress_at >= STALLED_S

    def is_notice_due(self, now: float) -> bool:
        """Whether the next line about the wait is due; later if only logs are left, which take a moment."""
        left = self.state.get("left")
        is_small = left is not None and all(name.startswith("logs/") for name in left)
        is_due = now >= self._notice_at and not (is_small and now - self._began < NOTICE_S)
        self._notice_at = now + NOTICE_S if is_due else self._notice_at
        return is_due


def _state_of(folder: RunFolder) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        state = json.loads(folder.mirror_state.read_text(encoding="utf-8"))
        if isinstance(state, dict):
            return state
    return {}


def _left_text(state: dict[str, Any]) -> str:
    """What is still to be copied, in words."""
    left = state.get("left")
    if not left:
        return "nothing has been copied yet" if left is None else "the last files are being compared"
    listed = ", ".join(left[:LISTED]) + (f" and {len(left) - LISTED} more" if len(left) > LISTED else "")
    return f"{listed} ({size_text(state.get('left_bytes', 0))}) not copied yet"
