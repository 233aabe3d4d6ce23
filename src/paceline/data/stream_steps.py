"""Steps of the managed loop over an iterable data set: the requests of a rank, and the agreement of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from paceline.data import batches
from paceline.data.lanes import StepInputs
from paceline.data.loader import Collate, loader_options, no_collate
from paceline.data.overlap import check_samples_differ
from paceline.data.stream import Warn
from paceline.data.stream_lanes import FetchedLane, LaneReader, LaneStatus, ReadRequest, ReadResponse
from paceline.data.workers import WorkerLoader, start_worker
from paceline.errors import DataError
from paceline.observe.progress import Progress
from paceline.world import Exchange, World

SKIPPING = "skipping steps"  # the phase while a resumed rank reads the samples before its first step


class RequestSampler(Sampler[ReadRequest]):
    """The requests of an endless sequence of steps; a step has one request per process."""

    def __init__(self, rank_lanes: range, workers: int, *, epoch: int, first_step: int, skip_until: int) -> None:
        self.processes = max(1, min(workers, len(rank_lanes)))
        self.rank_lanes, self.skip_until = rank_lanes, skip_until
        self.start_epoch(epoch, first_step)

    def start_epoch(self, epoch: int, first_step: int) -> None:
        """Request a new epoch from now on, which starts at `first_step`."""
        self.epoch, self.step = epoch, first_step

    def __iter__(self) -> Iterator[ReadRequest]:
        while True:
            epoch, step = self.epoch, self.step
            self.step += 1
            # The DataLoader distributes requests round-robin, so the same process always reads a lane.
            for process in range(self.processes):
                yield ReadRequest(epoch, step, self.rank_lanes[process :: self.processes], step < self.skip_until)


@dataclass
class StreamSteps:
    """The steps of a run over an iterable data set: the next samples of each lane, until all lanes have ended."""

    dataset: Any
    seed: int
    batch_size: int
    lanes: int
    workers: int
    epochs: int
    max_steps: int | None
    step: int  # the first step to yield
    stream_position: tuple[int, int]  # the epoch of that step, and the first step of that epoch
    world: World
    progress: Progress
    warn: Warn
    collate: Collate | None = None

    def __iter__(self) -> Iterator[StepInputs]:
        """The inputs of each step in order. All ranks."""
        exchange = self.world.exchange(len(LaneStatus._fields) * self.lanes)
        step, (epoch, first_step) = self.step, self.stream_position
        if step > first_step:
            self.warn(
                f"an iterable data set can only be read from its beginning: {step - first_step} steps of epoch "
                f"{epoch + 1}, up to {(step - first_step) * self.batch_size} samples of each lane, are read again and "
                "skipped"
            )
        rank_lanes = batches.lanes_of(self.world.rank, self.world.size, self.lanes)
        requests = RequestSampler(rank_lanes, self.workers, epoch=epoch, first_step=first_step, skip_until=step)
        responses = iter(self._loader(requests))
        while epoch < self.epochs and (self.max_steps is None or step < self.max_steps):
            fetched = self._fetch(responses, epoch, step, len(rank_lanes))
            statuses = self._exchange_statuses(exchange, fetched)
            self._check(statuses, epoch, step)
            ends_epoch = all(status.is_finished for status in statuses)
            ends_run = step + 1 == self.max_steps or (ends_epoch and epoch + 1 == self.epochs)
            if ends_epoch:
                epoch, first_step = epoch + 1, step + 1
                requests.start_epoch(epoch, first_step)
            step_samples = sum(status.samples for status in statuses)
            lanes = [lane._replace(step_samples=step_samples) for lane, _ in fetched]
            yield StepInputs(
                step=step,
                epoch=epoch - ends_epoch,
                lanes=[lane for lane in lanes if lane.samples] or lanes[:1],
                ends_epoch=ends_epoch or ends_run,
                ends_run=ends_run,
                is_epoch_cut_short=ends_run and not ends_epoch,
                stream_position=(epoch, first_step),
            )
            step += 1

    def _loader(self, requests: RequestSampler) -> DataLoader[Any]:
        reader = LaneReader(
            self.dataset, seed=self.seed, batch_size=self.batch_size, lanes=self.lanes, collate=self.collate
        )
        options = loader_options(requests.processes if self.workers else 0, self.world, self.seed)
        if self.workers:
            options["worker_init_fn"] = _start_lane_worker
        return WorkerLoader(reader, batch_sampler=requests, collate_fn=no_collate, **options)  # type: ignore[arg-type]

    def _fetch(self, responses: Iterator[ReadResponse], epoch: int, step: int, lanes: int) -> list[FetchedLane]:
        """The lanes of this rank in a step, in their order."""
        fetched: list[FetchedLane] = []
        for response in responses:
            if response.epoch == epoch and response.step < step:
                self.progress.phase, self.progress.batch = SKIPPING, response.step
            elif response.epoch == epoch:  # otherwise it was requested before the end of its epoch was known
                fetched += response.fetched
            if len(fetched) == lanes:
                break
        if self.progress.phase == SKIPPING:
            self.progress.phase, self.progress.batch = "training", None
        return sorted(fetched, key=lambda each: each.lane.lane)

    def _exchange_statuses(self, exchange: Exchange, fetched: list[FetchedLane]) -> list[LaneStatus]:
        """The statuses of the lanes of all ranks. All ranks."""
        numbers = [0] * (len(LaneStatus._fields) * self.lanes)
        for lane, status in fetched:
            start = len(status) * lane.lane
            numbers[start : start + len(status)] = map(int, status)
        exchange.begin(*numbers)
        flat = iter(exchange.end())
        return [LaneStatus(*islice(flat, len(LaneStatus._fields))) for _ in range(self.lanes)]

    def _check(self, statuses: list[LaneStatus], epoch: int, step: int) -> None:
        """Raise or warn if a data set is not sharded correctly; the result is the same on all ranks."""
        empty = [lane for lane, status in enumerate(statuses) if status.is_empty]
        if empty:
            raise DataError(
                f"the data set yields no samples for lane {empty[0]} of {self.lanes} in epoch {epoch + 1}; make "
                "__iter__ yield some for each lane, such as `yield from paceline.shard(samples)`, or use fewer lanes"
            )
        if not any(status.samples for status in statuses):
            raise DataError(
                f"the data set yields fewer samples in epoch {epoch + 1} than before the run was resumed at step {step}"
            )
        check_samples_differ({}, "lane", ((lane, status.digest) for lane, status in enumerate(statuses)))
        if epoch == self.stream_position[0] and any(status.is_unsharded for status in statuses):
            self.warn(
                "the data set does not call paceline.shard: unless it generates random samples, every lane gets all "
                "samples; write `yield from paceline.shard(samples)` in __iter__"
            )


def _start_lane_worker(worker: int) -> None:
    """Hide the DataLoader's worker info: a data set that shards by it would shard the samples of a lane again."""
    start_worker(worker)
    torch.utils.data._utils.worker._worker_info = None
