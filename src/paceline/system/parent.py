"""No process outlives its parent: not a rank its launcher, not a DataLoader worker its rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent dies. `parent` is the pid that the caller expects it to have."""
    parent = parent or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


@contextmanager
def dying_with(parent: int) -> Iterator[None]:
    """Have this process killed if its parent dies inside, where it cannot look for itself. Linux only.

    For a while, because the kernel counts the end of the thread that has started a process as its parent's death.
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
