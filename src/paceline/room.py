"""Room on a disk: whether there is none left, and waiting until somebody makes some."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.progress import Progress

LITTLE = 1 << 16  # bytes, with which nothing can be done
PATIENCE_S = 600.0
LOOK_S = 1.0
NO_ROOM = ("No space left on device", "Disk quota exceeded")


def is_full(path: Path) -> bool:
    """Whether nothing can be written any more where `path` lies."""
    disk = os.statvfs(path)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # some are kept for root
    return blocks * disk.f_frsize < LITTLE


def is_of_full_disk(text: str) -> bool:
    """Whether an error says so; libraries have errors of their own for it."""
    return any(words in text for words in NO_ROOM)


def write_patiently(write: Callable[[], None], progress: Progress) -> None:
    """Write something that must not be lost. Wait while the disk is full, or the run folder is not in its place."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            write()
        except Exception as error:
            is_gone = isinstance(error, FileNotFoundError)  # the launcher puts it back
            if not (is_gone or is_of_full_disk(str(error))) or time.monotonic() > deadline:
                raise
            progress.phase = "waiting for the run folder" if is_gone else "waiting for room on the disk"
            progress.batch = (progress.batch or 0) + 1  # this rank lives
            time.sleep(LOOK_S)
        else:
            return
