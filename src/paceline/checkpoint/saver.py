"""Saves a run while it trains: a step pays for a copy of the state, the writing happens beside the next ones.

All ranks hold the same state, and each writes its share of the files. What one rank must know of the others comes from
the loop, which exchanges a few numbers at each step anyway; no thread here uses a collective. Only the tensors of a
sharded optimizer go from thread to thread, to the ranks that write them, before anything else that could fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.state import Shard, Staging, State, Tensors, shards_of, share_of, write_rest
from paceline.checkpoint.store import Store
from paceline.config import Checkpoint
from paceline.engine.sharding import Sharding
from paceline.observe.events import Events
from paceline.run import tensor_files
from paceline.run.tensor_files import Written
from paceline.world import World


@dataclass
class Flight:
    """A checkpoint on its way to the disk."""

    step: int
    work: Future[Any]  # of this rank: first its files, then, on rank 0, the publishing
    size: int
    metrics: Mapping[str, float]
    began: float
    is_publishing: bool = False


class Saver:
    """At most one checkpoint is being written at a time."""

    def __init__(
        self,
        store: Store,
        options: Checkpoint,
        identity: dict[str, Any],
        world: World,
        events: Events,
        sharding: Sharding | None = None,
    ) -> None:
        self._store, self._options, self._identity = store, options, identity
        self._world, self._events = world, events
        self._staging = Staging(sharding)
        self._writer = ThreadPoolExecutor(1, "paceline-save")
        self._flight: Flight | None = None
        self._reserved: Future[None] | None = None
        self._last_time = time.monotonic()
        self._owes = False
        self._has_warned = False
        self.saved_step = -1  # the last one that this rank knows to be published
        self._reported_step = -1

    # --- what the loop asks and is told ------------------------------------------------------------------------

    @property
    def is_time(self) -> bool:
        """Whether rank 0's clock says that a checkpoint is due."""
        minutes = self._options.every_minutes
        is_due = minutes is not None and time.monotonic() - self._last_time >= 60 * minutes
        return self._world.is_main and is_due

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._flight is not None and not self._flight.work.done()

    def is_due(self, step: int, *, is_time: bool, is_asked: bool) -> bool:
        """Whether to save now, from what all ranks know; what comes while another is being written is owed."""
        every = self._options.every_steps
        self._owes = self._owes or is_asked or is_time or (every is not None and step % every == 0)
        return self._owes and self._flight is None

    def reserve(self, state: State) -> None:
        """Have the memory for copies made ready, beside training."""
        self._reserved = self._writer.submit(self._staging.reserve, state, self._share(state))

    def newly_published(self) -> Path | None:
        """The checkpoint that was published since the last call, if there is one; the same on all ranks."""
        if self.saved_step == self._reported_step:
            return None
        self._reported_step = self.saved_step
        return self._store.path(self.saved_step)

    # --- saving ------------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, metrics: Mapping[str, float]) -> None:
        """Copy the state and begin to write it; with `async: false`, write it. All ranks, with the same state."""
        assert self._flight is None
        began = time.perf_counter()
        if self._reserved is not None:
            self._reserved.result()
        copied = self._staging.copy(state, self._share(state))
        work = self._writer.submit(self._write, step, state, copied)
        self._flight = Flight(step, work, state.size, metrics, began=began)
        self._last_time, self._owes = time.monotonic(), False
        self._events.write("saving", step=step, held_s=round(time.perf_counter() - began, 4))
        if not self._options.is_async:
            self.finish()

    def settle(self) -> None:
        """Take the checkpoint on its way a stage further; once no rank is busy any more. All ranks."""
        flight = self._flight
        if flight is None:
            return
        if flight.is_publishing:
            self._flight = None
            self._conclude(flight, flight.work.exception())
            return
        outcomes = self._world.gather_objects(_outcome(flight.work))
        flight.is_publishing = True
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if errors:
            self._flight = None
            # All ranks wait for it: the next attempt may be of the same step, in the same folder.
            self._world.decide(lambda: self._store.discard(flight.step))
            self._conclude(flight, OSError(errors[0]))
        elif self._world.is_main:
            written = [file for outcome in outcomes if not isinstance(outcome, str) for file in outcome]
            flight.work = self._writer.submit(self._publish, flight, written)

    def finish(self) -> None:
        """Wait until nothing is on its way. All ranks."""
        while self._flight is not None:
            self._flight.work.exception()
            self.settle()

    def save_now(self, step: int, state: Callable[[], State], metrics: Mapping[str, float]) -> bool:
        """Save and wait for it, unless that step is saved already; whether it is. All ranks."""
        self.finish()
        if not self._world.decide(lambda: self.saved_step == step):
            self.start(step, state(), metrics)
            self.finish()
        return self._world.decide(lambda: self.saved_step == step)

    def _share(self, state: State) -> list[Shard]:
        return share_of(self._world.rank, self._world.size, shards_of(state))

    def _write(self, step: int, state: State, copied: Callable[[], dict[str, Tensors]]) -> list[Written]:
        """In the writer's thread: this rank's files."""
        share = copied()  # first: other ranks may wait for what this one passes on
        folder = self._store.partial(step)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        written = [tensor_files.write_tensors(folder / file, tensors) for file, tensors in share.items()]
        return [*written, write_rest(folder, state)] if self._world.is_main else written

    def _publish(self, flight: Flight, written: list[Written]) -> Path:
        """In rank 0's writer thread: the manifest, the name, and the end of what is no longer needed."""
        try:
            path = self._store.publish(flight.step, written, self._identity, flight.metrics)
        except OSError:
            self._store.discard(flight.step)  # on a full disk, the next one needs its room
            raise
        best = self._options.best
        self._store.retain(self._options.keep, (best.metric, best.mode) if best is not None else None)
        return path

    def _conclude(self, flight: Flight, error: BaseException | None) -> None:
        if error is None:
            self.saved_step, self._has_warned = flight.step, False
            seconds = round(time.perf_counter() - flight.began, 3)
            self._events.write("checkpoint", step=flight.step, bytes=flight.size, seconds=seconds)
        elif not self._has_warned:  # once, until a save works again
            self._has_warned = True
            text = f"the checkpoint of step {flight.step} could not be saved: {error}; the run goes on without it"
            self._events.write("warning", text=text, step=flight.step)


def _outcome(work: Future[list[Written]]) -> list[Written] | str:
    """What a rank wrote, or why it could not, as something that can be sent."""
    error = work.exception()
    if error is None:
        return work.result()
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
