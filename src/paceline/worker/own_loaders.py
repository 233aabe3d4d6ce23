"""The loaders of the user's own loop with `run`: batches on the device, from the run's current position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paceline.data.feed import Feed
from paceline.data.seeding import generator_states, restore_generators, seed_generators
from paceline.data.share import RankShare
from paceline.engine.own_step import OwnStep
from paceline.observe.events import Events
from paceline.observe.progress import Progress


class TrainLoader:
    """The batches of this rank in an epoch; a resumed run gets only the remaining ones."""

    def __init__(
        self, dataset: Any, batch_size: int, batches: int | None, iterate: Callable[[], Iterator[Any]]
    ) -> None:
        """`batches` is the number of batches in an epoch, None for an iterable data set."""
        self.dataset, self.batch_size, self._batches, self._iterate = dataset, batch_size, batches, iterate
        self.sampler = self  # loops written for DistributedSampler call loader.sampler.set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch already has its own order."""

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("the length of an iterable data set is unknown")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()


class ValLoader:
    """This rank's batches of the validation data: every sample on exactly one rank; `dataset` is this rank's share."""

    def __init__(
        self, feed: Feed, step: OwnStep, events: Events, progress: Progress, close_step: Callable[[], None]
    ) -> None:
        """`close_step` completes a step that the user's code has left unfinished."""
        self._feed, self._step, self._events, self._progress = feed, step, events, progress
        self._close_step = close_step
        self._batches, self._sampler = feed.evaluation_batches()
        size, world = feed.config.batch_size, feed.world
        first = range(world.rank * size, len(feed.dataset), world.size * size)
        indices = [index for start in first for index in range(start, min(start + size, len(feed.dataset)))]
        self.dataset, self.batch_size = RankShare(feed.dataset, np.array(indices)), size

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Random numbers and buffers of a batch depend only on the batch, and are restored afterwards."""
        self._close_step()
        before = generator_states()
        self._step.evaluation.begin(is_in_batch=self._step.lane is not None)
        phase, number = self._progress.phase, self._progress.batch
        try:
            for done, batch in enumerate(self._batches):
                self._step.evaluation.restart()
                seed_generators(self._step.settings.seed, "evaluation", batch.batch)
                yield self._feed.evaluation_batch(batch)
                self._progress.phase, self._progress.batch = "validating", done
                self._events.write_sometimes("evaluating", batch=done + 1, batches=len(self))
        finally:  # even if the user's code leaves the loader early
            self._progress.phase, self._progress.batch = phase, number
            self._step.evaluation.end()
            restore_generators(before)
