"""The GPUs and cores of each trial when several trials run in parallel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class MachineShare(NamedTuple):
    """The GPUs and cores of one trial; None for all of the machine."""

    gpus: list[str] | None  # as in CUDA_VISIBLE_DEVICES
    cores: list[int] | None


def shares_of(parallel: int, gpus: Sequence[str], cores: Sequence[int]) -> list[MachineShare]:
    """Equal shares for `parallel` trials, which overlap only if there are fewer GPUs or cores than trials.

    All shares have one size, so that a trial computes the same in each of them; a remainder stays idle.
    """
    if parallel == 1:
        return [MachineShare(None, None)]
    parts = zip(_parts(gpus, parallel), _parts(cores, parallel), strict=True)
    return [MachineShare(own_gpus or None, own_cores or None) for own_gpus, own_cores in parts]


def _parts(items: Sequence[T], number: int) -> list[list[T]]:
    if not items:
        return [[] for _ in range(number)]
    size = max(1, len(items) // number)
    parts = max(1, len(items) // size)
    return [list(items[size * (n % parts) : size * (n % parts + 1)]) for n in range(number)]


def visible_gpus(device: str) -> list[str]:
    """The GPUs that this process may use, as in CUDA_VISIBLE_DEVICES; none if the device is the CPU."""
    if device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(n) for n in range(count)]


def pin_to(cores: Sequence[int] | None) -> None:
    """Restrict this process, and those it starts, to these cores; None for no restriction."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
