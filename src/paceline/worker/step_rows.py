"""The numbers of steps: the host's data while they are copied from the device, and their sums over all lanes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch

from paceline.data.lanes import RankLanes
from paceline.engine.step import StepResult

NOTHING = (0.0, 0.0)  # the sum and the count of a step that was skipped


class PendingStep(NamedTuple):
    """The host's data of a step whose numbers have not arrived from the device."""

    step: int  # from 0
    epoch: int
    lr: float
    time: float  # at which the step was queued on the device
    is_recorded: bool  # in a `step` event
    lanes: list[tuple[int, Any]]  # of this rank, with their indices
    names: tuple[str, ...]  # of the further values in its row
    width: int  # of its row


class PendingRows(NamedTuple):
    """The numbers of several steps, while they are copied to the host."""

    numbers: torch.Tensor  # a row for each rank: the rows of its steps, then times and memory of the rank
    arrived: torch.cuda.Event | None
    steps: list[PendingStep]
    is_log_point: bool


class ArrivedStep(NamedTuple):
    """The numbers of a step over all ranks; the sum and the count of a skipped step are 0."""

    step: PendingStep
    loss: tuple[float, float]  # sum and count
    values: dict[str, tuple[float, float]]  # sum and count of each further value
    totals: list[list[float]]  # sum and count of the loss of each lane
    grad_norm: float
    is_skipped: bool

    def with_logged(self, logged: dict[str, tuple[float, float]]) -> ArrivedStep:
        """The step with the values that the user's own loop has logged; a logged `loss` replaces that of backward."""
        values = {name: value for name, value in logged.items() if name != "loss"}
        return self._replace(
            values=self.values | values, loss=self.loss if self.is_skipped else logged.get("loss", self.loss)
        )


def arrived_steps(sent: PendingRows, lanes: RankLanes) -> list[ArrivedStep]:
    """The numbers of the steps that were sent, in their order."""
    return [each for steps, numbers in _by_form(sent) for each in _arrived(steps, numbers, lanes)]


def _by_form(sent: PendingRows) -> Iterator[tuple[list[PendingStep], torch.Tensor]]:
    """The steps in order, those with the same values together, each with their numbers: ranks × steps × columns."""
    start = 0
    for (_, width), group in groupby(sent.steps, key=lambda step: (step.names, step.width)):
        steps = list(group)
        numbers = sent.numbers[:, start : start + width * len(steps)]
        start += width * len(steps)
        yield steps, numbers.reshape(len(numbers), len(steps), width)


def _arrived(steps: list[PendingStep], numbers: torch.Tensor, lanes: RankLanes) -> Iterator[ArrivedStep]:
    """The sums of steps with the same values, over the lanes of all ranks."""
    names = steps[0].names
    result = StepResult(numbers.transpose(0, 1), names)
    skipped = [bool(flag) for flag in result.is_skipped[:, 0].tolist()]
    # Steps × lanes × 2, in the order of the lanes for any number of ranks: the sums are bitwise identical.
    totals = lanes.in_order(result.lane_losses.reshape(len(steps), -1, 2), dim=1)
    of_values = lanes.in_order(result.lane_values.transpose(1, 2).flatten(2, 3), dim=2).sum(dim=2).tolist()
    losses, norms = totals.sum(dim=1).tolist(), result.grad_norm[:, 0].tolist()
    for index, (step, is_skipped) in enumerate(zip(steps, skipped, strict=True)):
        values = {name: NOTHING if is_skipped else value for name, value in zip(names, of_values[index], strict=True)}
        loss = NOTHING if is_skipped else losses[index]
        yield ArrivedStep(step, loss, values, totals[index].tolist(), norms[index], is_skipped)
