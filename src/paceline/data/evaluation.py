"""The batches of an evaluation: a data set in its own order, every sample on exactly one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Sampler

from paceline.data.loader import Collate, keyed_loader
from paceline.data.order import Indices
from paceline.world import World


class EvalBatch(NamedTuple):
    """One batch of an evaluation: `indices` are known before it is fetched, `data` afterwards."""

    batch: int
    indices: Any  # a list, or a tensor on the device if rows are gathered there (rows.py)
    data: Any = None

    @property
    def key(self) -> tuple[str, int]:
        """The key of its random numbers."""
        return "evaluation data", self.batch


class EvalSampler(Sampler[EvalBatch]):
    """This rank's batches: batch b belongs to rank b modulo the world size."""

    def __init__(
        self, *, size: int, batch_size: int, world: World, convert: Callable[[Indices], Any] = np.ndarray.tolist
    ) -> None:
        """`convert` converts the indices of a batch to a list or a tensor."""
        self.size, self.batch_size, self.world, self.convert = size, batch_size, world, convert
        self.batches = -(-size // batch_size)
        self.rounds = -(-self.batches // world.size)

    def __len__(self) -> int:
        return len(range(self.world.rank, self.batches, self.world.size))

    def __iter__(self) -> Iterator[EvalBatch]:
        for batch in range(self.world.rank, self.batches, self.world.size):
            positions = np.arange(batch * self.batch_size, min((batch + 1) * self.batch_size, self.size))
            yield EvalBatch(batch, self.convert(positions))


def evaluation_loader(
    dataset: Any, *, batch_size: int, seed: int, workers: int, world: World, collate: Collate | None = None
) -> DataLoader[Any]:
    """This rank's batches of a data set in its own order."""
    sampler = EvalSampler(size=len(dataset), batch_size=batch_size, world=world)
    return keyed_loader(dataset, sampler, seed=seed, workers=workers, world=world, collate=collate)
