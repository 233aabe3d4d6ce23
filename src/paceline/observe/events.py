"""`events.jsonl`: one JSON object per line. Rank 0 writes it, and the launcher between two attempts of the ranks.

A sink that fails adds a warning.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.observe.event_types import Event, Parser, parse

VERSION = 2  # of the events and their fields, which docs/events.md lists
UNWRITTEN_LIMIT = 1 << 20  # bytes of events that are kept in memory while the disk is full; later ones are lost
LINES_LISTED = 10  # numbers of damaged lines in a message
STARTED = b'{"event": "run_started"'
# Removed where a run resumes from an earlier step.
REPEATED = ("step", "pace", "logged", "image", "histogram", "evaluation", "epoch", "digests")


class Events:
    """Writes events. Ranks other than 0 have a writer without a file, so that other code does not depend on the rank.

    With `is_held` the file is not touched until `release`: a resumed run may still be rejected.
    """

    def __init__(self, path: Path | None, *, is_held: bool = False) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._last: dict[str, float] = {}
        self._unwritten = bytearray()
        self._is_batch = False
        if not is_held:
            self.release()

    @property
    def is_held(self) -> bool:
        """Whether events are kept in memory until `release`."""
        return self._path is not None and self._file is None

    def release(self) -> None:
        """Open the file, and write the events that were held."""
        if self._path is None:
            return
        self._file = self._path.open("ab", buffering=0)
        is_any_held = bool(self._unwritten)
        if not _ends_with_newline(self._path):  # a writer that was killed may have left an incomplete line
            self._unwritten[:0] = b"\n"
        if is_any_held:
            self._flush()

    def write(self, event: str, **fields: Any) -> None:
        """Write one event; a field `time` replaces the current time. While the disk is full, events stay in memory."""
        if self._path is None:
            return
        line = _line(event, fields)
        if len(self._unwritten) + len(line) <= UNWRITTEN_LIMIT:
            self._unwritten += line
        if not self._is_batch:
            self._flush()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write all events of the body with a single system call."""
        self._is_batch = True
        try:
            yield
        finally:
            self._is_batch = False
            if self._unwritten:
                self._flush()

    def write_sometimes(self, event: str, *, every_s: float = 0.5, **fields: Any) -> None:
        """Write an event unless one of its kind was written less than `every_s` ago."""
        now = time.monotonic()
        if self._path is not None and now - self._last.get(event, 0.0) >= every_s:
            self._last[event] = now
            self.write(event, **fields)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        if self._file is None:
            return
        self._follow_path()
        with suppress(OSError):
            written = self._file.write(self._unwritten)
            del self._unwritten[:written]

    def _follow_path(self) -> None:
        """Write to the file that is at the path now: the old one may have been deleted with the run folder."""
        assert self._path is not None
        assert self._file is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        with suppress(OSError):  # while the run folder is being moved, events belong in the old file
            old, self._file = self._file, self._path.open("ab", buffering=0)
            old.close()


def _line(event: str, fields: dict[str, Any]) -> bytes:
    content = {"event": event, "time": round(time.time(), 3), **fields}
    line = json.dumps(content)
    if "\\ud" in line:  # possibly half of a surrogate pair, from a file name that is not UTF-8: invalid in JSON
        line = json.dumps(json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")))
    return line.encode() + b"\n"


def read(path: Path, damaged: list[int] | None = None) -> Iterator[Event]:
    """The events in a file; damaged lines are skipped, and their numbers are added to `damaged`."""
    parser = Parser()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            event = parser.parse(line)
            if event is not None:
                yield event
            elif damaged is not None and line.strip() and line.endswith(b"\n"):  # else it is still being written
                damaged.append(number)


def damage_text(lines: Sequence[int]) -> str:
    """A message such as "2 damaged lines of events.jsonl were skipped: 3, 17"."""
    listed = ", ".join(map(str, lines[:LINES_LISTED])) + (", …" if len(lines) > LINES_LISTED else "")
    words = "damaged line of events.jsonl was" if len(lines) == 1 else "damaged lines of events.jsonl were"
    return f"{len(lines)} {words} skipped: {listed}"


def failed_attempts(path: Path) -> tuple[int, float]:
    """The attempts in a file of earlier attempts that ended neither finished nor on request; seconds of all attempts.

    Parses only the first and the last lines of each attempt, because the others may be many.
    """
    failed, seconds, began = 0, 0.0, None
    newest: deque[bytes] = deque(maxlen=3)  # the last line may be incomplete
    with path.open("rb") as file:
        for line in chain(file, [STARTED]):
            if line.startswith(STARTED):
                last = next(filter(None, map(parse, reversed(newest))), None)
                if began is not None and last is not None:
                    failed += last["event"] not in ("run_stopped", "run_finished")
                    seconds += max(last["time"] - began, 0.0)
                first = parse(line)
                began = first["time"] if first is not None else None
            newest.append(line)
    return failed, seconds


def rewind(path: Path, step: int) -> None:
    """Remove the steps and epochs after `step`, which the resumed run reports again."""
    if not path.exists():
        return
    partial = path.with_name(f".{path.name}")
    with path.open("rb") as lines, partial.open("wb") as file:
        for line in lines:
            event = parse(line)
            if event is not None and (event["event"] not in REPEATED or event["step"] <= step):
                file.write(line.rstrip(b"\n") + b"\n")
    partial.replace(path)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"
