"""startup.py: requests to stop that come before a run can hear them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from paceline.errors import Stopped
from paceline.system.startup import note_requests, requests_noted


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    before = {name: signal.signal(name, signal.SIG_DFL) for name in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def import_for(*numbers: int, done: list[str]) -> None:
    with requests_noted():
        for number in numbers:
            send(number)
        done.append("imported")


def test_a_request_is_answered_when_the_imports_are_done_and_the_default_is_back() -> None:
    done: list[str] = []
    with pytest.raises(Stopped, match="stopped by SIGTERM before it began"):
        import_for(signal.SIGTERM, done=done)
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_from_before_counts() -> None:
    note_requests()
    send(signal.SIGUSR1)
    with pytest.raises(Stopped, match="SIGUSR1"), requests_noted():
        pass
    with requests_noted():  # and only once
        pass


def test_a_second_request_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(Stopped, match="SIGTERM"):
        import_for(signal.SIGUSR1, signal.SIGTERM, done=done)
    assert done == []


def test_a_program_keeps_its_own_handlers_and_what_it_ignores() -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with requests_noted():
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
