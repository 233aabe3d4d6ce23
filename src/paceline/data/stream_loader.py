"""The loader of the user's own loop, for iterable data sets.

Each rank and DataLoader worker reads its shard; an epoch ends on all ranks after the same number of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.loader import Collate, collate_of, loader_options
from paceline.data.overlap import check_samples_differ, digest_of_samples
from paceline.data.shard import DataShard
from paceline.data.stream import ShardReader, Warn, announce_epoch
from paceline.data.workers import WorkerLoader
from paceline.errors import DataError
from paceline.world import World


class CountedBatch(NamedTuple):
    """A batch, its size, and a digest of the first samples of the process that has read it, or 0."""

    samples: int
    digest: int
    data: Any


class CountingCollate:
    """Counts samples, then collates them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._first: list[Any] | None = []

    def __call__(self, samples: list[Any]) -> CountedBatch:
        digest = 0
        if self._first is not None:
            self._first += samples
            if len(self._first) > 1:
                digest = digest_of_samples(self._first)
                self._first = None
        return CountedBatch(len(samples), digest, self.collate(samples))


class ShardedStream(IterableDataset[Any]):
    """The shard of a data set that this rank and DataLoader worker read; each pass over a loader is the next epoch."""

    def __init__(self, dataset: Any, *, seed: int, world: World) -> None:
        self.dataset, self.seed, self.world = dataset, seed, world
        self.epoch = 0  # the next one
        # Workers persist over epochs, so the number of the current epoch is in shared memory.
        self._present: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for loops written for DistributedSampler. Not required."""
        self.epoch = epoch

    def start_epoch(self) -> int:
        """Start the next epoch and return its number."""
        self._present[0], self.epoch = self.epoch, self.epoch + 1
        return self.epoch - 1

    def __iter__(self) -> Iterator[Any]:
        epoch, info = int(self._present), get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shard = DataShard(self.world.rank * workers + worker, self.world.size * workers)
        announce_epoch(self.dataset, epoch)
        reader = ShardReader(
            self.dataset, shard, common=(self.seed, "epoch", epoch), own=(self.seed, "share", epoch, shard.index)
        )
        while samples := reader.take(1):
            yield samples[0]


class StreamLoader(WorkerLoader):
    """A DataLoader over this rank's shard that ends on all ranks together and reports each batch to `on_batch`."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        workers: int,
        world: World,
        on_batch: Callable[[int, int, int], None],
        warn: Warn,
        collate: Collate | None = None,
    ) -> None:
        """`on_batch` takes the epoch, the batch and the number of samples of all ranks in it. All ranks."""
        self.sharded = ShardedStream(dataset, seed=seed, world=world)
        counting = CountingCollate(collate_of(dataset, collate))
        options = loader_options(workers, world, seed)
        super().__init__(self.sharded, batch_size=batch_size, collate_fn=counting, **options)
        self.__dict__["sampler"] = self.sharded  # for loops that call loader.sampler.set_epoch
        self.world, self.on_batch, self.warn = world, on_batch, warn
        self._exchange = world.exchange(2 * world.size)
        self._digests, self._has_warned = dict[int, int](), False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the next epoch. All ranks."""
        epoch, batches = self.sharded.start_epoch(), super().__iter__()
        for batch in count():
            counted: CountedBatch = next(batches, CountedBatch(0, 0, None))
            sizes = self._exchange_sizes(batch, counted)
            if not all(sizes):
                self._end(epoch, batch, sizes)
                return
            self.on_batch(epoch, batch, sum(sizes))
            yield counted.data

    def _exchange_sizes(self, batch: int, mine: CountedBatch) -> list[int]:
        """The number of samples of each rank in this batch. All ranks."""
        numbers = [0] * (2 * self.world.size)
        numbers[self.world.rank], numbers[self.world.size + self.world.rank] = mine.samples, mine.digest
        self._exchange.begin(*numbers)
        numbers = self._exchange.end()
        sizes, digests = numbers[: self.world.size], numbers[self.world.size :]
        workers = max(1, self.num_workers)  # which read batches round-robin
        shards = ((rank * workers + batch % workers, digest) for rank, digest in enumerate(digests))
        check_samples_differ(self._digests, "shard", shards)
        return sizes

    def _end(self, epoch: int, batch: int, sizes: list[int]) -> None:
        """Warn about unused samples because another rank has no more."""
        without = ", ".join(str(rank) for rank, size in enumerate(sizes) if not size)
        if not batch:
            raise DataError(
                f"the data set yields no samples for rank {without} of {self.world.size}; make __iter__ yield some for "
                "each rank, such as `yield from paceline.shard(samples)`, or use fewer ranks"
            )
        if any(sizes) and not self._has_warned:
            self._has_warned = True
            self.warn(
                f"epoch {epoch + 1} ends after {batch} batches, because rank {without} has no more samples; "
                f"at least {sum(sizes)} samples of other ranks are not used"
            )
