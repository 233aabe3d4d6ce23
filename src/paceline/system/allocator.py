"""The allocator of host memory, which belongs to the C library."""

from __future__ import annotations

import ctypes
import os

# Numbers of malloc.h, of glibc
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # of the user, for the same settings
LARGEST_THRESHOLD = 32 * 2**20  # that glibc accepts; larger tensors are always mapped


def keep_freed_memory() -> None:
    """Have the memory that a step frees used again by the next one, instead of returned to the kernel.

    The kernel would fill each page with zeros again, which takes a few percent of the time of a step on a CPU. Settings
    in the environment take precedence. Other C libraries and allocators have none.
    """
    if any(name in os.environ for name in VARIABLES):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    set_option(MMAP_THRESHOLD, LARGEST_THRESHOLD)
    set_option(TRIM_THRESHOLD, 2**31 - 1)
    set_option(TOP_PAD, 64 * 2**20)
