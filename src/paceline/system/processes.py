"""Other processes of Paceline: the command that starts one, its end with its parent, and its exit codes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DONE = 85  # exit code of a finished rank for its fork server; the launcher receives 0
ENDED_EARLY = -1001  # exit code for the launcher of a rank that ended early with 0, by os._exit or exec
PR_SET_PDEATHSIG = 1
# Removes the working folder from sys.path: a file in it may have the name of a standard module.
CODE = (
    "import sys; home, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path = [home, *filter(None, sys.path)]; "
    "import importlib, paceline; del sys.path[0]; importlib.import_module(module).main()"
)


def command_of(module: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """The command that calls `main()` of a module of this Paceline, with `arguments` in `sys.argv`.

    `options` are options of Python.
    """
    return [sys.executable, "-u", *options, "-c", CODE, str(Path(__file__).parents[2]), module, *arguments]


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent dies. `parent` is the expected pid of the parent."""
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the request to the kernel
        os._exit(1)


@contextmanager
def dying_with(parent: int) -> Iterator[None]:
    """Make the kernel kill this process if its parent dies within the context, where it cannot check. Linux only.

    Only within the context, because for the kernel a parent dies with the thread that started the process.
    """
    if sys.platform == "linux":
        die_with_parent(parent)
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
