"""What asks to stop: signals and the time limit. In a rank they only set a flag; the loop agrees on it with others."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
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

    def listening(self) -> AbstractContextManager[None]:
        """Take signals as requests inside."""
        return handled(SIGNALS, self._note)  # also those that were ignored while the rank was starting

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


@contextmanager
def handled(names: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a function called for signals inside. Only a main thread can; elsewhere they stay as they are."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {name: signal.signal(name, handler) for name in names} if is_main else {}
    try:
        yield
    finally:
        for name, previous in before.items():
            signal.signal(name, previous)


def heeded(names: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those signals that this process does not ignore; `nohup` and `&` have some of them ignored."""
    return [name for name in names if signal.getsignal(name) is not signal.SIG_IGN]


def describe(reason: int) -> str:
    """The reason in a word."""
    return "the time limit" if reason == TIME_IS_UP else signal.Signals(reason).name


def ignore_signals() -> None:
    """Leave requests to stop to the rank: for its DataLoader workers, which must go on until it has saved."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)
