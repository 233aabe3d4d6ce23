"""Lines in a rank's log that the launcher understands; all others are the user's own output."""

from __future__ import annotations

import re

WARNING = re.compile(r"^WARNING \[rank \d+\] (.*)$")
# Also what faulthandler says before it dumps stacks.
FAILED = re.compile(r"^(FAILED \[rank \d+\]|Fatal Python error: )")
RECOVERED = re.compile(r"^RECOVERED \[rank \d+\]$")


def warning_line(rank: int, text: str) -> str:
    """A warning, on one line."""
    return f"WARNING [rank {rank}] {' '.join(text.split())}"


def failed_line(rank: int) -> str:
    """What comes after this line is the traceback of the failure; the screen shows its summary instead."""
    return f"FAILED [rank {rank}]"


def recovered_line(rank: int) -> str:
    """The stacks that were dumped before this line were of no failure; the screen shows what follows."""
    return f"RECOVERED [rank {rank}]"
