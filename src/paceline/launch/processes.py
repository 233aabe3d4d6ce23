"""The launcher's end of the nursery: starts the ranks of a run, and knows how they end.

A nursery starts while the launcher still imports torch itself, stays for the next run, and ends with the launcher.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

from paceline.launch.fork_server import RankSpec
from paceline.system.child import command_of
from paceline.system.cores import which_cores

# What libraries read while they are loaded: a nursery that was started with other values is of no use.
READ_AT_LOAD = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
# Idle OpenMP threads spin on their cores for milliseconds, which the threads that send gradients need: with several
# ranks, passive ones make a small step twice as fast (docs/benchmarks.md).
WAIT_POLICY = "OMP_WAIT_POLICY"
# The order of a set of strings is another one in each process, and with it the numbers that a data set gives classes.
SAME_HASHES = {"PYTHONHASHSEED": "0"}


class LocalRanks:
    """The ranks of one run after the other, as children of one nursery."""

    def __init__(self, *, is_passive: bool) -> None:
        self.setting, self.owner = _setting(is_passive), os.getpid()
        self._defaults = {**SAME_HASHES, **({WAIT_POLICY: "passive"} if is_passive else {})}
        _open_standard_files()
        self.channel, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                command_of("paceline.launch.fork_server", str(theirs.fileno()), str(self.owner)),
                env={**self._defaults, **os.environ}, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.pids: dict[int, int] = {}  # of the living
        self.codes: dict[int, int] = {}  # of those that have ended: 0, an exit code, or minus the signal

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def start(self, births: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on."""
        self.pids, self.codes = dict.fromkeys(range(len(births)), 0), {}
        with suppress(OSError):  # `look` says that it is gone
            for rank, birth in enumerate(births):
                variables = {**self._defaults, **os.environ, **birth.variables}
                self.channel.send((rank, birth._replace(variables=variables)))

    def look(self, seconds: float) -> None:
        """Take in what has happened to the ranks; wait for news for so long."""
        try:
            while self.pids and self.channel.poll(seconds):
                rank, pid, code = self.channel.recv()
                if code is None:
                    self.pids[rank] = pid
                else:
                    del self.pids[rank]
                    self.codes[rank] = code
                seconds = 0.0
        except (EOFError, OSError):  # and with it, its ranks
            self.codes |= dict.fromkeys(self.pids, self._process.wait() or -signal.SIGKILL)
            self.pids = {}

    def signal(self, number: int, *, to_groups: bool = False) -> None:
        """Send a signal to the ranks, or also to the processes that they have started."""
        for pid in filter(None, self.pids.values()):
            with suppress(ProcessLookupError):
                (os.killpg if to_groups else os.kill)(pid, number)

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that do not follow in time."""
        deadline = time.monotonic() + grace_s
        while self.pids and time.monotonic() < deadline + grace_s:  # or the nursery tells nothing any more
            is_late = time.monotonic() >= deadline
            self.signal(signal.SIGKILL if is_late else number, to_groups=True)
            self.look(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """End the process, and with it any rank that is left."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


_waiting: list[LocalRanks] = []  # at most one, which no run uses


def prepare(*, is_passive: bool) -> None:
    """Have a nursery ready soon: its imports go on beside those of this process."""
    _put_back(_taken(is_passive))


@contextmanager
def ranks(*, is_passive: bool) -> Iterator[LocalRanks]:
    """A nursery's ranks, which nobody else uses meanwhile; `is_passive` is for several ranks that share the cores."""
    taken = _taken(is_passive)
    try:
        yield taken
    finally:
        if taken.pids or taken.is_lost:
            taken.close()
        else:
            _put_back(taken)


def _taken(is_passive: bool) -> LocalRanks:
    """The one that waits, if it will do, or a new one."""
    with suppress(IndexError):  # none waits, or another thread was faster
        one = _waiting.pop()
        if one.owner == os.getpid() and one.setting == _setting(is_passive) and not one.is_lost:
            return one
        _end(one)
    return LocalRanks(is_passive=is_passive)


def _put_back(one: LocalRanks) -> None:
    before, _waiting[:] = list(_waiting), [one]
    for other in before:
        _end(other)


@atexit.register
def _end_all() -> None:
    """At the end of this process, which would otherwise complain about a child that is left."""
    while _waiting:
        _end(_waiting.pop())


def _end(one: LocalRanks) -> None:
    if one.owner == os.getpid():  # or it belongs to the process that this one was forked from
        one.close()


def _setting(is_passive: bool) -> tuple[object, ...]:
    """All that a rank has from its nursery and cannot be told later."""
    read = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_LOAD)}
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return is_passive and WAIT_POLICY not in os.environ, which_cores(), os.getpriority(os.PRIO_PROCESS, 0), limits, read


def _open_standard_files() -> None:
    """Have files 0, 1 and 2, which some program starts others without: a pipe must not take their place."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
