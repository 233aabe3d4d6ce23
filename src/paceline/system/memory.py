"""How much memory a rank holds: what its device has allocated at most, or on a CPU what is resident now."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch

ASK_S = 1.0  # asking takes as long as a small step


class Memory:
    """The memory of this process, asked for once a second at most; without a word to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked_at, self._used = float("-inf"), 0

    @property
    def used(self) -> int:
        """Bytes, as of less than a second ago."""
        now = time.monotonic()
        if now - self._asked_at >= ASK_S:
            self._asked_at, self._used = now, used_on(self._device)
        return self._used


def used_on(device: torch.device) -> int:
    """Bytes: the most that a GPU's tensors have taken so far, or what this process keeps in memory now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no such file on macOS, which has only the highest so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
