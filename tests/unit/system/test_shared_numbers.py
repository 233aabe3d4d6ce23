"""Numbers that processes show each other through memory: real processes, one of which may be killed."""

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.system import shared_numbers
from paceline.system.shared_numbers import SharedNumbers

ROUNDS = 300
fork = multiprocessing.get_context("fork")


@pytest.fixture
def path() -> Iterator[Path]:
    path = shared_numbers.create(3, 2)
    yield path
    path.unlink()


def run_rounds(path: Path, process: int, results: Connection) -> None:
    numbers, pause = SharedNumbers(path, process, 3, 2), random.Random(process)
    seen = []
    for number in range(ROUNDS):
        if pause.random() < 0.05:  # in another order in each round
            os.sched_yield()
        numbers.post([number, -process])
        seen.append(numbers.gather())
    results.send(seen)


def post_once(path: Path, process: int, results: Connection) -> None:
    SharedNumbers(path, process, 3, 2).post([7])
    results.send(None)
    results.recv()  # until the test has ended


def start(target: object, path: Path, process: int) -> tuple[multiprocessing.Process, Connection]:
    mine, theirs = fork.Pipe()
    started = fork.Process(target=target, args=(path, process, theirs), daemon=True)  # type: ignore[arg-type]
    started.start()
    return started, mine  # type: ignore[return-value]


def test_every_process_sees_the_numbers_of_all_processes_in_each_round(path: Path) -> None:
    started = [start(run_rounds, path, process) for process in range(3)]
    wanted = [[[number, -process] for process in range(3)] for number in range(ROUNDS)]
    for process, results in started:
        assert results.recv() == wanted
        process.join()


def test_a_process_that_was_killed_ends_the_wait_of_the_others(path: Path) -> None:
    numbers = SharedNumbers(path, 0, 3, 2)
    (one, first), (two, second) = (start(post_once, path, process) for process in (1, 2))
    first.recv(), second.recv()
    numbers.post([1])
    assert numbers.gather() == [[1, 0], [7, 0], [7, 0]]
    os.kill(two.pid or 0, signal.SIGKILL)
    two.join()
    first.send(None)
    one.join()
    numbers.post([2])
    with pytest.raises(RuntimeError, match="Connection closed by peer: process 1 of this machine has ended"):
        numbers.gather()


def test_a_row_that_is_half_written_is_not_read(path: Path) -> None:
    numbers, other = (SharedNumbers(path, process, 3, 2) for process in (0, 1))
    numbers.post([1, 2])
    other.post([3, 4])
    assert numbers._read(1) == [3, 4]
    start = other._start_of(1)
    other.memory[start + 8] ^= 1
    assert numbers._read(1) is None
