"""Reads the lines of a file that is still being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NO_FILE = 0, 0


class Tail:
    """Returns the lines that were added to a file since the last call; an incomplete last line is returned later."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._inode, self._position = file_identity(path) if from_end else NO_FILE
        self.is_replaced = False  # whether the last lines are the first ones of another file at the same path

    def lines(self, *, to_end: bool = False) -> Iterator[str]:
        """New complete lines; with `to_end` also a last line without a newline."""
        self.is_replaced = False
        try:
            with self._path.open("rb") as file:
                inode, size = _identity(os.fstat(file.fileno()))
                if inode != self._inode or size < self._position:
                    self._inode, self._position, self.is_replaced = inode, 0, True
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return
        if to_end and content and not content.endswith(b"\n"):
            content += b"\n"
        complete, newline, _ = content.rpartition(b"\n")
        self._position += len(complete) + len(newline)
        if newline:
            # A progress bar returns to the start of its line: only its last state is kept.
            yield from (line.rpartition("\r")[2] for line in complete.decode(errors="replace").split("\n"))


def file_identity(path: Path) -> tuple[int, int]:
    """The inode and the size of a file; NO_FILE if it does not exist."""
    try:
        return _identity(path.stat())
    except FileNotFoundError:
        return NO_FILE


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_size
