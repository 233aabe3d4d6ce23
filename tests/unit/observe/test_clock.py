"""The clock of a step's phases, by a time that stands still until it is moved."""

from __future__ import annotations

import math

import pytest

from paceline.observe.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    REDUCTION,
    Clock,
    DeviceClock,
    spread,
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [50.0]
    monkeypatch.setattr("paceline.observe.clock.perf_counter", lambda: time[0])
    return time


def test_each_phase_has_the_time_until_the_next_one_begins(now: list[float]) -> None:
    clock = Clock()
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (FORWARD, 8), (BACKWARD, 16), (REDUCTION, 32)):
        clock.enter(phase)
        now[0] += seconds
    clock.enter(OTHER)
    step, *phases = clock.means(steps=2)
    assert dict(zip(PHASES, phases, strict=True)) == {
        "data": 500, "forward": 5000, "backward": 10_000, "reduction": 16_000, "optimizer": 0, "other": 0,
    }  # fmt: skip
    assert step == sum(phases) == 500 * clock.elapsed == 31_500


def test_a_phase_that_has_not_ended_counts_so_far_and_goes_on_after_a_restart(now: list[float]) -> None:
    clock = Clock()
    clock.enter(DATA)
    now[0] += 3
    assert clock.means(1)[1 + DATA] == 3000
    clock.restart()
    assert clock.means(1) == [0.0] * (1 + len(PHASES))
    now[0] += 2
    assert clock.means(1)[1 + DATA] == clock.means(1)[0] == 2000


# --- a GPU, by the moments at which it comes to the marks in its work -------------------------------------------------


class Moment:
    """An event of a device that takes 1 ms for everything."""

    passed = 0

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "external": True}

    def record(self) -> None:
        Moment.passed += 1
        self.ms = float(Moment.passed)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Moment) -> float:
        return other.ms - self.ms


@pytest.fixture
def device_clock(now: list[float], monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr("torch.cuda.Event", Moment)
    return DeviceClock(is_alone=False)


def take_step(clock: DeviceClock, now: list[float]) -> None:
    for phase in (FORWARD, BACKWARD, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, OTHER):
        clock.enter(phase)
    now[0] += 0.01
    clock.enter(DATA)


def told(clock: DeviceClock) -> list[float]:
    """Of a single rank, whose step took 10 ms, in the order of the phases."""
    step, *sample = clock.means(1)
    assert step == pytest.approx(10)
    return [value for [value] in clock.phases_of([[step, *sample]]).values()]


def test_a_gpu_tells_only_of_data_until_a_step_was_timed(device_clock: DeviceClock, now: list[float]) -> None:
    before = Moment.passed
    for _ in range(3):
        take_step(device_clock, now)
    step, data, *others = device_clock.means(3)
    assert (step, data) == pytest.approx((10, 0))
    assert all(map(math.isnan, others))
    assert Moment.passed == before  # marks cost something


def test_one_step_is_timed_on_the_device_when_it_was_asked_for(device_clock: DeviceClock, now: list[float]) -> None:
    device_clock.ask()
    device_clock.enter(DATA)
    assert device_clock.is_sampling
    take_step(device_clock, now)
    assert not device_clock.is_sampling
    assert told(device_clock) == pytest.approx([0, 2, 2, 4, 1, 1])


def test_a_step_with_something_else_in_it_is_forgotten(device_clock: DeviceClock, now: list[float]) -> None:
    device_clock.ask()
    device_clock.enter(DATA)
    device_clock.forget()
    take_step(device_clock, now)
    assert math.isnan(device_clock.means(1)[-1])


def test_marks_of_a_recording_count_where_it_is_replayed(device_clock: DeviceClock, now: list[float]) -> None:
    device_clock.ask()
    device_clock.enter(DATA)
    with device_clock.apart(with_marks=True) as marks:
        for phase in (FORWARD, BACKWARD, OPTIMIZER):
            device_clock.enter(phase)
    device_clock.enter(FORWARD)
    for mark in marks:
        mark.moment.record()  # as a replay does
    device_clock.take_in(marks)
    now[0] += 0.01
    device_clock.enter(OTHER)
    device_clock.enter(DATA)
    assert told(device_clock) == pytest.approx([0, 2, 1, 5, 1, 1])


def test_there_are_phases_when_all_ranks_have_timed_a_step(device_clock: DeviceClock) -> None:
    unknown, known = [10.0, 3.0, *[math.nan] * 5], [10.0, 9.0, 2.0, 3.0, 5.0, 1.0, 1.0]
    assert device_clock.phases_of([known, unknown]) == {"data": [9, 3]}
    assert device_clock.phases_of([known, [10.0, 0.0, *known[2:]]]) == {
        "data": [4, 0], "forward": [2, 2], "backward": [3, 3], "reduction": [0, 3], "optimizer": [1, 1],
        "other": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "data", "is_alone", "phases"),
    [
        (10, 0, False, [0, 2, 3, 3, 1, 1]),  # what is left was spent waiting,
        (10, 0, True, [0, 2, 3, 0, 1, 4]),  # unless there is nobody to wait for
        (10, 3, False, [3, 2, 3, 0, 1, 1]),
        (10, 9, False, [4, 2, 3, 0, 1, 0]),  # most of it while the device was busy
        (3, 1, False, [0, 1, 1.5, 0, 0.5, 0]),  # a mean step is faster than the one that was timed
    ],
)
def test_the_phases_of_a_mean_step_add_up_to_it(step: float, data: float, is_alone: bool, phases: list[float]) -> None:
    assert spread(step, [data, 2.0, 3.0, 5.0, 1.0, 1.0], is_alone=is_alone) == pytest.approx(phases)
    assert sum(phases) == step
