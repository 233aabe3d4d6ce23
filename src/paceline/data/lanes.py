"""The lanes of the managed loop, for data sets with a length: which samples each has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from paceline.config.lane_counts import lane_counts
from paceline.data import batches
from paceline.data.epoch_order import Order, shuffled
from paceline.data.order import Indices, indices_of


class Lane(NamedTuple):
    """One micro-batch: `indices` are known before it is fetched, `data` afterwards."""

    step: int
    lane: int
    samples: int
    step_samples: int
    indices: Any  # a list, or a tensor on the device where rows are gathered there (rows.py)
    data: Any = None

    @property
    def key(self) -> tuple[str, int, int]:
        """The key of its random numbers."""
        return "data", self.step, self.lane


class RankLanes(NamedTuple):
    """How the lanes of a step are divided among the ranks, and which are those of this rank."""

    lanes: int
    world_size: int
    rank: int

    @property
    def mine(self) -> range:
        """The lanes of this rank."""
        return batches.lanes_of(self.rank, self.world_size, self.lanes)

    @property
    def most(self) -> int:
        """The largest number of lanes of any rank: that of rank 0."""
        return -(-self.lanes // self.world_size)

    def place_of(self, lane: int) -> int:
        """The place of a lane among those of this rank."""
        return lane - self.mine[0]

    def in_order(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The rows of all lanes in their order, from `most` rows of each rank, some of which may have no lane."""
        counts = lane_counts(self.lanes, self.world_size)
        return torch.cat([rows.narrow(dim, rank * self.most, count) for rank, count in enumerate(counts)], dim)


class StepInputs(NamedTuple):
    """The inputs of one step: the lanes of this rank."""

    step: int
    epoch: int
    lanes: list[Lane]
    ends_epoch: bool  # or the run
    ends_run: bool
    is_epoch_cut_short: bool = False  # the run ends in the middle of the epoch
    stream_position: tuple[int, int] = (0, 0)  # iterable data sets: the next step's epoch, and that epoch's first step


class LaneSampler(Sampler[Lane]):
    """The lanes of one rank, step by step, over all epochs of the run."""

    def __init__(
        self,
        *,
        seed: int,
        size: int,
        batch_size: int,
        rank_lanes: RankLanes,
        steps: range,
        order: Order | None = None,
        convert: Callable[[Indices], Any] = np.ndarray.tolist,
        is_padded: bool = False,
    ) -> None:
        """`order` is that of the samples in each epoch; without it they are shuffled.

        `convert` makes the indices of many lanes into the list or tensor that each lane's are slices of. With
        `is_padded`, all ranks have the same number of lanes in each step, some of them empty.
        """
        self.size, self.batch_size, self.lanes, self.is_padded = size, batch_size, rank_lanes.lanes, is_padded
        self.steps, self.rank_lanes, self.convert = steps, rank_lanes, convert
        self.order = order or shuffled(seed, size)

    def __iter__(self) -> Iterator[Lane]:
        per_epoch = batches.steps_per_epoch(self.size, self.batch_size, self.lanes)
        for epoch in range(self.steps.start // per_epoch, -(-self.steps.stop // per_epoch)):
            first = max(self.steps.start - epoch * per_epoch, 0)
            last = min(self.steps.stop - epoch * per_epoch, per_epoch)
            lanes, ahead = tee(self._lanes_of(range(first, last)))
            spans = (positions for *_, positions in ahead)
            chosen = indices_of(spans, partial(self.order, epoch), self.convert)
            for (step, lane, samples, step_samples, _), indices in zip(lanes, chosen, strict=True):
                yield Lane(epoch * per_epoch + step, lane, samples, step_samples, indices)

    def _lanes_of(self, steps: range) -> Iterator[tuple[int, int, int, int, range]]:
        """The lanes of each step: step, lane, samples of the lane and of the step, positions."""
        mine = self.rank_lanes.mine
        for step in steps:
            step_samples = len(batches.step_positions(step, self.size, self.batch_size, self.lanes))
            needed = self.lanes_in(step) if self.is_padded else 1
            for index, lane in enumerate(range(mine.start, mine.start + max(len(mine), needed))):
                if lane in mine and (positions := self._positions(step, lane)):
                    yield step, lane, len(positions), step_samples, positions
                elif index < needed:
                    # The rank must take part in the reduction of the step: its lane borrows the samples of lane 0, with
                    # weight zero.
                    yield step, lane, 0, step_samples, self._positions(step, 0)

    def lanes_in(self, step: int) -> int:
        """The largest number of lanes with samples that a rank has in a step of an epoch: that of rank 0."""
        return sum(1 for lane in range(self.rank_lanes.most) if self._positions(step, lane))

    def _positions(self, step: int, lane: int) -> range:
        return batches.lane_positions(step, lane, self.size, self.batch_size, self.lanes)


def steps_of(lanes: Iterable[Lane], *, steps_per_epoch: int, total_steps: int) -> Iterator[StepInputs]:
    """The lanes of this rank, grouped by step."""
    for step, step_lanes in groupby(lanes, key=lambda lane: lane.step):
        ends_epoch, ends_run = (step + 1) % steps_per_epoch == 0, step + 1 == total_steps
        yield StepInputs(
            step=step,
            epoch=step // steps_per_epoch,
            lanes=list(step_lanes),
            ends_epoch=ends_epoch or ends_run,
            ends_run=ends_run,
            is_epoch_cut_short=ends_run and not ends_epoch,
        )
