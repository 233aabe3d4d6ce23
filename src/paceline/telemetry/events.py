"""`events.jsonl`: one JSON object a line, written by rank 0 alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Events:
    """The writer. Ranks other than 0 hold one without a file, so that nobody branches on the rank."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1) if path is not None else None
        self._last: dict[str, float] = {}

    def write(self, event: str, **fields: Any) -> None:
        """Add one event, at once."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, "time": round(time.time(), 3), **fields}) + "\n")

    def write_sometimes(self, event: str, *, every_s: float = 0.5, **fields: Any) -> None:
        """Add an event unless one of its kind was added a moment ago: for things that happen very often."""
        now = time.monotonic()
        if self._file is not None and now - self._last.get(event, 0.0) >= every_s:
            self._last[event] = now
            self.write(event, **fields)

    def close(self) -> None:
        """End of the run."""
        if self._file is not None:
            self._file.close()
