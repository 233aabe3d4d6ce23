"""`shard`, for the `__iter__` of an iterable data set, and the shard that is being read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class DataShard:
    """One of `count` shards of a data set, and whether the data set has called `shard` while reading it."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.is_called = False
        self.on_first_call: Callable[[], None] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `shard` return this one in the context. A generator's body runs in `next`, so call that inside, too."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def note_call(self) -> None:
        """Record that the data set has called `shard`."""
        self.is_called = True
        on_first_call, self.on_first_call = self.on_first_call, None
        if on_first_call is not None:
            on_first_call()


UNSHARDED = DataShard(0, 1)
_current: ContextVar[DataShard] = ContextVar("paceline_shard", default=UNSHARDED)


@overload
def shard() -> tuple[int, int]: ...
@overload
def shard(samples: Iterable[T]) -> Iterator[T]: ...
def shard(samples: Iterable[T] | None = None) -> Iterator[T] | tuple[int, int]:
    """Every `count`-th of `samples`, starting at `index`; without `samples`, `(index, count)`. Outside a run, all.

    For the `__iter__` of an iterable data set: `yield from shard(lines)`. Until it is called, the generators of torch,
    numpy and `random` yield the same numbers for all shards, so samples shuffled before the call have the same order.
    After the call, each shard has different random numbers.
    """
    current = _current.get()
    current.note_call()
    if samples is None:
        return current.index, current.count
    return islice(samples, current.index, None, current.count)
