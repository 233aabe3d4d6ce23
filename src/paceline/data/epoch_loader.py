"""The loader of the user's own loop, for data sets with a length: every sample once per epoch over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from paceline.data import batches
from paceline.data.epoch_order import Order
from paceline.data.loader import Collate, collate_of, loader_options, no_collate
from paceline.data.order import Indices, indices_of
from paceline.data.rows import as_row_dataset
from paceline.data.share import RankShare
from paceline.data.workers import WorkerLoader
from paceline.world import World


class EpochSampler(Sampler[list[int]]):
    """The batches of one rank for one epoch; each `iter` is the next epoch, in the order of that epoch."""

    def __init__(self, *, size: int, batch_size: int, world: World, order: Order | None, what: str) -> None:
        """Without an order, each epoch has the samples of this rank in order, counted from 0 (`share`)."""
        self.size, self.world, self.order = size, world, order
        self.batches = batches.batches_per_rank(size, batch_size, world.size, what=what)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for loops written for DistributedSampler. Not required."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self.order is not None:
            yield from indices_of(self._spans(), partial(self.order, epoch))
            return
        first = 0
        for span in self._spans():
            yield list(range(first, first + len(span)))
            first += len(span)

    def share(self) -> Indices:
        """The samples of this rank in the order of the data set."""
        return np.concatenate([np.arange(span.start, span.stop) for span in self._spans()])

    def _spans(self) -> Iterator[range]:
        """The positions of each batch."""
        for batch in range(self.batches):
            yield batches.batch_positions(batch, self.world.rank, self.size, self.batches, self.world.size)


class EpochLoader(WorkerLoader):
    """A DataLoader over this rank's batches that reports each of them to `on_batch`."""

    def __init__(
        self,
        dataset: Any,
        sampler: EpochSampler,
        on_batch: Callable[[int, int, int], None],
        collate: Collate | None = None,
        **options: Any,
    ) -> None:
        """`on_batch` takes the epoch, the batch and the number of batches."""
        by_rows = as_row_dataset(dataset) if collate is None else dataset
        used = collate_of(dataset, collate) if by_rows is dataset else no_collate
        if sampler.order is None and sampler.world.size > 1:
            by_rows = RankShare(by_rows, sampler.share())
        super().__init__(by_rows, batch_sampler=sampler, collate_fn=used, **options)
        # torch sets an unused default; loops written for DistributedSampler call loader.sampler.set_epoch.
        self.__dict__["sampler"] = sampler
        self.epochs, self.on_batch = sampler, on_batch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self.epochs.epoch
        for batch, data in enumerate(super().__iter__()):
            self.on_batch(epoch, batch, len(self.epochs))
            yield data


def epoch_loader(
    dataset: Any,
    *,
    batch_size: int,
    seed: int,
    workers: int,
    world: World,
    order: Order | None,
    what: str,
    on_batch: Callable[[int, int, int], None],
    collate: Collate | None = None,
) -> EpochLoader:
    """A loader with the same number of batches on every rank; `what` names the data set in error messages.

    Without an order, its `dataset` is the rank's share, so that an average over `len(loader.dataset)` is correct.
    """
    sampler = EpochSampler(size=len(dataset), batch_size=batch_size, world=world, order=order, what=what)
    return EpochLoader(dataset, sampler, on_batch, collate, **loader_options(workers, world, seed))
