"""clock.py, with a time that changes only when a test changes it."""

from __future__ import annotations

import math

import pytest

from paceline.engine.clock import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    REDUCTION,
    DeviceClock,
    PhaseClock,
    split_step,
)
from support.clocks import FakeClock


def test_each_phase_has_the_time_until_the_next_one_begins(clock: FakeClock) -> None:
    phase_clock = PhaseClock()
    for phase, seconds in ((DATA, 1), (FORWARD, 2), (BACKWARD, 4), (FORWARD, 8), (BACKWARD, 16), (REDUCTION, 32)):
        phase_clock.enter(phase)
        clock.advance(seconds)
    phase_clock.enter(OTHER)
    step, *phases = phase_clock.mean_ms(steps=2)
    assert dict(zip(PHASES, phases, strict=True)) == {
        "data": 500, "forward": 5000, "backward": 10_000, "reduction": 16_000, "optimizer": 0, "other": 0,
    }  # fmt: skip
    assert step == sum(phases) == 500 * phase_clock.elapsed == 31_500


def test_the_current_phase_counts_so_far_and_continues_after_a_restart(clock: FakeClock) -> None:
    phase_clock = PhaseClock()
    phase_clock.enter(DATA)
    clock.advance(3)
    assert phase_clock.mean_ms(1)[1 + DATA] == 3000
    phase_clock.restart()
    assert phase_clock.mean_ms(1) == [0.0] * (1 + len(PHASES))
    clock.advance(2)
    assert phase_clock.mean_ms(1)[1 + DATA] == phase_clock.mean_ms(1)[0] == 2000


# --- a GPU, with fake CUDA events -----------------------------------------------------------------------------------


class FakeCudaEvent:
    """A CUDA event of a device that takes 1 ms for every operation."""

    passed = 0

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "external": True}

    def record(self) -> None:
        FakeCudaEvent.passed += 1
        self.ms = float(FakeCudaEvent.passed)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeCudaEvent) -> float:
        return other.ms - self.ms


@pytest.fixture
def device_clock(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> DeviceClock:
    monkeypatch.setattr("torch.cuda.Event", FakeCudaEvent)
    return DeviceClock(is_alone=False)


def take_step(device_clock: DeviceClock, clock: FakeClock) -> None:
    for phase in (FORWARD, BACKWARD, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, OTHER):
        device_clock.enter(phase)
    clock.advance(0.01)
    device_clock.enter(DATA)


def phases_of(clock: DeviceClock) -> list[float]:
    """Milliseconds of each phase of a single rank, whose step took 10 ms."""
    step, *sample = clock.mean_ms(1)
    assert step == pytest.approx(10)
    return [value for [value] in clock.phases_of([[step, *sample]]).values()]


def test_on_a_gpu_only_data_are_known_until_a_step_was_timed(device_clock: DeviceClock, clock: FakeClock) -> None:
    before = FakeCudaEvent.passed
    for _ in range(3):
        take_step(device_clock, clock)
    step, data, *others = device_clock.mean_ms(3)
    assert (step, data) == pytest.approx((10, 0))
    assert all(map(math.isnan, others))
    assert FakeCudaEvent.passed == before  # recording events costs time


def test_one_step_is_timed_on_the_device_on_request(device_clock: DeviceClock, clock: FakeClock) -> None:
    device_clock.sample_next_step()
    device_clock.enter(DATA)
    assert device_clock.is_sampling
    take_step(device_clock, clock)
    assert not device_clock.is_sampling
    assert phases_of(device_clock) == pytest.approx([0, 2, 2, 4, 1, 1])


def test_a_discarded_step_is_not_timed(device_clock: DeviceClock, clock: FakeClock) -> None:
    device_clock.sample_next_step()
    device_clock.enter(DATA)
    device_clock.discard_sample()
    take_step(device_clock, clock)
    assert math.isnan(device_clock.mean_ms(1)[-1])


def test_marks_of_a_cuda_graph_count_in_the_step_that_replays_it(device_clock: DeviceClock, clock: FakeClock) -> None:
    device_clock.sample_next_step()
    device_clock.enter(DATA)
    with device_clock.separate_marks(with_marks=True) as marks:
        for phase in (FORWARD, BACKWARD, OPTIMIZER):
            device_clock.enter(phase)
    device_clock.enter(FORWARD)
    for mark in marks:
        mark.moment.record()  # as a replay does
    device_clock.add_marks(marks)
    clock.advance(0.01)
    device_clock.enter(OTHER)
    device_clock.enter(DATA)
    assert phases_of(device_clock) == pytest.approx([0, 2, 1, 5, 1, 1])


def test_phases_are_known_when_all_ranks_have_timed_a_step(device_clock: DeviceClock) -> None:
    unknown, known = [10.0, 3.0, *[math.nan] * 5], [10.0, 9.0, 2.0, 3.0, 5.0, 1.0, 1.0]
    assert device_clock.phases_of([known, unknown]) == {"data": [9, 3]}
    assert device_clock.phases_of([known, [10.0, 0.0, *known[2:]]]) == {
        "data": [4, 0], "forward": [2, 2], "backward": [3, 3], "reduction": [0, 3], "optimizer": [1, 1],
        "other": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "data", "is_alone", "phases"),
    [
        (10, 0, False, [0, 2, 3, 3, 1, 1]),  # the remainder was spent waiting,
        (10, 0, True, [0, 2, 3, 0, 1, 4]),  # unless there is no other rank
        (10, 3, False, [3, 2, 3, 0, 1, 1]),
        (10, 9, False, [4, 2, 3, 0, 1, 0]),  # most of the wait for data was while the device was busy
        (3, 1, False, [0, 1, 1.5, 0, 0.5, 0]),  # a mean step is faster than the one that was timed
    ],
)
def test_the_phases_of_a_mean_step_add_up_to_it(step: float, data: float, is_alone: bool, phases: list[float]) -> None:
    assert split_step(step, [data, 2.0, 3.0, 5.0, 1.0, 1.0], is_alone=is_alone) == pytest.approx(phases)
    assert sum(phases) == step
