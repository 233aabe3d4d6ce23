"""bottleneck.py: what slows a run down, and when a rank is reported as a straggler."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.observe.bottleneck import Bottleneck, StragglerDetector, find_bottleneck

Phases = dict[str, list[float]]


def phases(**given: list[float]) -> Phases:
    """Times of four ranks on a CPU: 10 ms per step, equal on all ranks, with some phases changed."""
    usual = {"data": 1.0, "forward": 3.0, "backward": 4.0, "reduction": 1.0, "optimizer": 0.8, "other": 0.2}
    return {name: given.get(name, [value] * 4) for name, value in usual.items()}


def bottleneck(of: Phases) -> Bottleneck | None:
    return rounded(find_bottleneck([sum(values) for values in zip(*of.values(), strict=True)], of))


def rounded(found: Bottleneck | None) -> Bottleneck | None:
    return found and found._replace(behind_ms=round(found.behind_ms, 6), share=round(found.share, 6))


def test_equal_ranks_have_no_bottleneck() -> None:
    assert bottleneck(phases()) is None
    assert bottleneck(phases(forward=[3.0, 3.2, 2.8, 3.1])) is None


def test_a_slow_rank_is_named_with_the_phase_in_which_it_loses_most() -> None:
    slow = phases(data=[1.0, 1.0, 5.0, 1.0], forward=[3.0, 3.0, 4.0, 3.0], reduction=[6.0, 6.0, 1.0, 6.0])
    assert bottleneck(slow) == Bottleneck(2, "data", 5.0, 0.333333)
    assert str(bottleneck(slow)) == "rank 2: +5.0 ms (data)"


def test_waiting_for_a_slow_rank_is_neither_slow_nor_communication() -> None:
    waiting = phases(backward=[4.0, 4.0, 4.0, 24.0], reduction=[21.0, 21.0, 21.0, 1.0])
    assert bottleneck(waiting) == Bottleneck(3, "backward", 20.0, 0.666667)
    assert str(bottleneck(waiting)) == "rank 3: +20 ms (backward)"


def test_of_two_ranks_the_slower_one_is_named() -> None:
    found = find_bottleneck([9.0, 9.0], {"data": [1.0, 3.0], "forward": [5.0, 5.0], "reduction": [3.0, 1.0]})
    assert rounded(found) == Bottleneck(1, "data", 2.0, 0.222222)


def test_a_rank_that_takes_longer_for_its_further_lane_is_not_slow() -> None:
    times = {"forward": [9.0, 9.0, 6.0], "reduction": [1.0, 1.0, 4.0]}
    assert find_bottleneck([10.0] * 3, times, lanes=8) is None
    slow = {"forward": [9.0, 9.0, 12.0], "reduction": [4.0, 4.0, 1.0]}
    assert rounded(find_bottleneck([13.0] * 3, slow, lanes=8)) == Bottleneck(2, "forward", 3.0, 0.230769)
    assert find_bottleneck([10.0] * 2, {"forward": [6.0, 6.1]}, lanes=3) is None  # slower, but the other waits longer


def test_a_single_rank_is_not_the_slowest_but_its_data_may_be_slow() -> None:
    assert find_bottleneck([10.0], {"data": [1.0], "forward": [9.0], "reduction": [0.0]}) is None
    found = find_bottleneck([10.0], {"data": [6.0], "forward": [4.0], "reduction": [0.0]})
    assert str(found) == "data 60 % of a step"


def test_communication_is_named_if_every_rank_spends_much_of_a_step_in_it() -> None:
    found = bottleneck(phases(reduction=[9.0] * 4))
    assert found == Bottleneck(None, "reduction", 9.0, 0.5)
    assert str(found) == "communication 50 % of a step"


def test_on_a_gpu_only_data_are_known_and_count_by_their_share_of_a_step() -> None:
    assert find_bottleneck([10.0] * 4, {"data": [0.1, 0.1, 0.5, 0.1]}) is None  # five times as much, but little
    assert find_bottleneck([10.0] * 4, {"data": [0.1, 0.1, 2.1, 0.1]}) == Bottleneck(2, "data", 2.0, 0.2)
    assert str(find_bottleneck([10.0] * 2, {"data": [4.0, 4.1]})) == "data 40 % of a step"


@pytest.mark.parametrize(("phase_ms", "step_ms"), [({}, [1.0, 1.0]), ({"data": []}, []), ({"data": [0.0]}, [0.0])])
def test_without_measurements_there_is_no_bottleneck(phase_ms: Phases, step_ms: list[float]) -> None:
    assert find_bottleneck(step_ms, phase_ms) is None


# --- stragglers ---------------------------------------------------------------------------------------------

HOSTS = ["n1", "n1", "n2", "n2"]


def times(late: int | None = None, by: float = 50.0, phase: str = "data") -> tuple[list[float], dict[str, list[float]]]:
    """Times of a step of 100 ms, in which the others wait for one rank that is late."""
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


def reports(*windows: tuple[Any, Any], seconds: float = 2.0) -> list[dict[str, Any] | None]:
    detector = StragglerDetector(HOSTS)
    return [detector.update(*window, seconds) for window in windows]


def test_a_rank_that_is_late_for_several_seconds_is_reported_once() -> None:
    first, second, third, *later = reports(*[times(2)] * 6)
    assert (first, second) == (None, None)
    assert third is not None
    text = third.pop("text")
    assert third == {"rank": 2, "host": "n2", "phase": "data", "behind_ms": 50.0, "share": 0.5}
    assert text == "rank 2 on n2 delays the others: they wait 50.0 ms of each step (50 %) for its data"
    assert later == [None] * 3


def test_a_rank_is_not_reported_if_it_is_late_only_sometimes_or_too_briefly() -> None:
    assert reports(*[times(2), times(2), times()] * 4) == [None] * 12
    assert reports(*[times(1), times(2)] * 6) == [None] * 12
    assert reports(*[times(2)] * 10, seconds=0.4) == [None] * 10
    assert reports(*[times(2, by=15)] * 10) == [None] * 10  # a bottleneck, but below the share of a straggler
    assert reports(*[times()] * 10) == [None] * 10


def test_another_phase_and_another_rank_are_reported_too() -> None:
    windows = [times(2)] * 4 + [times(2, phase="forward")] * 4 + [times(0, phase="forward")] * 4 + [times(2)] * 4
    found = [(each["rank"], each["phase"]) for each in reports(*windows) if each is not None]
    assert found == [(2, "data"), (2, "forward"), (0, "forward")]


def test_a_single_rank_is_never_a_straggler() -> None:
    one = [100.0], {"data": [90.0], "forward": [10.0], "reduction": [0.0]}
    detector = StragglerDetector(["n1"])
    assert [detector.update(*one, 10.0) for _ in range(5)] == [None] * 5
