"""Iterable data sets in the user's own loop: each rank and DataLoader worker reads its share, all ranks end at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.data.overlap import digest_of_samples, check_samples_differ
from paceline.data.loader import collate_of, loader_options
from paceline.data.shard import DataShard
from paceline.data.stream import ShardReader, Notify, announce_epoch
from paceline.errors import DataError
from paceline.world import Exchange, World


class CountedBatch(NamedTuple):
    """A batch, its size, and what can be said of the first samples of whoever has read it."""

    samples: int
    claim: int
    data: Any


class CountingCollate:
    """Collates, and counts before that."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._first: list[Any] | None = []

    def __call__(self, samples: list[Any]) -> CountedBatch:
        claim = 0
        if self._first is not None:
            self._first += samples
            if len(self._first) > 1:
                claim = digest_of_samples(self._first)
                self._first = None
        return CountedBatch(len(samples), claim, self.collate(samples))


class ShardedStream(IterableDataset[Any]):
    """A data set as this rank and this DataLoader worker read it; each pass of a loader is the next epoch."""

    def __init__(self, dataset: Any, *, seed: int, world: World) -> None:
        self.dataset, self.seed, self.world = dataset, seed, world
        self.epoch = 0  # the next one
        # Workers live longer than an epoch, so they must be able to see which one it is.
        self._present: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch by hand, as loops written for DistributedSampler do. Not needed here."""
        self.epoch = epoch

    def begin(self) -> int:
        """Begin the next epoch; which one it is."""
        self._present[0], self.epoch = self.epoch, self.epoch + 1
        return self.epoch - 1

    def __iter__(self) -> Iterator[Any]:
        epoch, info = int(self._present), get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        share = DataShard(self.world.rank * workers + worker, self.world.size * workers)
        announce_epoch(self.dataset, epoch)
        reading = ShardReader(
            self.dataset, share, common=(self.seed, "epoch", epoch), own=(self.seed, "share", epoch, share.index)
        )
        while samples := reading.take(1):
            yield samples[0]


class StreamLoader(DataLoader[Any]):
    """A DataLoader over this rank's share that ends on all ranks at once, and tells how far it is."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        workers: int,
        world: World,
        on_batch: Callable[[int, int, int], None],
        tell: Notify,
    ) -> None:
        """`on_batch` takes the epoch, the batch and how many samples all ranks have in it. All ranks."""
        self.shared = ShardedStream(dataset, seed=seed, world=world)
        collate = CountingCollate(collate_of(dataset))
        options = loader_options(workers, world, seed)
        super().__init__(self.shared, batch_size=batch_size, collate_fn=collate, **options)
        self.__dict__["sampler"] = self.shared  # for loops that call loader.sampler.set_epoch
        self.world, self.on_batch, self.tell = world, on_batch, tell
        self._exchange, self._claims, self._has_told = Exchange(world), dict[int, int](), False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """All ranks."""
        epoch, batches = self.shared.begin(), super().__iter__()
        for batch in count():
            counted: CountedBatch = next(batches, CountedBatch(0, 0, None))
            sizes = self._agreed(batch, counted)
            if not all(sizes):
                self._end(epoch, batch, sizes)
                return
            self.on_batch(epoch, batch, sum(sizes))
            yield counted.data

    def _agreed(self, batch: int, mine: CountedBatch) -> list[int]:
        """How many samples each rank has in this batch. All ranks."""
        numbers = [0] * (2 * self.world.size)
        numbers[self.world.rank], numbers[self.world.size + self.world.rank] = mine.samples, mine.claim
        self._exchange.begin(*numbers)
        numbers = self._exchange.end()
        sizes, claims = numbers[: self.world.size], numbers[self.world.size :]
        workers = max(1, self.num_workers)  # they take turns
        shares = ((rank * workers + batch % workers, claim) for rank, claim in enumerate(claims))
        check_samples_differ(self._claims, "share", shares)
        return sizes

    def _end(self, epoch: int, batch: int, sizes: list[int]) -> None:
        without = ", ".join(str(rank) for rank, size in enumerate(sizes) if not size)
        if not batch:
            raise DataError(
                f"the data set yields no samples for rank {without} of {self.world.size}; let __iter__ give each rank "
                "some, for instance `yield from paceline.shard(samples)`, or use fewer ranks"
            )
        if any(sizes) and not self._has_told:
            self._has_told = True
            self.tell(
                f"epoch {epoch + 1} ends after {batch} batches, because rank {without} has no more; "
                f"at least {sum(sizes)} samples of other ranks are left out"
            )
