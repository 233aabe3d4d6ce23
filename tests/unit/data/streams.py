"""Iterable data sets for tests, and a world of one rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from paceline import shard
from support.datasets import StreamDataset
from support.worlds import world_of

ALONE = world_of()


class Numbers(IterableDataset):
    """The numbers below `size`, each with a random one from every generator."""

    def __init__(self, size: int = 30, shuffles: bool = False) -> None:
        self.size, self.shuffles, self.epoch = size, shuffles, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float, float, float]]:
        numbers = list(range(self.size))
        if self.shuffles:
            random.shuffle(numbers)
        for number in shard(numbers):
            yield number, self.epoch, random.random(), np.random.rand(), torch.rand(()).item()


def unsharded(make: Any = lambda number: torch.tensor([number])) -> StreamDataset:
    return StreamDataset(lambda: map(make, range(20)))
