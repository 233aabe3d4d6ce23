"""The clock of a step's phases, by a time that stands still until it is moved."""

from __future__ import annotations

import pytest
import torch

from paceline.clock import BACKWARD, DATA, FORWARD, OTHER, PHASES, REDUCTION, Clock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [50.0]
    monkeypatch.setattr("paceline.clock.perf_counter", lambda: time[0])
    return time


def test_each_phase_has_the_time_until_the_next_one_begins(now: list[float]) -> None:
    clock = Clock(torch.device("cpu"))
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (FORWARD, 8), (BACKWARD, 16), (REDUCTION, 32)):
        clock.enter(phase)
        now[0] += seconds
    clock.enter(OTHER)
    assert dict(zip(clock.names, clock.seconds, strict=True)) == {
        "data": 1, "forward": 10, "backward": 20, "reduction": 32, "optimizer": 0, "other": 0,
    }  # fmt: skip
    assert clock.elapsed == sum(clock.seconds) == 63


def test_a_phase_that_has_not_ended_counts_so_far_and_goes_on_after_a_restart(now: list[float]) -> None:
    clock = Clock(torch.device("cpu"))
    clock.enter(DATA)
    now[0] += 3
    assert clock.seconds[DATA] == 3
    clock.restart()
    assert (clock.seconds, clock.elapsed) == ([0.0] * len(PHASES), 0)
    now[0] += 2
    assert clock.seconds[DATA] == clock.elapsed == 2


def test_on_a_gpu_the_host_speaks_only_of_its_data() -> None:
    assert Clock(torch.device("cuda")).names == ("data",)
