"""The remaining steps of an epoch in the user's own loop, and the inputs of their lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from paceline.data.lanes import StepInputs
from paceline.worker.state import TrainState


class EpochInputs:
    """The inputs of the steps of each epoch, from the run's current position."""

    def __init__(
        self, inputs_from: Callable[[int, int], Iterable[StepInputs]], state: TrainState, *,
        steps_per_epoch: int | None, total_steps: int | None, limit: int | None,
    ) -> None:  # fmt: skip
        """`inputs_from` yields those of the steps from one number up to another.

        `steps_per_epoch` is None for an iterable data set, which yields its epochs in order and cannot be read again.
        `limit` is the number of steps after which the run ends, even within an epoch.
        """
        self._inputs_from, self._state = inputs_from, state
        self.steps_per_epoch, self._total_steps, self.limit = steps_per_epoch, total_steps, limit
        # One iterator serves consecutive epochs, so that workers prefetch across the end of an epoch.
        self._iterator: Iterator[StepInputs] | None = None
        self._next = self._end = -1  # the next step of the iterator, and the step after its last one
        self._unused: StepInputs | None = None

    def remaining(self, epoch: int) -> Iterator[StepInputs]:
        """The inputs of the steps of an epoch that the run has not done."""
        for inputs in self._of_stream(epoch) if self.steps_per_epoch is None else self._of_rows(epoch):
            self._next = inputs.step + 1
            yield inputs
            if inputs.ends_epoch:
                return

    def all_of(self, epoch: int) -> Iterable[StepInputs]:
        """The inputs of all steps of an epoch, to read its batches again."""
        assert self.steps_per_epoch is not None
        return self._inputs_from(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)

    def present_epoch(self) -> int:
        """The current epoch of the run, counted from 0."""
        if self.steps_per_epoch is None:
            return self._state.stream_position[0]
        return self._state.step // self.steps_per_epoch

    def is_over(self) -> bool:
        """Whether the run has reached its limit."""
        return self.limit is not None and self._state.step >= self.limit

    def put_back(self, inputs: StepInputs) -> None:
        """Yield the inputs of a step again, because nothing was computed for it."""
        if self.steps_per_epoch is None:  # otherwise they are read again
            self._unused = inputs

    def _of_stream(self, epoch: int) -> Iterable[StepInputs]:
        if self._state.stream_position[0] > epoch:
            return ()
        if self._iterator is None:
            self._iterator = iter(self._inputs_from(self._state.step, -1))
        unused, self._unused = self._unused, None
        return chain([unused] if unused is not None else [], self._iterator)

    def _of_rows(self, epoch: int) -> Iterable[StepInputs]:
        assert self.steps_per_epoch is not None
        first, end = max(self._state.step, epoch * self.steps_per_epoch), (epoch + 1) * self.steps_per_epoch
        end = min(end, self.limit or end)
        if first >= end:
            return ()
        if self._iterator is None or self._next != first or first >= self._end:
            self._end = max(end, self._total_steps or end)
            self._iterator = iter(self._inputs_from(first, self._end))
        return self._iterator
