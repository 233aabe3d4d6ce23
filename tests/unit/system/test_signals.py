"""Requests to stop: in a launcher, in a command that is still importing, and in a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import Interrupted, Stopped
from paceline.system.signals import (
    SIGNALS,
    TIME_IS_UP,
    Stop,
    StopRequest,
    defer_requests,
    describe,
    handled,
    listening,
    not_ignored,
    requests_deferred,
)
from support.clocks import FakeClock


@pytest.fixture(autouse=True)
def received() -> Iterator[list[int]]:
    """The signals that nothing else handles; without this, they would end the tests."""
    numbers: list[int] = []
    names = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
    before = {name: signal.signal(name, lambda number, frame: numbers.append(number)) for name in names}
    yield numbers
    for name, handler in before.items():
        signal.signal(name, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)  # this thread handles it before the next line, as it is the main one


# --- in a launcher or a search ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_to_a_launcher_is_a_request(number: signal.Signals, received: list[int]) -> None:
    request = StopRequest()
    with listening(request, "ending"):
        send(number)
    assert (request.signal, request.name, request.for_ranks) == (number, number.name, number)
    assert str(request.stopped("before it started")) == f"stopped by {number.name} before it started"
    assert received == []
    send(number)
    assert received == [number]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_second_signal_to_a_launcher_ends_it(number: signal.Signals) -> None:
    request = StopRequest()
    with listening(request, "the run folder is run"):
        send(signal.SIGTERM)
        with pytest.raises(Interrupted, match=f"^ended by {number.name}; the run folder is run$"):
            send(number)
    assert request.signal == signal.SIGTERM


def test_a_second_ctrl_c_is_a_keyboard_interrupt() -> None:
    request = StopRequest()
    with listening(request, "the run folder is run"):
        send(signal.SIGINT)
        assert request.announcement == "SIGINT: saving and stopping; Ctrl-C again ends at once"
        with pytest.raises(KeyboardInterrupt, match="the run folder is run"):
            send(signal.SIGINT)


def test_a_closed_terminal_is_one_request_however_often_it_is_signalled() -> None:
    request = StopRequest()
    with listening(request, "ending"):
        send(signal.SIGHUP, signal.SIGHUP, signal.SIGHUP)
    assert (request.name, request.for_ranks) == ("SIGHUP", signal.SIGTERM)  # ranks may ignore SIGHUP, as nohup has it
    assert request.announcement == "SIGHUP: saving and stopping; a second signal ends at once"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_without_a_request_the_first_signal_ends_the_launcher(number: signal.Signals, received: list[int]) -> None:
    with listening(None, "ending"):
        send(signal.SIGUSR1)
        assert received == [signal.SIGUSR1]  # it keeps the meaning that the program gives it
        with pytest.raises(Interrupted, match=f"ended by {number.name}; ending"):
            send(number)


def test_sigquit_is_never_a_request() -> None:
    request = StopRequest()
    with listening(request, "ending"), pytest.raises(Interrupted, match="SIGQUIT"):
        send(signal.SIGQUIT)
    assert request.signal == 0


def test_a_request_may_be_answered_at_once() -> None:
    request = StopRequest()

    def refuse() -> None:
        raise request.stopped("while no rank was running")

    with listening(request, "ending", refuse), pytest.raises(Stopped, match="SIGTERM while no rank was running"):
        send(signal.SIGTERM)


def test_signals_that_nohup_has_a_launcher_ignore_stay_ignored_but_a_rank_takes_them(received: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    taken, stop = list[int](), Stop()
    with handled(not_ignored(SIGNALS), lambda number, frame: taken.append(number)):
        send(signal.SIGTERM, signal.SIGINT)
    assert taken == [signal.SIGINT]
    with stop.listening():
        send(signal.SIGTERM)
    assert stop.reason == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert received == []


# --- in a command that is still importing -----------------------------------------------------------------------------


@pytest.fixture
def _default_handlers(received: list[int]) -> None:
    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_DFL)


def import_during(*numbers: int, done: list[str]) -> None:
    with requests_deferred():
        send(*numbers)
        done.append("imported")


@pytest.mark.usefixtures("_default_handlers")
def test_a_request_is_answered_after_the_imports_and_the_default_handler_is_restored() -> None:
    done: list[str] = []
    with pytest.raises(Stopped, match="stopped by SIGTERM before it started"):
        import_during(signal.SIGTERM, done=done)
    assert done == ["imported"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("_default_handlers")
def test_an_earlier_request_counts_once() -> None:
    defer_requests()
    send(signal.SIGUSR1)
    with pytest.raises(Stopped, match="SIGUSR1"), requests_deferred():
        pass
    with requests_deferred():
        pass


@pytest.mark.usefixtures("_default_handlers")
def test_a_second_request_does_not_wait_for_the_imports() -> None:
    done: list[str] = []
    with pytest.raises(Stopped, match="SIGTERM"):
        import_during(signal.SIGUSR1, signal.SIGTERM, done=done)
    assert done == []


def test_imports_leave_the_programs_own_handlers_and_ignored_signals(received: list[int]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with requests_deferred():
        send(signal.SIGTERM, signal.SIGUSR1)
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


# --- in a rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_a_rank_is_a_request_and_ends_nothing(number: signal.Signals, received: list[int]) -> None:
    stop = Stop()
    with stop.listening():
        assert stop.reason == 0
        send(number)
        assert stop.reason == number
    assert received == []
    assert stop.reason == number  # still known after
    assert describe(stop.reason) == number.name


def test_after_a_run_signals_have_their_earlier_handlers(received: list[int]) -> None:
    with pytest.raises(RuntimeError), Stop().listening():
        raise RuntimeError
    send(*SIGNALS)
    assert received == list(SIGNALS)


def test_a_repeated_request_to_a_rank_is_still_only_a_request() -> None:
    stop = Stop()
    with stop.listening():
        send(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
        assert stop.reason == signal.SIGUSR1


def test_the_time_limit_is_a_reason_once_it_has_passed(clock: FakeClock) -> None:
    stop = Stop(deadline=1060.0)
    assert stop.reason == 0
    clock.now = 1059.9
    assert stop.reason == 0
    clock.now = 1060.0
    assert stop.reason == TIME_IS_UP
    assert describe(TIME_IS_UP) == "the time limit"


def test_a_signal_takes_precedence_over_the_time_limit() -> None:
    stop = Stop(deadline=0.0)
    assert stop.reason == TIME_IS_UP
    with stop.listening():
        send(signal.SIGTERM)
        assert stop.reason == signal.SIGTERM


def test_the_time_limit_differs_from_every_signal() -> None:
    assert max(signal.valid_signals()) < TIME_IS_UP


def test_outside_the_main_thread_signals_keep_their_handlers(received: list[int]) -> None:
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
    assert received == [signal.SIGTERM]
    assert stop.reason == 0


def test_a_dataloader_worker_leaves_requests_to_its_rank() -> None:
    code = (
        "import os, signal; from paceline.system.signals import SIGNALS, ignore_signals; ignore_signals();"
        "[os.kill(os.getpid(), name) for name in SIGNALS]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n"
