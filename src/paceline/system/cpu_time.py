"""CPU time, which distinguishes a rank that computes from one that waits before its first step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def others_cpu_s() -> float:
    """CPU seconds of this process without the calling thread, plus those of its children, which may do the work."""
    return time.process_time() - time.thread_time() + sum(map(_cpu_of, _children("self")))


def _children(pid: str) -> Iterator[str]:
    with suppress(OSError):  # it has ended in the meantime
        for path in Path("/proc", pid, "task").glob("*/children"):
            for child in path.read_text().split():
                yield child
                yield from _children(child)


def _cpu_of(pid: str) -> float:
    with suppress(OSError, ValueError):
        fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0
