"""Which share of an iterable data set is being read: `shard`, for the user's own `__iter__`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar, overload

T = TypeVar("T")


class DataShard:
    """One of `count` shares of a data set, and whether the data set has asked which one it is."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.is_asked = False
        self.on_first_ask: Callable[[], None] | None = None

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Inside, `shard` gives this share. The body of a generator runs in `next`, so that has to be inside."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def ask(self) -> None:
        """Note that the data set wants to know."""
        self.is_asked = True
        on_first_ask, self.on_first_ask = self.on_first_ask, None
        if on_first_ask is not None:
            on_first_ask()


UNSHARDED = DataShard(0, 1)
_current: ContextVar[DataShard] = ContextVar("paceline_share", default=UNSHARDED)


@overload
def shard() -> tuple[int, int]: ...
@overload
def shard(samples: Iterable[T]) -> Iterator[T]: ...
def shard(samples: Iterable[T] | None = None) -> Iterator[T] | tuple[int, int]:
    """Every `count`-th of `samples`, from `index` on; without samples `(index, count)`. Outside of a run, all of them.

    For the `__iter__` of an iterable data set: `yield from shard(lines)`. Until it is called the generators of torch,
    numpy and `random` give all shares the same numbers, so what is shuffled before has one order; then each its own.
    """
    share = _current.get()
    share.ask()
    if samples is None:
        return share.index, share.count
    return islice(samples, share.index, None, share.count)
