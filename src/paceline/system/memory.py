"""The memory of a rank: the peak that its GPU has allocated, or on a CPU the resident memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch

INTERVAL_S = 1.0  # a measurement takes as long as a small step


class Memory:
    """The memory of this process, measured at most once a second, without synchronizing the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured_at, self._used = float("-inf"), 0

    @property
    def used(self) -> int:
        """Bytes, measured less than a second ago."""
        now = time.monotonic()
        if now - self._measured_at >= INTERVAL_S:
            self._measured_at, self._used = now, used_on(self._device)
        return self._used


def used_on(device: torch.device) -> int:
    """Bytes: the peak of a GPU's tensors so far, or the resident memory of this process now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS does not have this file, and reports only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
