"""Requests to stop: signals and the time limit.

A launcher or a search treats the first signal as a request and ends at the second (`StopRequest`). A command that is
still importing stores a request and handles it after its imports. In a rank, signals and the time limit only set a
flag, on which the loop agrees with the other ranks (`Stop`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from paceline.errors import Interrupted, Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
IMPORT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # Ctrl-C ends a command that is still importing
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
TIME_IS_UP = 1_000  # larger than any signal number


@contextmanager
def handled(names: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a function for these signals within the context. Has an effect only in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {name: signal.signal(name, handler) for name in names} if is_main else {}
    try:
        yield
    finally:
        for name, previous in before.items():
            signal.signal(name, previous)


def not_ignored(names: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that this process does not ignore; `nohup` and `&` start it with some of them ignored."""
    return [name for name in names if signal.getsignal(name) is not signal.SIG_IGN]


def ignore_signals() -> None:
    """Ignore stop requests in a DataLoader worker, which must work until its rank has saved."""
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)


# --- in a launcher or a search: the first signal requests a stop, the second ends -----------------------------------


class StopRequest:
    """The request to stop that this process has received by a signal."""

    def __init__(self) -> None:
        self.signal = 0  # 0 without a request

    @property
    def name(self) -> str:
        """The name of the signal."""
        return signal.Signals(self.signal).name

    @property
    def for_ranks(self) -> int:
        """The signal to send to the ranks: SIGTERM for SIGHUP, which they ignore under `nohup`; 0 for none."""
        return signal.SIGTERM if self.signal == signal.SIGHUP else self.signal

    @property
    def announcement(self) -> str:
        """The line for the user: what happens now, and how to end immediately."""
        again = "Ctrl-C again" if self.signal == signal.SIGINT else "a second signal"
        return f"{self.name}: saving and stopping; {again} ends at once"

    def note(self, number: int) -> bool:
        """Store a signal as the request; False if it is a second one. A closed terminal sends SIGHUP more than once."""
        if self.signal:
            return number == signal.SIGHUP
        self.signal = number
        return True

    def stopped(self, when: str) -> Stopped:
        """The error for a request that needs no rank to save."""
        return Stopped(f"stopped by {self.name} {when}")


@contextmanager
def listening(
    request: StopRequest | None, ending: str, on_request: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Store the first signal in `request`, and call `on_request`; a second one raises an error with the text `ending`.

    Without a `request`, the first signal raises the error. SIGQUIT always does.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if request is not None and number != signal.SIGQUIT:
            is_first = not request.signal
            if request.note(number):
                if is_first:
                    on_request()
                return
        if number == signal.SIGINT:
            raise KeyboardInterrupt(ending)
        raise Interrupted(f"ended by {signal.Signals(number).name}; {ending}")

    # Without a request, SIGUSR1 keeps the meaning that it has in the program.
    names = ENDING_SIGNALS if request is None else (*ENDING_SIGNALS, signal.SIGUSR1)
    with handled(not_ignored(names), handle):
        yield


# --- in a command that is still importing ----------------------------------------------------------------------------

_request = StopRequest()


def defer_requests() -> None:
    """Store signals that would end this process, until `requests_deferred` exits. Only in the main thread."""
    if threading.current_thread() is threading.main_thread():
        for name in IMPORT_SIGNALS:
            if signal.getsignal(name) is signal.SIG_DFL:  # not if it is ignored, or has a handler of the program
                signal.signal(name, _note)


@contextmanager
def requests_deferred() -> Iterator[None]:
    """Store requests while an exception could leave a module partly imported; raise Stopped at the end."""
    global _request
    defer_requests()
    try:
        yield
    finally:
        for name in IMPORT_SIGNALS:
            if signal.getsignal(name) is _note:
                signal.signal(name, signal.SIG_DFL)
        noted, _request = _request, StopRequest()
    if noted.signal:
        raise noted.stopped("before it started")


def _note(number: int, frame: FrameType | None) -> None:
    if not _request.note(number):  # a second signal does not wait for the end of the imports
        raise Stopped(f"stopped by {signal.Signals(number).name} before it started")


# --- in a rank -------------------------------------------------------------------------------------------------------


class StopAgreed(BaseException):
    """All ranks have agreed to stop, in the middle of an operation that does not have to finish.

    It passes through the user's own loop, where `except Exception` must not catch it.
    """


class Stop:
    """The reason why this rank should stop, as a number that ranks can compare: 0 for no reason."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline  # a time of time.time()
        self._signal = 0

    @property
    def reason(self) -> int:
        """The number of a signal, or TIME_IS_UP, or 0."""
        if not self._signal and self._deadline is not None and time.time() >= self._deadline:
            return TIME_IS_UP
        return self._signal

    def listening(self) -> AbstractContextManager[None]:
        """Treat every signal as a request within the context, even if it was ignored while the rank was starting."""
        return handled(SIGNALS, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


class _Fork(threading.local):
    """The signals that this thread had blocked before it forked, if SIGTERM is a request in this process."""

    blocked: set[int | signal.Signals] | None = None


_fork = _Fork()


def _before_fork() -> None:
    """Hold back a SIGTERM until the child is ready for it."""
    is_request = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Stop)
    _fork.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if is_request else None


def _after_fork_in_parent() -> None:
    if _fork.blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


def _after_fork_in_child() -> None:
    """Let a process that a rank has forked end at SIGTERM, with which `multiprocessing` ends the workers of a pool."""
    if _fork.blocked is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def describe(reason: int) -> str:
    """The name of a reason to stop."""
    return "the time limit" if reason == TIME_IS_UP else signal.Signals(reason).name
