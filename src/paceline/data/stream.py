"""Iterable data sets in the managed loop: samples → lanes → steps, and ranks that agree on what there is.

A lane is a share of the data, so what it reads does not depend on who rides it. It lives in one process, the rank or
one of its DataLoader workers, which is asked for one step after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from paceline.data import batches
from paceline.data.overlap import digest_of_samples, check_samples_differ
from paceline.data.loader import Lane, StepInputs, collate_of, loader_options
from paceline.data.seeding import seed_generators
from paceline.data.shard import DataShard
from paceline.data.workers import start_worker
from paceline.errors import DataError
from paceline.observe.progress import Progress
from paceline.world import Exchange, World

Notify = Callable[[str], None]
Key = tuple[int | str, ...]


class ShardReader:
    """One pass over a data set by one of those who share it."""

    def __init__(self, dataset: Any, share: DataShard, *, common: Key, own: Key) -> None:
        """The generators are keyed by `common` until the data set asks for its share, then by `own`."""
        self.share, self._dataset, self._common, self._own = share, dataset, common, own
        self._samples: Iterator[Any] | None = None

    def take(self, size: int) -> list[Any]:
        """The next samples, `size` of them or what is left."""
        with self.share.being_read():
            if self._samples is not None:
                return list(islice(self._samples, size))
            # All shares begin alike: samples that are shuffled before they are shared have one order for all.
            seed_generators(*self._common)
            self.share.on_first_ask = lambda: seed_generators(*self._own)
            self._samples = iter(self._dataset)
            first = list(islice(self._samples, 1))
            if self.share.on_first_ask is not None:  # nobody has asked
                self.share.on_first_ask()
                self.share.on_first_ask = None
            return first + list(islice(self._samples, size - 1))


def announce_epoch(dataset: Any, epoch: int) -> None:
    """Tell the data set which epoch begins, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


# --- the managed loop: what one process reads ------------------------------------------------------------------------


class LaneStatus(NamedTuple):
    """What all ranks must know of a lane in a step."""

    samples: int = 0
    is_over: int = 0  # these were its last samples of the epoch
    is_void: int = 0  # it has had none in this epoch
    claim: int = 0  # a digest of its first samples, where there is something to compare
    is_unshared: int = 0  # the data set has not asked for its share


class FetchedLane(NamedTuple):
    """A lane in a step, and the facts about it; `step_samples` is not known yet."""

    lane: Lane
    facts: LaneStatus


class ReadRequest(NamedTuple):
    """What one process is to read next: a batch for each of its lanes."""

    epoch: int
    step: int
    lanes: Sequence[int]
    is_wanted: bool  # or only read, to get past it


class ReadResponse(NamedTuple):
    """What it has read."""

    epoch: int
    step: int
    fetched: list[FetchedLane]


class LaneCursor:
    """A lane in an epoch: how far it has been read."""

    def __init__(self, reading: ShardReader, batch_size: int) -> None:
        self.reading, self.batch_size = reading, batch_size
        self.ahead: list[Any] = []
        self.batch: list[Any] = []  # the last one that was not empty
        self.first = 0  # the number of its first sample in the lane
        self.samples = 0  # in the present step

    def advance(self) -> None:
        """Read the next batch."""
        # Two more, to know an end, and to know it in time: a batch of one sample is too small for BatchNorm.
        self.ahead += self.reading.take(self.batch_size + 2 - len(self.ahead))
        leaves_one = len(self.ahead) == self.batch_size + 1 and self.batch_size > 2
        self.samples = min(len(self.ahead), self.batch_size - leaves_one)
        if self.samples:
            self.first += len(self.batch)
            self.batch, self.ahead = self.ahead[: self.samples], self.ahead[self.samples :]


class LaneReader(Dataset[Any]):
    """Reads lanes in the process that it finds itself in, and keeps them open there."""

    def __init__(self, dataset: Any, *, seed: int, batch_size: int, lanes: int) -> None:
        self.dataset, self.seed, self.batch_size, self.lanes = dataset, seed, batch_size, lanes
        self.collate = collate_of(dataset)
        self._epoch: int | None = None
        self._open: dict[int, LaneCursor] = {}

    def __getitems__(self, ask: ReadRequest) -> ReadResponse:
        is_first = ask.epoch != self._epoch
        if is_first:
            self._begin(ask)
        for lane, opened in self._open.items():
            if not is_first:
                seed_generators(self.seed, "data", ask.step, lane)
            opened.advance()
        fetched = [self._fetch(ask, lane, is_first) for lane in ask.lanes] if ask.is_wanted else []
        return ReadResponse(ask.epoch, ask.step, fetched)

    def _begin(self, ask: ReadRequest) -> None:
        self._epoch = ask.epoch
        announce_epoch(self.dataset, ask.epoch)
        for lane in ask.lanes:
            reading = ShardReader(
                self.dataset,
                DataShard(lane, self.lanes),
                common=(self.seed, "epoch", ask.epoch),
                own=(self.seed, "data", ask.step, lane),
            )
            self._open[lane] = LaneCursor(reading, self.batch_size)

    def _fetch(self, ask: ReadRequest, number: int, is_first: bool) -> FetchedLane:
        opened = self._open[number]
        # A rank whose lanes are all empty rides its first one with the samples that it had last.
        is_needed = bool(opened.batch) and (opened.samples > 0 or number == ask.lanes[0])
        lane = Lane(
            step=ask.step,
            lane=number,
            samples=opened.samples,
            step_samples=0,
            indices=list(range(opened.first, opened.first + len(opened.batch))),
            data=self.collate(opened.batch) if is_needed else None,
        )
        facts = LaneStatus(
            samples=opened.samples,
            is_over=not opened.ahead,
            is_void=not opened.batch,
            claim=digest_of_samples(opened.batch + opened.ahead) if is_first and self.lanes > 1 else 0,
            is_unshared=is_first and self.lanes > 1 and not opened.reading.share.is_asked,
        )
        return FetchedLane(lane, facts)


# --- the managed loop: what a rank makes of it -----------------------------------------------------------------------


class RequestSampler(Sampler[ReadRequest]):
    """One step after the other, without end; in each, every process is asked for its lanes."""

    def __init__(self, ridden: range, workers: int, *, epoch: int, began: int, wanted_from: int) -> None:
        self.processes = max(1, min(workers, len(ridden)))
        self.ridden, self.wanted_from = ridden, wanted_from
        self.begin(epoch, began)

    def begin(self, epoch: int, step: int) -> None:
        """Ask for another epoch from now on, which begins with `step`."""
        self.epoch, self.step = epoch, step

    def __iter__(self) -> Iterator[ReadRequest]:
        while True:
            epoch, step = self.epoch, self.step
            self.step += 1
            # The DataLoader deals these out in turn, so that a lane always comes to the same process.
            for place in range(self.processes):
                yield ReadRequest(epoch, step, self.ridden[place :: self.processes], step >= self.wanted_from)


@dataclass
class StreamSteps:
    """The steps of a run over an iterable data set: the next samples of each lane, until all lanes are at their end."""

    dataset: Any
    seed: int
    batch_size: int
    lanes: int
    workers: int
    epochs: int
    max_steps: int | None
    step: int  # the first to give
    mark: tuple[int, int]  # the epoch that it is in, and the step with which that began
    world: World
    progress: Progress
    tell: Notify

    def __iter__(self) -> Iterator[StepInputs]:
        """All ranks."""
        exchange, step, (epoch, began) = Exchange(self.world), self.step, self.mark
        if step > began:
            self.tell(
                f"an iterable data set can only be read from its beginning: {step - began} steps of epoch {epoch + 1}, "
                f"up to {(step - began) * self.batch_size} samples of each lane, are read once more and left out"
            )
        ridden = batches.lanes_of(self.world.rank, self.world.size, self.lanes)
        asks = RequestSampler(ridden, self.workers, epoch=epoch, began=began, wanted_from=step)
        answers = iter(self._loader(asks))
        while epoch < self.epochs and (self.max_steps is None or step < self.max_steps):
            fetched = self._fetched(answers, epoch, step, len(ridden))
            facts = self._agreed(exchange, fetched)
            self._check(facts, epoch, step)
            ends_epoch = all(fact.is_over for fact in facts)
            ends_run = step + 1 == self.max_steps or (ends_epoch and epoch + 1 == self.epochs)
            if ends_epoch:
                epoch, began = epoch + 1, step + 1
                asks.begin(epoch, began)
            step_samples = sum(fact.samples for fact in facts)
            lanes = [lane._replace(step_samples=step_samples) for lane, _ in fetched]
            yield StepInputs(
                step=step,
                epoch=epoch - ends_epoch,
                lanes=[lane for lane in lanes if lane.samples] or lanes[:1],
                ends_epoch=ends_epoch or ends_run,
                ends_run=ends_run,
                breaks_off=ends_run and not ends_epoch,
                mark=(epoch, began),
            )
            step += 1

    def _loader(self, asks: RequestSampler) -> DataLoader[Any]:
        reader = LaneReader(self.dataset, seed=self.seed, batch_size=self.batch_size, lanes=self.lanes)
        options = loader_options(asks.processes if self.workers else 0, self.world, self.seed)
        if self.workers:
            options["worker_init_fn"] = _start_lane_worker
        return DataLoader(reader, batch_sampler=asks, collate_fn=_as_it_is, **options)  # type: ignore[arg-type]

    def _fetched(self, answers: Iterator[ReadResponse], epoch: int, step: int, lanes: int) -> list[FetchedLane]:
        """The lanes of this rank in a step, in their order."""
        fetched: list[FetchedLane] = []
        for answer in answers:
            if answer.epoch == epoch and answer.step < step:
                self.progress.phase, self.progress.batch = "leaving out steps", answer.step
            elif answer.epoch == epoch:  # or else asked for before it was known that the epoch had ended
                fetched += answer.fetched
            if len(fetched) == lanes:
                break
        if self.progress.phase == "leaving out steps":
            self.progress.phase, self.progress.batch = "training", None
        return sorted(fetched, key=lambda one: one.lane.lane)

    def _agreed(self, exchange: Exchange, fetched: list[FetchedLane]) -> list[LaneStatus]:
        """The facts of all lanes, on all ranks. All ranks."""
        numbers = [0] * (len(LaneStatus._fields) * self.lanes)
        for lane, facts in fetched:
            start = len(facts) * lane.lane
            numbers[start : start + len(facts)] = map(int, facts)
        exchange.begin(*numbers)
        flat = iter(exchange.end())
        return [LaneStatus(*islice(flat, len(LaneStatus._fields))) for _ in range(self.lanes)]

    def _check(self, facts: list[LaneStatus], epoch: int, step: int) -> None:
        """The same verdict on all ranks."""
        void = [lane for lane, fact in enumerate(facts) if fact.is_void]
        if void:
            raise DataError(
                f"the data set yields no samples for lane {void[0]} of {self.lanes} in epoch {epoch + 1}; let __iter__ "
                "give each lane some, for instance `yield from paceline.shard(samples)`, or use fewer lanes"
            )
        if not any(fact.samples for fact in facts):
            raise DataError(
                f"the data set yields fewer samples in epoch {epoch + 1} than before the run was resumed at step {step}"
            )
        check_samples_differ({}, "lane", ((lane, fact.claim) for lane, fact in enumerate(facts)))
        if epoch == self.mark[0] and any(fact.is_unshared for fact in facts):
            self.tell(
                "the data set does not ask for its share: unless it makes samples up at random, every lane sees all of "
                "them; write `yield from paceline.shard(samples)` in __iter__"
            )


def _start_lane_worker(worker: int) -> None:
    """Data sets that share by DataLoader workers would do so within a lane, where there is nothing to share."""
    start_worker(worker)
    torch.utils.data._utils.worker._worker_info = None


def _as_it_is(answer: ReadResponse) -> ReadResponse:
    return answer
