"""Where a rank's time goes: a clock that is told when the next phase of a step begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import torch

DATA, FORWARD, BACKWARD, REDUCTION, OPTIMIZER, OTHER = range(6)
PHASES = ("data", "forward", "backward", "reduction", "optimizer", "other")


class Clock:
    """Seconds of each phase on this rank's host, since it was restarted."""

    def __init__(self) -> None:
        self._phase, self._since = OTHER, 0.0
        self.restart()

    def enter(self, phase: int) -> None:
        """From now on it is `phase`."""
        now = perf_counter()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def restart(self) -> None:
        """Begin to count anew, in the phase that it is."""
        self._spent = [0.0] * len(PHASES)
        self._since = self._began = perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since it was restarted."""
        return perf_counter() - self._began

    def ask(self) -> None:
        """Look at the next step closely; this clock always does."""

    def forget(self) -> None:
        """This step says nothing about others."""

    def means(self, steps: int) -> list[float]:
        """Milliseconds of a step on this rank, then those of each phase; NaN where it is not known."""
        Clock.enter(self, self._phase)  # and nothing else, whatever others make of it
        return [1e3 * seconds / max(steps, 1) for seconds in (self.elapsed, *self._spent)]

    def phases_of(self, means: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """What the means of all ranks say about each phase: for each, the milliseconds of every rank."""
        return {name: [of_rank[1 + place] for of_rank in means] for place, name in enumerate(PHASES)}


class Mark(NamedTuple):
    """The beginning of a phase, when the device comes to it."""

    phase: int
    moment: torch.cuda.Event


class DeviceClock(Clock):
    """The same for a GPU, which works far behind its host: when it is asked to, it times one step on the device itself.

    Only then are there marks between the phases, and only then does the host wait for a step to end.
    """

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone` says that there is no other rank to wait for."""
        self._is_alone, self._is_asked = is_alone, False
        self._marks: list[Mark] | None = None
        self._sample: list[float] | None = None  # milliseconds of the phases of one step
        super().__init__()

    @property
    def is_sampling(self) -> bool:
        """Whether this is a step with marks."""
        return self._marks is not None

    def ask(self) -> None:
        """Have the next step timed."""
        self._is_asked = True

    def enter(self, phase: int) -> None:
        """From now on it is `phase`."""
        super().enter(phase)
        if self._marks is not None:
            self._marks.append(_mark(phase))
        if phase == DATA:  # a step has been handed out, and the next one begins
            if self._marks is not None:
                self._sample = milliseconds(self._marks)
            self._marks = [_mark(DATA)] if self._is_asked else None
            self._is_asked = False

    def forget(self) -> None:
        """This step says nothing about others."""
        self._marks = None

    @contextmanager
    def apart(self, *, with_marks: bool) -> Iterator[list[Mark]]:
        """Keep the marks that are set meanwhile, if any shall be, out of this step: they belong to a recording."""
        marks: list[Mark] = []
        kept, self._marks = self._marks, marks if with_marks else None
        try:
            yield marks
        finally:
            self._marks = kept

    def take_in(self, marks: list[Mark]) -> None:
        """Those of a recording that has been replayed in this step."""
        if self._marks is not None:
            self._marks += marks

    def means(self, steps: int) -> list[float]:
        """Milliseconds of a step on this rank, then those of each phase; NaN where it is not known."""
        step, data, *others = super().means(steps)
        return [step, data, *(self._sample[FORWARD:] if self._sample is not None else (math.nan for _ in others))]

    def phases_of(self, means: Sequence[Sequence[float]]) -> dict[str, list[float]]:
        """What the means of all ranks say about each phase; only of data, until all of them have timed a step."""
        if any(math.isnan(number) for of_rank in means for number in of_rank):
            return {PHASES[DATA]: [of_rank[1 + DATA] for of_rank in means]}
        spreads = [spread(step, sample, is_alone=self._is_alone) for step, *sample in means]
        return {name: list(values) for name, values in zip(PHASES, zip(*spreads, strict=True), strict=True)}


def spread(step: float, sample: Sequence[float], *, is_alone: bool) -> list[float]:
    """The phases of a mean step on a GPU, which add up to `step` (pure).

    `sample` are those of one step on the device; its first is how long the host has waited for data in the mean, part
    of it while the device was busy. What one step cannot tell, such as waiting for a neighbour who is slow only now and
    then, is what is left.
    """
    own = [sample[phase] for phase in (FORWARD, BACKWARD, OPTIMIZER)]
    scale = min(1.0, step / max(sum(own), 1e-9))
    forward, backward, optimizer = (scale * each for each in own)
    rest = step - forward - backward - optimizer
    data = min(sample[DATA], rest)
    other = rest - data if is_alone else min(sample[OTHER], rest - data)
    return [data, forward, backward, rest - data - other, optimizer, other]


def milliseconds(marks: list[Mark]) -> list[float]:
    """Of each phase, once the device has come to the last mark."""
    marks[-1].moment.synchronize()
    spent = [0.0] * len(PHASES)
    for begin, end in pairwise(marks):
        spent[begin.phase] += begin.moment.elapsed_time(end.moment)
    return spent


def _mark(phase: int) -> Mark:
    moment = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    moment.record()
    return Mark(phase, moment)
