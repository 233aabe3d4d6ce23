"""What asks a rank to stop: signals and the time limit. It only sets a flag; the loop agrees on it with all ranks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TIME_IS_UP = 1_000  # among the numbers of signals


class StopAgreed(Exception):
    """All ranks have agreed to stop, in the middle of something that need not be finished."""


class Stop:
    """Why this rank should stop, as a number that ranks can compare: 0 for no reason."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline  # as time.time() counts
        self._signal = 0

    @property
    def reason(self) -> int:
        """The number of a signal, or TIME_IS_UP, or 0."""
        if not self._signal and self._deadline is not None and time.time() >= self._deadline:
            return TIME_IS_UP
        return self._signal

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests inside. Only a main thread can; elsewhere they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(name, self._note) for name in SIGNALS}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def describe(reason: int) -> str:
    """The reason in a word."""
    return "the time limit" if reason == TIME_IS_UP else signal.Signals(reason).name


def ignore_signals() -> None:
    """Leave requests to stop to the rank: for its DataLoader workers, which must go on until it has saved."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)
