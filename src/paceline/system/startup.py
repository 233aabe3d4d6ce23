"""Requests to stop that come while a command still imports its modules: noted, and answered as those to a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.errors import Stopped

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_noted: list[int] = []


def note_requests() -> None:
    """Note signals that would end this process, until `requests_noted` is left. Only a main thread can."""
    if threading.current_thread() is threading.main_thread():
        for name in REQUESTS:
            if signal.getsignal(name) is signal.SIG_DFL:  # and not one that is ignored, or the program's own
                signal.signal(name, _note)


@contextmanager
def requests_noted() -> Iterator[None]:
    """Note requests inside, where an exception could leave a module half imported; raise Stopped at the end."""
    note_requests()
    try:
        yield
    finally:
        for name in REQUESTS:
            if signal.getsignal(name) is _note:
                signal.signal(name, signal.SIG_DFL)
        noted = _noted.copy()
        _noted.clear()
    if noted:
        raise _stopped_by(noted[0])


def _note(number: int, frame: FrameType | None) -> None:
    if _noted:  # a second signal does not wait for the end of the imports
        raise _stopped_by(number)
    _noted.append(number)


def _stopped_by(number: int) -> Stopped:
    return Stopped(f"stopped by {signal.Signals(number).name} before it began")
