"""Measures the time of a rank in each phase of a step: a clock that is notified when a phase starts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, OTHER = range(6)
PHASES = ("data", "forward", "backward", "reduction", "optimizer", "other")


class PhaseClock:
    """The seconds in each phase since the last restart, measured on this rank's host."""

    def __init__(self) -> None:
        self._phase, self._since = OTHER, 0.0
        self.restart()

    def enter(self, phase: int) -> None:
        """End the current phase and start `phase`."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """A context in which this phase replaces the current one."""
        outer = self._phase
        self.enter(phase)
        yield
        self.enter(outer)

    def restart(self) -> None:
        """Set all times to zero; the current phase continues."""
        self._spent = [0.0] * len(PHASES)
        self._since = self._began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the last restart."""
        return time.perf_counter() - self._began

    def sample_next_step(self) -> None:
        """Time the phases of the next step on the device; does nothing here, because the host times every step."""

    def discard_sample(self) -> None:
        """Do not time this step on the device: it is not typical."""

    def mean_ms(self, steps: int) -> list[float]:
        """Mean milliseconds of a step on this rank, then of each phase; NaN where unknown."""
        PhaseClock.enter(self, self._phase)  # not the method of a subclass, in order to update only the host's times
        return [1e3 * seconds / max(steps, 1) for seconds in (self.elapsed, *self._spent)]

    def phases_of(self, means: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """Milliseconds of each rank in each phase, from the `mean_ms` of all ranks."""
        return {name: [of_rank[1 + index] for of_rank in means] for index, name in enumerate(PHASES)}


class PhaseMark(NamedTuple):
    """A CUDA event at the start of a phase."""

    phase: int
    moment: torch.cuda.Event


class DeviceClock(PhaseClock):
    """A clock for a GPU, which runs asynchronously to its host: on request it times one step on the device itself.

    Only this step has marks between its phases, and only then does the host wait for the end of a step.
    """

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: whether this is the only rank."""
        self._is_alone, self._is_requested = is_alone, False
        self._marks: list[PhaseMark] | None = None
        self._sample: list[float] | None = None  # milliseconds of the phases of one step
        super().__init__()

    @property
    def is_sampling(self) -> bool:
        """Whether this step is timed on the device."""
        return self._marks is not None

    def sample_next_step(self) -> None:
        """Time the phases of the next step on the device."""
        self._is_requested = True

    def enter(self, phase: int) -> None:
        """End the current phase and start `phase`."""
        super().enter(phase)
        if self._marks is not None:
            self._marks.append(_mark(phase))
        if phase == DATA:  # all work of a step is queued on the device, and the next step begins
            if self._marks is not None:
                self._sample = phase_times_ms(self._marks)
            self._marks = [_mark(DATA)] if self._is_requested else None
            self._is_requested = False

    def discard_sample(self) -> None:
        """Do not time this step on the device: it is not typical."""
        self._marks = None

    @contextmanager
    def separate_marks(self, *, with_marks: bool) -> Iterator[list[PhaseMark]]:
        """A context that excludes marks from this step while a CUDA graph is recorded; collects them if requested."""
        marks: list[PhaseMark] = []
        outer, self._marks = self._marks, marks if with_marks else None
        try:
            yield marks
        finally:
            self._marks = outer

    def add_marks(self, marks: list[PhaseMark]) -> None:
        """Add the marks of a CUDA graph that was replayed in this step."""
        if self._marks is not None:
            self._marks += marks

    def mean_ms(self, steps: int) -> list[float]:
        """Mean milliseconds of a step on this rank, then of each phase; NaN where unknown."""
        step, data, *others = super().mean_ms(steps)
        return [step, data, *(self._sample[FORWARD:] if self._sample is not None else (math.nan for _ in others))]

    def phases_of(self, means: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """Milliseconds of each rank in each phase; only in the phase data until all ranks have timed a step."""
        if any(math.isnan(number) for of_rank in means for number in of_rank):
            return {PHASES[DATA]: [of_rank[1 + DATA] for of_rank in means]}
        split = [split_step(step, sample, is_alone=self._is_alone) for step, *sample in means]
        return {name: list(values) for name, values in zip(PHASES, zip(*split, strict=True), strict=True)}


def split_step(step: float, sample: Sequence[float], *, is_alone: bool) -> list[float]:
    """The phases of a mean step on a GPU, which add up to `step` (pure).

    `sample` has the phases of one step on the device, except its first value: that is the mean time during which the
    host has waited for data, part of it while the device was busy. The remainder is the time that one sampled step
    cannot show, such as waiting for a rank that is slow only sometimes.
    """
    own = [sample[phase] for phase in (FORWARD, BACKWARD, OPTIMIZER)]
    scale = min(1.0, step / max(sum(own), 1e-9))
    forward, backward, optimizer = (scale * each for each in own)
    rest = step - forward - backward - optimizer
    data = min(sample[DATA], rest)
    other = rest - data if is_alone else min(sample[OTHER], rest - data)
    return [data, forward, backward, rest - data - other, optimizer, other]


def phase_times_ms(marks: list[PhaseMark]) -> list[float]:
    """Milliseconds of each phase between the marks; waits until the device has reached the last one."""
    marks[-1].moment.synchronize()
    spent = [0.0] * len(PHASES)
    for begin, end in pairwise(marks):
        spent[begin.phase] += begin.moment.elapsed_time(end.moment)
    return spent


def _mark(phase: int) -> PhaseMark:
    moment = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    moment.record()
    return PhaseMark(phase, moment)
