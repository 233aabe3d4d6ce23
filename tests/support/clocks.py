"""A clock that tests move by hand."""

from __future__ import annotations


class FakeClock:
    """Time in seconds that passes only when a test advances it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def read(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
