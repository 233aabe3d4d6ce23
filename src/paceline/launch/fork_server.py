"""The process that ranks are forked from: it has imported torch already, so they begin at once and share its memory.

It has no thread, no GPU and no code of the user's, so forking it is safe. It ends with its launcher, as its ranks do
with it. The launcher's end is `launch/ranks.py`.
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

from paceline.system.exit_codes import DONE, ENDED_EARLY
from paceline.system.parent import dying_with
from paceline.system.signals import SIGNALS, ignore_signals

LOOK_S = 0.05  # between looks at the ranks
IDLE_S = 1.0  # between looks at the launcher while there are none
MUST_LOAD_ANEW = sys.platform == "darwin"  # where system libraries do not survive a fork


class RankSpec(NamedTuple):
    """What a process must know to become a rank."""

    variables: dict[str, str]
    folder: str
    log: str
    arguments: tuple[str, ...]
    is_deaf: bool  # it will save before it stops, so it must not die of the request while it begins


def main() -> None:
    """Fork ranks as they are asked for, and tell how they end, until the launcher is gone."""
    channel, launcher = Connection(int(sys.argv[1])), int(sys.argv[2])
    # Whoever signals all processes of a run means the ranks. What is ignored from outside stays so in them.
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ignore_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # some who start processes have them blocked, as Ray has
    _call("nursery")
    if not MUST_LOAD_ANEW:
        with dying_with(launcher):
            importlib.import_module("paceline.worker.main")
            importlib.import_module("torch._dynamo")  # every optimizer loads it
    os.chdir("/")
    gc.freeze()  # a collection in a rank would write to pages that all share
    ranks: dict[int, int] = {}
    try:
        while os.getppid() == launcher:
            if channel.poll(LOOK_S if ranks else IDLE_S):
                rank, birth = channel.recv()
                pid = _fork(birth, channel, before)
                ranks[pid] = rank
                channel.send((rank, pid, None))
            for pid, rank in list(ranks.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del ranks[pid]
                    code = os.waitstatus_to_exitcode(status)
                    code = {DONE: 0, 0: ENDED_EARLY}.get(code, code)
                    if code:  # what it has started does not outlive it
                        with suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    channel.send((rank, pid, code))
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # the kernel ends the ranks


def _fork(birth: RankSpec, channel: Connection, handlers: Mapping[signal.Signals, Any]) -> int:
    parent = os.getpid()
    with warnings.catch_warnings():  # numpy's threads do nothing yet, and its library knows about forks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        channel.close()
        _become(birth, parent, handlers)
    return pid


def _become(birth: RankSpec, parent: int, handlers: Mapping[signal.Signals, Any]) -> NoReturn:
    """Be a rank from now on."""
    try:
        os.setsid()
        _redirect(birth.log)
        os.environ.clear()
        os.environ.update(birth.variables)
        _call(f"rank-{birth.variables['RANK']}")
        os.chdir(birth.folder)
        time.tzset()
        tempfile.tempdir = None  # it depends on the environment, too
        if not birth.is_deaf:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if MUST_LOAD_ANEW:
            command = [sys.executable, "-u", "-m", "paceline.worker.main", *birth.arguments, str(parent)]
            os.execv(sys.executable, command)
        importlib.invalidate_caches()
        sys.argv = ["paceline.worker.main", *birth.arguments, str(parent)]
        sys.modules["paceline.worker.main"].main()
    except BaseException:  # noqa: BLE001 - whatever it is, this process must never go on as a nursery
        traceback.print_exc()
    os._exit(1)


def _call(name: str) -> None:
    """What `top` and `pkill` know this process by, where the system lets it choose: 15 letters."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"paceline-{name}"[:15])


def _redirect(log: str) -> None:
    """Output and errors go to one log, which is appended to; there is nothing to read."""
    for target, file, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(file, flags, 0o644)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(1, 2)
