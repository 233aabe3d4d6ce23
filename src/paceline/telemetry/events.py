"""`events.jsonl`: one JSON object a line. Rank 0 writes it; the launcher does between two lives of the ranks.

Trackers add a warning if they must.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

VERSION = 1  # of the events and their fields, which docs/events.md lists
WAITING_LIMIT = 1 << 20  # bytes of events that wait for a full disk; later ones are lost
REPEATED = ("step", "epoch", "digests")  # what a run says again when it goes on from an earlier step


class Events:
    """The writer. Ranks other than 0 have one without a file, so that no code branches on the rank.

    With `is_held` the file is not touched until `release`: a run that is resumed may still be refused.
    """

    def __init__(self, path: Path | None, *, is_held: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._last: dict[str, float] = {}
        self._waiting = b""
        if not is_held:
            self.release()

    @property
    def is_held(self) -> bool:
        """Whether all events wait until they are released."""
        return self._path is not None and self._file is None

    def release(self) -> None:
        """Open the file, and write what has waited for that."""
        if self._path is None:
            return
        self._file = self._path.open("ab", buffering=0)
        held = self._waiting
        self._waiting = b"" if _ends_whole(self._path) else b"\n"  # the last line of a killed writer may have no end
        if held:
            self._add(held)

    def write(self, event: str, **fields: Any) -> None:
        """Add one event, at once. While the disk is full, events wait; the run does not."""
        if self._path is not None:
            self._add(_line(event, fields))

    def _add(self, lines: bytes) -> None:
        if self._file is not None:
            self._follow_path()
        if len(self._waiting) + len(lines) <= WAITING_LIMIT:
            self._waiting += lines
        if self._file is not None:
            with suppress(OSError):
                written = self._file.write(self._waiting)
                self._waiting = self._waiting[written:]

    def write_sometimes(self, event: str, *, every_s: float = 0.5, **fields: Any) -> None:
        """Add an event unless one of its kind was added a moment ago: for things that happen very often."""
        now = time.monotonic()
        if self._path is not None and now - self._last.get(event, 0.0) >= every_s:
            self._last[event] = now
            self.write(event, **fields)

    def close(self) -> None:
        """End of the run."""
        if self._file is not None:
            self._file.close()

    def _follow_path(self) -> None:
        """Write to the file that has the path now: the old one may have been deleted with the run folder."""
        assert self._path is not None
        assert self._file is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        with suppress(OSError):  # while a folder that was moved is not in its place, its file is the right one
            old, self._file = self._file, self._path.open("ab", buffering=0)
            old.close()


def _line(event: str, fields: dict[str, Any]) -> bytes:
    return json.dumps({"event": event, "time": round(time.time(), 3), **fields}).encode() + b"\n"


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a file, without lines that are torn."""
    with path.open("rb") as file:
        yield from (event for line in file if (event := parse(line)) is not None)


def parse(line: bytes | str) -> dict[str, Any] | None:
    """The event in a line, or None if the line is empty or torn."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def rewind(path: Path, step: int) -> None:
    """Forget what will be said again: steps and epochs that end after `step`."""
    if not path.exists():
        return
    partial = path.with_name(f".{path.name}")
    with partial.open("wb") as file:
        for event in read(path):
            if event["event"] not in REPEATED or event["step"] <= step:
                file.write(json.dumps(event).encode() + b"\n")
    partial.replace(path)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
