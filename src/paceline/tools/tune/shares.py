"""Which part of this machine a trial gets when several run side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Share(NamedTuple):
    """The GPUs and cores of one trial; None for all there are."""

    gpus: list[str] | None  # as CUDA_VISIBLE_DEVICES names them
    cores: list[int] | None


def shares_of(parallel: int, gpus: Sequence[str], cores: Sequence[int]) -> list[Share]:
    """Equal shares for so many trials: parts of their own while there are enough, else parts that several use.

    All shares have one size, so that a trial computes the same in each of them; what is left over stays idle.
    """
    if parallel == 1:
        return [Share(None, None)]
    parts = zip(_parts(gpus, parallel), _parts(cores, parallel), strict=True)
    return [Share(mine or None, own or None) for mine, own in parts]


def _parts(things: Sequence[T], number: int) -> list[list[T]]:
    if not things:
        return [[] for _ in range(number)]
    size = max(1, len(things) // number)
    places = max(1, len(things) // size)
    return [list(things[size * (n % places) : size * (n % places + 1)]) for n in range(number)]


def gpus_here(device: str) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if device == "cpu":
        return []
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(n) for n in range(count)]


def keep_to(cores: Sequence[int] | None) -> None:
    """Use these cores only, in this process and those it will start."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
