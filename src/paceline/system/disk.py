"""Detects a full disk, from the free space or from an error."""

from __future__ import annotations

import os
from pathlib import Path

MIN_FREE_BYTES = 1 << 16  # with less, the disk is considered full
FULL_DISK_ERRORS = ("No space left on device", "Disk quota exceeded")


def is_full(path: Path) -> bool:
    """Whether the disk of `path` is full."""
    disk = os.statvfs(path)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # some are reserved for root
    return blocks * disk.f_frsize < MIN_FREE_BYTES


def is_of_full_disk(text: str) -> bool:
    """Whether the text of an error means a full disk; libraries have their own error types for it."""
    return any(error in text for error in FULL_DISK_ERRORS)
