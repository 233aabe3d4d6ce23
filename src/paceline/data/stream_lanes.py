"""Lanes of an iterable data set, read in one process: the rank itself or one of its DataLoader workers.

A lane is a shard of the data, so its samples do not depend on the rank that processes it. One process reads a lane
from the start of an epoch to its end, one step per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from paceline.data.lanes import Lane
from paceline.data.loader import Collate, collate_of
from paceline.data.overlap import digest_of_samples
from paceline.data.seeding import seed_generators
from paceline.data.shard import DataShard
from paceline.data.stream import ShardReader, announce_epoch


class LaneStatus(NamedTuple):
    """The facts about a lane in a step that all ranks need."""

    samples: int = 0
    is_finished: int = 0  # these are its last samples of the epoch
    is_empty: int = 0  # the lane has had no samples in this epoch
    digest: int = 0  # of its first samples; 0 if there is nothing to compare
    is_unsharded: int = 0  # the data set has not called `paceline.shard`


class FetchedLane(NamedTuple):
    """A lane in a step, and its status; `step_samples` is not set yet."""

    lane: Lane
    status: LaneStatus


class ReadRequest(NamedTuple):
    """The next batches that one process must read, one per lane."""

    epoch: int
    step: int
    lanes: Sequence[int]
    is_skipped: bool  # read only to advance the lanes past this step


class ReadResponse(NamedTuple):
    """The batches that one process has read for a request."""

    epoch: int
    step: int
    fetched: list[FetchedLane]


class LaneCursor:
    """The position up to which a lane has been read in an epoch."""

    def __init__(self, reader: ShardReader, batch_size: int) -> None:
        self.reader, self.batch_size = reader, batch_size
        self.ahead: list[Any] = []  # samples that have been read, but belong to later steps
        self.batch: list[Any] = []  # the last batch that was not empty
        self.first = 0  # the number of its first sample in the lane
        self.samples = 0  # in the current step

    def advance(self) -> None:
        """Read the next batch."""
        # Two samples more than a batch: one shows whether the lane ends here, the other whether only a single sample
        # would remain for the next batch, which is too small for BatchNorm.
        self.ahead += self.reader.take(self.batch_size + 2 - len(self.ahead))
        leaves_one = len(self.ahead) == self.batch_size + 1 and self.batch_size > 2
        self.samples = min(len(self.ahead), self.batch_size - leaves_one)
        if self.samples:
            self.first += len(self.batch)
            self.batch, self.ahead = self.ahead[: self.samples], self.ahead[self.samples :]


class LaneReader(Dataset[Any]):
    """Reads the lanes of the requests that its process receives, and keeps their cursors between requests."""

    def __init__(self, dataset: Any, *, seed: int, batch_size: int, lanes: int, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.batch_size, self.lanes = dataset, seed, batch_size, lanes
        self.collate = collate_of(dataset, collate)
        self._epoch: int | None = None
        self._cursors: dict[int, LaneCursor] = {}

    def __getitems__(self, request: ReadRequest) -> ReadResponse:
        is_first = request.epoch != self._epoch
        if is_first:
            self._start_epoch(request)
        for lane, cursor in self._cursors.items():
            if not is_first:
                seed_generators(self.seed, "data", request.step, lane)
            cursor.advance()
        lanes = [] if request.is_skipped else request.lanes
        return ReadResponse(request.epoch, request.step, [self._fetch(request, lane, is_first) for lane in lanes])

    def _start_epoch(self, request: ReadRequest) -> None:
        self._epoch = request.epoch
        announce_epoch(self.dataset, request.epoch)
        for lane in request.lanes:
            reader = ShardReader(
                self.dataset,
                DataShard(lane, self.lanes),
                common=(self.seed, "epoch", request.epoch),
                own=(self.seed, "data", request.step, lane),
            )
            self._cursors[lane] = LaneCursor(reader, self.batch_size)

    def _fetch(self, request: ReadRequest, number: int, is_first: bool) -> FetchedLane:
        cursor = self._cursors[number]
        # A rank whose lanes are all empty processes its first lane with the samples of that lane's last batch.
        is_needed = bool(cursor.batch) and (cursor.samples > 0 or number == request.lanes[0])
        # A collate_fn that draws random numbers, such as masks, draws the same ones on any process.
        seed_generators(self.seed, "collate", request.step, number)
        lane = Lane(
            step=request.step,
            lane=number,
            samples=cursor.samples,
            step_samples=0,
            indices=list(range(cursor.first, cursor.first + len(cursor.batch))),
            data=self.collate(cursor.batch) if is_needed else None,
        )
        status = LaneStatus(
            samples=cursor.samples,
            is_finished=not cursor.ahead,
            is_empty=not cursor.batch,
            digest=digest_of_samples(cursor.batch + cursor.ahead) if is_first and self.lanes > 1 else 0,
            is_unsharded=is_first and self.lanes > 1 and not cursor.reader.shard.is_called,
        )
        return FetchedLane(lane, status)
