"""The process from which ranks are forked: it has imported torch, so ranks start quickly and share its memory.

It has no threads, uses no GPU and runs no user code, so forking it is safe. It ends with its launcher, and its ranks
end with it. The launcher communicates with it through `launch/processes.py`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from paceline.system.processes import DONE, ENDED_EARLY, dying_with
from paceline.system.signals import SIGNALS, ignore_signals

POLL_S = 0.05  # between checks of the ranks
IDLE_S = 1.0  # between checks of the launcher while no rank runs
MUST_EXEC = sys.platform == "darwin"  # its system libraries do not support forks


class RankSpec(NamedTuple):
    """The arguments with which a rank is started."""

    variables: dict[str, str]
    folder: str
    log: str
    arguments: tuple[str, ...]
    has_signals_ignored: (
        bool  # until its loop handles them as requests, so that they do not end a rank that is starting
    )


def main() -> None:
    """Fork ranks on request and report their exit codes, until the launcher ends."""
    channel, launcher = Connection(int(sys.argv[1])), int(sys.argv[2])
    # A signal to all processes of a run is meant for the ranks. Signals that were ignored before stay ignored in them.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ignore_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # Ray, for example, starts processes with them blocked
    _set_name("forker")
    if not MUST_EXEC:
        with dying_with(launcher):
            importlib.import_module("paceline.worker.main")
            importlib.import_module("torch._dynamo")  # every optimizer loads it
    os.chdir("/")
    gc.freeze()  # a garbage collection in a rank would write to pages that all ranks share
    ranks: dict[int, int] = {}
    try:
        while os.getppid() == launcher:
            if channel.poll(POLL_S if ranks else IDLE_S):
                rank, spec = channel.recv()
                pid = _fork(spec, channel, before)
                ranks[pid] = rank
                channel.send((rank, pid, None))
            for pid, rank in list(ranks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del ranks[pid]
                    code = os.waitstatus_to_exitcode(status)
                    code = {DONE: 0, 0: ENDED_EARLY}.get(code, code)
                    if code:  # processes that it has started must not outlive it
                        with suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    channel.send((rank, pid, code))
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # the kernel ends the ranks


def _fork(spec: RankSpec, channel: Connection, handlers: Mapping[signal.Signals, Any]) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():  # numpy's threads are idle, and its library supports forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        channel.close()
        _run_rank(spec, parent, handlers)
    return pid


def _run_rank(spec: RankSpec, parent: int, handlers: Mapping[signal.Signals, Any]) -> NoReturn:
    """Run a rank in this process, which was just forked."""
    try:
        os.setsid()
        _redirect(spec.log)
        os.environ.clear()
        os.environ.update(spec.variables)
        _set_name(f"rank-{spec.variables['RANK']}")
        os.chdir(spec.folder)
        time.tzset()
        tempfile.tempdir = None  # it depends on the environment too
        if not spec.has_signals_ignored:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if MUST_EXEC:
            command = [sys.executable, "-u", "-m", "paceline.worker.main", *spec.arguments, str(parent)]
            os.execv(sys.executable, command)
        importlib.invalidate_caches()
        sys.argv = ["paceline.worker.main", *spec.arguments, str(parent)]
        sys.modules["paceline.worker.main"].main()
    except BaseException:  # noqa: BLE001 - after any error, this process must not continue as a fork server
        traceback.print_exc()
    os._exit(1)


def _set_name(name: str) -> None:
    """Set the name that `top` and `pkill` use for this process: 15 characters, on Linux only."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"paceline-{name}"[:15])


def _redirect(log: str) -> None:
    """Append stdout and stderr to one log; stdin is empty."""
    for target, file, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(file, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
