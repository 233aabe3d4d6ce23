"""The cores that this process may use, and the resulting number of threads."""

from __future__ import annotations

import os


def which_cores() -> set[int]:
    """The numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(which_cores())


def chosen_threads(shares: int, *, injected: str | None = None) -> int:
    """Threads for one of `shares` equal shares of this machine: OMP_NUM_THREADS, or cores ÷ shares.

    `injected` is a value of OMP_NUM_THREADS that the user did not set: torchrun sets 1.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    is_number = chosen.isdecimal() and int(chosen) > 0
    return int(chosen) if is_number and chosen != injected else max(1, usable_cores() // shares)
