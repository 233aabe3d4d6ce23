"""The launcher's side of the fork server: starts the ranks of a run on this machine, and receives their exit codes.

A fork server starts while the launcher itself imports torch, is kept for the next run, and ends with the launcher.
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
from paceline.system.cores import which_cores
from paceline.system.processes import command_of

# Variables that libraries read while they are loaded: a fork server with other values cannot be used.
READ_AT_LOAD = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "PYTHON",
    "PYTORCH", "TORCH",
)  # fmt: skip
# Idle OpenMP threads spin for milliseconds on cores that the threads sending gradients need: with several ranks,
# passive waiting makes a small step twice as fast (benchmarks/NOTES.md).
WAIT_POLICY = "OMP_WAIT_POLICY"
# The order of a set of strings differs between processes, and with it the class indices that a data set may assign.
FIXED_HASHES = {"PYTHONHASHSEED": "0"}


class LocalRanks:
    """The ranks of one run after another, as children of one fork server."""

    def __init__(self, *, is_passive: bool) -> None:
        self.setting, self.owner_pid = _setting(is_passive), os.getpid()
        self._defaults = {**FIXED_HASHES, **({WAIT_POLICY: "passive"} if is_passive else {})}
        _open_standard_files()
        self.channel, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                command_of("paceline.launch.fork_server", str(theirs.fileno()), str(self.owner_pid)),
                env={**self._defaults, **os.environ}, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self.pids: dict[int, int] = {}  # of running ranks
        self.codes: dict[int, int] = {}  # of ranks that have ended: 0, an exit code, or minus the signal

    @property
    def has_ended(self) -> bool:
        """Whether the fork server has ended."""
        return self._process.poll() is not None

    def start(self, specs: Sequence[RankSpec]) -> None:
        """Start ranks 0, 1, 2, and so on."""
        self.pids, self.codes = dict.fromkeys(range(len(specs)), 0), {}
        with suppress(OSError):  # the next `poll` detects that it has ended
            for rank, spec in enumerate(specs):
                variables = {**self._defaults, **os.environ, **spec.variables}
                self.channel.send((rank, spec._replace(variables=variables)))

    def poll(self, timeout_s: float) -> None:
        """Update `pids` and `codes`; wait up to `timeout_s` for a change."""
        try:
            while self.pids and self.channel.poll(timeout_s):
                rank, pid, code = self.channel.recv()
                if code is None:
                    self.pids[rank] = pid
                else:
                    del self.pids[rank]
                    self.codes[rank] = code
                timeout_s = 0.0
        except (EOFError, OSError):  # the fork server has ended, and its ranks with it
            self.codes |= dict.fromkeys(self.pids, self._process.wait() or -signal.SIGKILL)
            self.pids = {}

    def signal(self, number: int, *, to_groups: bool = False) -> None:
        """Send a signal to the ranks, or to their process groups."""
        for pid in filter(None, self.pids.values()):
            with suppress(ProcessLookupError):
                (os.killpg if to_groups else os.kill)(pid, number)

    def end(self, number: int, grace_s: float) -> None:
        """End the ranks by a signal, and by SIGKILL those that still run after `grace_s`."""
        deadline = time.monotonic() + grace_s
        while self.pids and time.monotonic() < deadline + grace_s:  # later: the fork server is stuck
            is_late = time.monotonic() >= deadline
            self.signal(signal.SIGKILL if is_late else number, to_groups=True)
            self.poll(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """End the fork server, and with it any remaining rank."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


_idle: list[LocalRanks] = []  # at most one, not used by any run


def prepare(*, is_passive: bool) -> None:
    """Start a fork server early: it imports torch in parallel with this process."""
    _keep(_acquire(is_passive))


@contextmanager
def ranks(*, is_passive: bool) -> Iterator[LocalRanks]:
    """A context with a fork server for one run; `is_passive` is for several ranks that share the cores."""
    acquired = _acquire(is_passive)
    try:
        yield acquired
    finally:
        if acquired.pids or acquired.has_ended:
            acquired.close()
        else:
            _keep(acquired)


def _acquire(is_passive: bool) -> LocalRanks:
    """The idle fork server, if it was started with the same settings, or a new one."""
    with suppress(IndexError):  # no fork server is idle, or another thread has taken it
        one = _idle.pop()
        if one.owner_pid == os.getpid() and one.setting == _setting(is_passive) and not one.has_ended:
            return one
        _end(one)
    return LocalRanks(is_passive=is_passive)


def _keep(one: LocalRanks) -> None:
    """Keep a fork server for the next run; it replaces an older one."""
    before, _idle[:] = list(_idle), [one]
    for other in before:
        _end(other)


@atexit.register
def _end_all() -> None:
    """Close the idle fork server at exit; otherwise Python would warn about a running child process."""
    while _idle:
        _end(_idle.pop())


def _end(one: LocalRanks) -> None:
    if one.owner_pid == os.getpid():  # otherwise it belongs to the process that this one was forked from
        one.close()


def _setting(is_passive: bool) -> tuple[object, ...]:
    """The settings that a rank inherits from its fork server and cannot change later."""
    read = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_LOAD)}
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return is_passive and WAIT_POLICY not in os.environ, which_cores(), os.getpriority(os.PRIO_PROCESS, 0), limits, read


def _open_standard_files() -> None:
    """Open files 0, 1 and 2 if this process was started without them: a pipe must not get their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
