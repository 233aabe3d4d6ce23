"""When a rank is told to hold the others back: not for being late once, and once only."""

from __future__ import annotations

from typing import Any

from paceline.observe.stragglers import Stragglers

HOSTS = ["n1", "n1", "n2", "n2"]


def times(late: int | None = None, by: float = 50.0, phase: str = "data") -> tuple[list[float], dict[str, list[float]]]:
    """A step of 100 ms, of which the others wait as long as one rank is late."""
    busy = {
        "data": [5.0] * 4,
        "forward": [20.0] * 4,
        "backward": [20.0] * 4,
        "optimizer": [5.0] * 4,
        "other": [0.0] * 4,
    }
    if late is not None:
        busy[phase][late] += by
    waiting = [100.0 - sum(values[rank] for values in busy.values()) for rank in range(4)]
    return [100.0] * 4, {**busy, "reduction": waiting}


def told(*windows: tuple[Any, Any], seconds: float = 2.0) -> list[dict[str, Any] | None]:
    stragglers = Stragglers(HOSTS)
    return [stragglers.see(*window, seconds) for window in windows]


def test_a_rank_that_is_late_for_a_while_is_told_once() -> None:
    first, second, third, *later = told(*[times(2)] * 6)
    assert (first, second) == (None, None)
    assert third is not None
    text = third.pop("text")
    assert third == {"rank": 2, "host": "n2", "phase": "data", "behind_ms": 50.0, "share": 0.5}
    assert text == "rank 2 on n2 holds the others back: they wait 50.0 ms of each step (50 %) for its data"
    assert later == [None] * 3


def test_nobody_is_told_to_be_late_who_is_not_so_in_a_row_or_long_enough() -> None:
    assert told(*[times(2), times(2), times()] * 4) == [None] * 12
    assert told(*[times(1), times(2)] * 6) == [None] * 12
    assert told(*[times(2)] * 10, seconds=0.4) == [None] * 10
    assert told(*[times(2, by=15)] * 10) == [None] * 10  # noticed, but little
    assert told(*[times()] * 10) == [None] * 10


def test_another_phase_and_another_rank_are_told_too() -> None:
    windows = [times(2)] * 4 + [times(2, phase="forward")] * 4 + [times(0, phase="forward")] * 4 + [times(2)] * 4
    found = [(each["rank"], each["phase"]) for each in told(*windows) if each is not None]
    assert found == [(2, "data"), (2, "forward"), (0, "forward")]


def test_a_single_rank_has_nobody_to_hold_back() -> None:
    one = [100.0], {"data": [90.0], "forward": [10.0], "reduction": [0.0]}
    stragglers = Stragglers(["n1"])
    assert [stragglers.see(*one, 10.0) for _ in range(5)] == [None] * 5
