"""The lock of a run folder: one process trains a run at a time, and any process can check whether one does."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from paceline.errors import ConfigError
from paceline.run.layout import RunFolder

RETRY_S = 0.001  # between attempts, while other processes only check the lock
TIMEOUT_S = 5.0  # for all attempts


class RunIsLocked(ConfigError):
    """Another process trains the run."""


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the lock of a run, or raise RunIsLocked if another process holds it. The system releases it on exit."""
    with _open(folder) as file:
        if not _lock_exclusively(file):
            raise RunIsLocked(f"{folder.path} is being trained by another process; wait for it, or choose another run")
        yield


def is_locked(folder: RunFolder) -> bool:
    """Whether a process is training this run now. The check takes a shared lock, on which `locked` never fails."""
    try:
        with folder.lock.open() as file:
            return not _lock(file, fcntl.LOCK_SH)
    except OSError:  # no such file, or one of another user that cannot be read
        return False


def _open(folder: RunFolder) -> IO[str]:
    try:
        return folder.lock.open("a+")  # NFS requires reading for a shared lock and writing for an exclusive one
    except OSError as error:
        raise ConfigError(
            f"{folder.path} cannot be written to: {error.strerror}; resume a copy of it, or start a new run from one "
            "of its checkpoints: --resume RUN/checkpoints/step-…"
        ) from None


def _lock_exclusively(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False if another process holds an exclusive lock.

    `is_locked` holds a shared lock for a moment. While this process can take a shared lock too, only such checks are
    in the way, so it tries again.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not _lock(file, fcntl.LOCK_EX):
        if not _lock(file, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(RETRY_S)
    return True


def _lock(file: IO[str], kind: int) -> bool:
    """Lock an open file without waiting; False if the lock of another process prevents it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
