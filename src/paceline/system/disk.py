"""Free space on a disk: whether none is left, and whether an error says so."""

from __future__ import annotations

import os
from pathlib import Path

LITTLE = 1 << 16  # bytes, with which nothing can be done
NO_ROOM = ("No space left on device", "Disk quota exceeded")


def is_full(path: Path) -> bool:
    """Whether nothing can be written any more where `path` lies."""
    disk = os.statvfs(path)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # some are kept for root
    return blocks * disk.f_frsize < LITTLE


def is_of_full_disk(text: str) -> bool:
    """Whether an error says so; libraries have errors of their own for it."""
    return any(words in text for words in NO_ROOM)
