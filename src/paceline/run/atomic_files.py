"""Writes files atomically: a reader sees the old content or the new content, never a part of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically."""
    _write(path, content.encode())


def write_json(path: Path, content: dict[str, Any], *, is_lasting: bool = True) -> None:
    """Write a JSON file atomically; one that is not lasting may be lost if the machine loses power."""
    _write(path, (json.dumps(content, indent=2) + "\n").encode(), is_lasting=is_lasting)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only its owner may read."""
    _write(path, content, 0o600)


def sync_folder(path: Path) -> None:
    """Flush the file names of a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, content: bytes, mode: int = 0o666, *, is_lasting: bool = True) -> None:
    """Write a hidden file and rename it; a lasting file survives a loss of power at any moment.

    The parent folder is never created: the launcher must notice a run folder that was moved away.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        if is_lasting:  # without this, the name could reach the disk before the content and show an empty file
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    if is_lasting:
        sync_folder(path.parent)
