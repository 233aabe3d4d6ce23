"""One pass over a shard of an iterable data set, in the managed loop and in the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from paceline.data.seeding import seed_generators
from paceline.data.shard import DataShard

Warn = Callable[[str], None]
Key = tuple[int | str, ...]


class ShardReader:
    """One pass over one shard of a data set."""

    def __init__(self, dataset: Any, shard: DataShard, *, common: Key, own: Key) -> None:
        """The generators are keyed by `common` until the data set calls `paceline.shard`, then by `own`."""
        self.shard, self._dataset, self._common, self._own = shard, dataset, common, own
        self._samples: Iterator[Any] | None = None

    def take(self, size: int) -> list[Any]:
        """The next samples: `size` of them, or the remaining ones."""
        with self.shard.active():
            if self._samples is not None:
                return list(islice(self._samples, size))
            # All shards start with the same generators: samples that are shuffled before they are sharded have one
            # order for all shards.
            seed_generators(*self._common)
            self.shard.on_first_call = lambda: seed_generators(*self._own)
            self._samples = iter(self._dataset)
            first = list(islice(self._samples, 1))
            if self.shard.on_first_call is not None:  # the data set has not called `paceline.shard`
                self.shard.on_first_call()
                self.shard.on_first_call = None
            return first + list(islice(self._samples, size - 1))


def announce_epoch(dataset: Any, epoch: int) -> None:
    """Call the data set's `set_epoch`, if it has one, before an epoch starts."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
