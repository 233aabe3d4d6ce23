"""Integers that the processes of one machine exchange through shared memory, without messages.

Owns the file that all of them map, and its format, but not the meaning of the numbers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

AWAKE_S = 1e-3  # a waiting process reads the memory again and again, before it starts to sleep
SLEEP_SHARE, LONGEST_SLEEP_S = 0.05, 1e-3  # a sleep is a share of the time it has waited
CHECK_EVERY_S = 0.5  # while waiting, to detect processes that have ended
PAGE = 4096  # bytes
MEMORY_FOLDER = Path("/dev/shm")  # on Linux; elsewhere the file is in the folder for temporary files


class SharedNumbers:
    """One row of numbers per process, in rounds: a round ends when all processes have posted their row.

    A process alternates between two slots, because the fastest process is at most one round ahead: it ends a round
    only when all others have posted theirs. Each row has a checksum, since a reader may see a partly written row.
    """

    def __init__(self, path: Path, process: int, processes: int, width: int) -> None:
        """`process` is the index of this process among all `processes`; a row has up to `width` numbers."""
        self._process, self._processes = process, processes
        self._format = struct.Struct(f"=Q{width}qQ")  # the round, the numbers, the checksum
        self._width, self._round = width, 0
        # Open until the end: locks on a file are released when its process closes it, or ends.
        self._file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._file)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, process)
        self.memory = mmap.mmap(self._file, 0)  # the whole file

    def post(self, numbers: Sequence[int]) -> None:
        """Start the next round with this process's numbers, which the others can read from now on."""
        self._round += 1
        row = self._format.pack(self._round, *numbers, *[0] * (self._width - len(numbers)), 0)
        row = row[:-8] + struct.pack("=Q", crc32(row[:-8]))
        self.memory[(start := self._start_of(self._process)) : start + len(row)] = row

    def gather(self) -> list[Sequence[int]]:
        """The rows of this round, in the order of the processes; waits until all have posted theirs.

        Raises a RuntimeError if another process has ended before it did.
        """
        return [self._wait_for(process) for process in range(self._processes)]

    def _wait_for(self, process: int) -> Sequence[int]:
        if (row := self._read(process)) is not None:
            return row
        since = time.monotonic()
        check_at = since + CHECK_EVERY_S
        while (row := self._read(process)) is None:
            now = time.monotonic()
            if now - since < AWAKE_S:
                os.sched_yield()  # another process may need this core; a sleep of any length takes 50 µs more
            else:
                time.sleep(min(SLEEP_SHARE * (now - since), LONGEST_SLEEP_S))
            if now > check_at:
                has_ended = self._has_ended(process)
                if has_ended and self._read(process) is None:  # it may have posted its row just before it ended
                    raise RuntimeError(f"Connection closed by peer: process {process} of this machine has ended")
                check_at = now + CHECK_EVERY_S
        return row

    def _read(self, process: int) -> Sequence[int] | None:
        """The row of a process in this round; None if it has not been posted yet."""
        start = self._start_of(process)
        row = self.memory[start : start + self._format.size]
        number, *numbers, checksum = self._format.unpack(row)
        return numbers if number == self._round and checksum == crc32(row[:-8]) else None

    def _start_of(self, process: int) -> int:
        return (2 * process + self._round % 2) * self._format.size

    def _has_ended(self, process: int) -> bool:
        """Whether a process no longer holds the lock that it has taken at its start."""
        if process == self._process:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, process)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, process)
        return True


def size_of(processes: int, width: int) -> int:
    """The size of the file in bytes."""
    return 2 * processes * struct.calcsize(f"=Q{width}qQ")


def create(processes: int, width: int, more: int = 0) -> Path:
    """A new file in memory, which the caller removes once all processes have opened it; `more` bytes follow the rows.

    Raises an OSError without the memory for it.
    """
    file, name = tempfile.mkstemp(prefix="paceline-", dir=MEMORY_FOLDER if is_in_memory() else None)
    path = Path(name)
    try:
        with os.fdopen(file, "wb") as opened:  # written now: without the memory, a later access would end the process
            opened.write(bytes(-(-size_of(processes, width) // PAGE) * PAGE + more))
    except OSError:
        path.unlink()
        raise
    return path


def is_in_memory() -> bool:
    """Whether new files are in memory, not on a disk."""
    return os.access(MEMORY_FOLDER, os.W_OK)
