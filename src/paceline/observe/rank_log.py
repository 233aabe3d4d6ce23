"""The log of a rank: its last part, and the lines that the launcher parses. All other lines are the user's output."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

WARNING = re.compile(r"^WARNING \[rank \d+\] (.*)$")
# The second form is what faulthandler prints before it dumps stacks.
FAILED = re.compile(r"^(FAILED \[rank \d+\]|Fatal Python error: )")
RECOVERED = re.compile(r"^RECOVERED \[rank \d+\]$")


def warning_line(rank: int, text: str) -> str:
    """A warning, on one line."""
    return f"WARNING [rank {rank}] {' '.join(text.split())}"


def failed_line(rank: int) -> str:
    """The line before the traceback of a failure; the screen shows a summary instead of the text after it."""
    return f"FAILED [rank {rank}]"


def recovered_line(rank: int) -> str:
    """The line after stacks that were dumped without a failure; the screen shows the text after it."""
    return f"RECOVERED [rank {rank}]"


def read_end(path: Path, start: int = 0, *, limit: int = 1 << 20) -> str:
    """The log from the byte `start` on, at most its last `limit` bytes; empty if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - limit))
        return file.read().decode(errors="replace")
    return ""
