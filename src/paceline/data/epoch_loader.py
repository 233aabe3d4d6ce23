"""The loader of the user's own loop, for data sets with a length: every sample once per epoch over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Sampler

from paceline.data import batches
from paceline.data.loader import Collate, collate_of, loader_options, no_collate
from paceline.data.order import indices_of
from paceline.data.rows import as_row_dataset
from paceline.world import World


class EpochSampler(Sampler[list[int]]):
    """The batches of one rank for one epoch; each `iter` is the next epoch, in a new order if it shuffles."""

    def __init__(self, *, seed: int, size: int, batch_size: int, world: World, shuffle: bool, what: str) -> None:
        self.seed, self.size, self.world, self.shuffle = seed, size, world, shuffle
        self.batches = batches.batches_per_rank(size, batch_size, world.size, what=what)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, as loops written for DistributedSampler do. Not needed here."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        spans = (
            batches.batch_positions(batch, self.world.rank, self.size, self.batches, self.world.size)
            for batch in range(self.batches)
        )
        if self.shuffle:
            yield from indices_of(spans, seed=self.seed, epoch=epoch, size=self.size)
        else:
            yield from map(list, spans)


class EpochLoader(DataLoader[Any]):
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
        super().__init__(by_rows, batch_sampler=sampler, collate_fn=used, **options)
        # torch leaves an unused default here; loops written for DistributedSampler call loader.sampler.set_epoch.
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
    shuffle: bool,
    what: str,
    on_batch: Callable[[int, int, int], None],
    collate: Collate | None = None,
) -> EpochLoader:
    """A loader with the same number of batches on every rank; `what` names the data set in error messages."""
    sampler = EpochSampler(seed=seed, size=len(dataset), batch_size=batch_size, world=world, shuffle=shuffle, what=what)
    return EpochLoader(dataset, sampler, on_batch, collate, **loader_options(workers, world, seed))
