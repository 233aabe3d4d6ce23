"""Lines of a file that is still being written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NO_FILE = 0, 0


class Tail:
    """The lines that have been added to a file since it was last asked; a torn last line waits for its end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._file, self._position = identity_of(path) if from_end else NO_FILE
        self.is_anew = False  # whether the last lines are the first ones of another file under the same name

    def lines(self, *, to_end: bool = False) -> Iterator[str]:
        """New whole lines; `to_end` takes a last line without an end too."""
        self.is_anew = False
        try:
            with self._path.open("rb") as file:
                now, size = _identity(os.fstat(file.fileno()))
                if now != self._file or size < self._position:
                    self._file, self._position, self.is_anew = now, 0, True
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return
        if to_end and content and not content.endswith(b"\n"):
            content += b"\n"
        whole, newline, _ = content.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        if newline:
            # A progress bar goes back to the start of its line: what it shows last is what counts.
            yield from (line.rpartition("\r")[2] for line in whole.decode(errors="replace").split("\n"))


def identity_of(path: Path) -> tuple[int, int]:
    """Which file this is, and its size; NO_FILE if there is none."""
    try:
        return _identity(path.stat())
    except FileNotFoundError:
        return NO_FILE


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_ino, facts.st_size
