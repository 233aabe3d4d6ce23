from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.system.signals import SIGNALS, TIME_IS_UP, Stop, describe, handled, heeded


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[list[int]]:
    """Signals are noted here where nobody else takes them; without this they would end the tests."""
    noted: list[int] = []
    before = {name: signal.signal(name, lambda number, frame: noted.append(number)) for name in SIGNALS}
    yield noted
    for name, handler in before.items():
        signal.signal(name, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)  # this thread handles it before the next line, as it is the main one


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_and_ends_nothing(number: signal.Signals, own_handlers: list[int]) -> None:
    stop = Stop()
    with stop.listening():
        assert stop.reason == 0
        send(number)
        assert stop.reason == number
    assert own_handlers == []
    assert stop.reason == number  # still known after
    assert describe(stop.reason) == number.name


def test_after_a_run_signals_do_what_they_did_before(own_handlers: list[int]) -> None:
    with pytest.raises(RuntimeError), Stop().listening():
        raise RuntimeError
    for number in SIGNALS:
        send(number)
    assert own_handlers == list(SIGNALS)


def test_a_request_that_comes_again_is_still_only_a_request() -> None:
    stop = Stop()
    with stop.listening():
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert stop.reason == signal.SIGUSR1


def test_the_time_limit_is_a_reason_once_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    stop = Stop(deadline=1060.0)
    assert stop.reason == 0
    now[0] = 1059.9
    assert stop.reason == 0
    now[0] = 1060.0
    assert stop.reason == TIME_IS_UP
    assert describe(TIME_IS_UP) == "the time limit"


def test_a_signal_goes_before_the_time_limit() -> None:
    stop = Stop(deadline=0.0)
    assert stop.reason == TIME_IS_UP
    with stop.listening():
        send(signal.SIGTERM)
        assert stop.reason == signal.SIGTERM


def test_the_time_limit_is_told_from_every_signal() -> None:
    assert max(signal.valid_signals()) < TIME_IS_UP


def test_in_another_thread_signals_stay_as_they_are(own_handlers: list[int]) -> None:
    stop, inside, leave = Stop(), threading.Event(), threading.Event()

    def run() -> None:
        with stop.listening():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(20)
    send(signal.SIGTERM)
    leave.set()
    thread.join()
    assert own_handlers == [signal.SIGTERM]
    assert stop.reason == 0


def test_what_nohup_has_a_launcher_ignore_stays_ignored_but_a_rank_hears_it(own_handlers: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heard, stop = list[int](), Stop()
    with handled(heeded(SIGNALS), lambda number, frame: heard.append(number)):
        send(signal.SIGTERM)
        send(signal.SIGINT)
    assert heard == [signal.SIGINT]
    with stop.listening():
        send(signal.SIGTERM)
    assert stop.reason == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert own_handlers == []


def test_a_dataloader_worker_leaves_requests_to_its_rank() -> None:
    code = (
        "import os, signal; from paceline.system.signals import SIGNALS, ignore_signals; ignore_signals();"
        "[os.kill(os.getpid(), name) for name in SIGNALS]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n"
