"""What holds the pace of a run down."""

from __future__ import annotations

import pytest

from paceline.observe.pace import Verdict, slowest

Phases = dict[str, list[float]]


def phases(**given: list[float]) -> Phases:
    """Of four ranks on a CPU: 10 ms of a step, alike on all, with some phases changed."""
    usual = {"data": 1.0, "forward": 3.0, "backward": 4.0, "reduction": 1.0, "optimizer": 0.8, "other": 0.2}
    return {name: given.get(name, [value] * 4) for name, value in usual.items()}


def verdict(of: Phases) -> Verdict | None:
    return rounded(slowest([sum(values) for values in zip(*of.values(), strict=True)], of))


def rounded(found: Verdict | None) -> Verdict | None:
    return found and found._replace(behind_ms=round(found.behind_ms, 6), share=round(found.share, 6))


def test_ranks_that_are_alike_give_nothing_to_tell() -> None:
    assert verdict(phases()) is None
    assert verdict(phases(forward=[3.0, 3.2, 2.8, 3.1])) is None


def test_a_slow_rank_is_named_with_the_phase_in_which_it_loses_most() -> None:
    slow = phases(data=[1.0, 1.0, 5.0, 1.0], forward=[3.0, 3.0, 4.0, 3.0], reduction=[6.0, 6.0, 1.0, 6.0])
    assert verdict(slow) == Verdict(2, "data", 5.0, 0.333333)
    assert str(verdict(slow)) == "rank 2: +5.0 ms (data)"


def test_waiting_for_a_slow_rank_is_neither_slow_nor_communication() -> None:
    waiting = phases(backward=[4.0, 4.0, 4.0, 24.0], reduction=[21.0, 21.0, 21.0, 1.0])
    assert verdict(waiting) == Verdict(3, "backward", 20.0, 0.666667)
    assert str(verdict(waiting)) == "rank 3: +20 ms (backward)"


def test_of_two_ranks_the_slower_one_is_named() -> None:
    found = slowest([9.0, 9.0], {"data": [1.0, 3.0], "forward": [5.0, 5.0], "reduction": [3.0, 1.0]})
    assert rounded(found) == Verdict(1, "data", 2.0, 0.222222)


def test_a_rank_alone_is_not_the_slowest_but_its_data_may_be_slow() -> None:
    assert slowest([10.0], {"data": [1.0], "forward": [9.0], "reduction": [0.0]}) is None
    found = slowest([10.0], {"data": [6.0], "forward": [4.0], "reduction": [0.0]})
    assert str(found) == "data 60 % of a step"


def test_communication_is_named_where_every_rank_spends_much_of_a_step_in_it() -> None:
    found = verdict(phases(reduction=[9.0] * 4))
    assert found == Verdict(None, "reduction", 9.0, 0.5)
    assert str(found) == "communication 50 % of a step"


def test_on_a_gpu_data_count_by_their_share_of_a_step() -> None:
    assert slowest([10.0] * 4, {"data": [0.1, 0.1, 0.5, 0.1]}) is None  # five times as much, and nothing to win
    assert slowest([10.0] * 4, {"data": [0.1, 0.1, 2.1, 0.1]}) == Verdict(2, "data", 2.0, 0.2)
    assert str(slowest([10.0] * 2, {"data": [4.0, 4.1]})) == "data 40 % of a step"


@pytest.mark.parametrize(("phase_ms", "step_ms"), [({}, [1.0, 1.0]), ({"data": []}, []), ({"data": [0.0]}, [0.0])])
def test_nothing_measured_gives_nothing_to_tell(phase_ms: Phases, step_ms: list[float]) -> None:
    assert slowest(step_ms, phase_ms) is None
