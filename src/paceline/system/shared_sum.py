"""Sums of tensors over the processes of one machine, through memory that all of them map.

Owns that memory and the rounds in which it is used, but not the meaning of the tensors.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.system import shared_numbers
from paceline.system.shared_numbers import SharedNumbers

MEMORY_BYTES = 1 << 24  # for all parts together; a container has 64 MB by default
ALIGNMENT = 4096  # bytes
MOST_PROCESSES = 8  # every process reads the parts of all others
# Where the others see the writes of a process in their order: first the part, then the numbers that announce it.
IN_ORDER = ("x86_64", "AMD64")

Combine = Callable[..., torch.Tensor]  # torch.add or torch.maximum


class SharedSum:
    """Combines tensors of all processes, part by part: each writes its part to memory, and reads those of the others.

    The parts of the next round have other places, so a slow process can still read its part while a fast one, which is
    at most one round ahead (`SharedNumbers`), writes the next.
    """

    def __init__(self, path: Path, process: int, processes: int) -> None:
        """`path` is a file that `create` has made; `process` is the index of this process among all `processes`."""
        self._process, self._turn = process, 0
        self._rounds = SharedNumbers(path, process, processes, 1)
        self._part_bytes = MEMORY_BYTES // (2 * processes) // ALIGNMENT * ALIGNMENT
        places = torch.frombuffer(self._rounds.memory, dtype=torch.uint8)[-2 * processes * self._part_bytes :]
        self._places = places.view(2, processes, self._part_bytes)

    def all_reduce(self, tensor: torch.Tensor, combine: Combine) -> None:
        """Replace a contiguous tensor on the CPU by its combination with those of the others, in the same order.

        Returns when that is done. All processes, with tensors of one size.
        """
        for part in torch.split(tensor.view(-1), self._part_bytes // tensor.element_size()):
            self._turn = 1 - self._turn
            parts = [place[: part.nbytes].view(part.dtype) for place in self._places[self._turn]]
            parts[self._process].copy_(part)
            self._rounds.post([part.nbytes])
            sizes = [size for [size] in self._rounds.gather()]
            if len(set(sizes)) > 1:
                raise RuntimeError(f"the processes of this machine sum tensors of different sizes: {sizes} bytes")
            combine(parts[0], parts[1], out=part)
            for other in parts[2:]:
                combine(part, other, out=part)


def create(processes: int) -> Path | None:
    """A new file in memory, which the caller removes once all processes have opened it; None if it would be slower."""
    is_quick = platform.machine() in IN_ORDER and processes <= MOST_PROCESSES and shared_numbers.is_in_memory()
    return shared_numbers.create(processes, 1, more=MEMORY_BYTES) if is_quick else None
