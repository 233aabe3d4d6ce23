"""Saves checkpoints during training: a step waits for a copy of the state, and files are written in the background.

The stages of one save, in the order of the methods of `Saver`:

1. `start`: every rank copies its part of the state into host memory; training continues.
2. `_write_files`, in each rank's writer thread: send tensors of a sharded optimizer to the ranks that write them, then
   write this rank's files.
3. `advance`, called by the loop when no rank is writing: gather the files of all ranks; `_publish`, in rank 0's writer
   thread: write the manifest, rename the folder, remove old checkpoints.
4. `advance`, called again: `_report` the checkpoint, or a warning if any rank failed.

All ranks have the same state, and each writes some of the files. Ranks know each other's progress from the numbers
that the loop exchanges at every step. The writer threads call no collective; they only send and receive a sharded
optimizer's tensors, before any operation that could fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import TensorFile, files_of_rank, split_into_files, write_values
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.interval import Failures
from paceline.checkpoint.save_clock import SaveClock
from paceline.checkpoint.state import CheckpointState, Tensors
from paceline.checkpoint.store import Store
from paceline.config import Checkpoint
from paceline.engine.sharding import Sharding
from paceline.observe.events import Events
from paceline.run import tensor_files
from paceline.run.checked_files import FileRecord
from paceline.world import World


@dataclass
class PendingSave:
    """A checkpoint that is being written or published."""

    step: int
    work: Future[Any]  # in this rank's writer thread: writing its files; then, on rank 0, publishing
    nbytes: int
    metrics: Mapping[str, float]
    started_at: float
    is_publishing: bool = False


class Saver:
    """Saves checkpoints of one run, one at a time."""

    def __init__(
        self,
        store: Store,
        options: Checkpoint,
        identity: dict[str, Any],
        world: World,
        events: Events,
        sharding: Sharding | None = None,
        failures: Failures | None = None,
    ) -> None:
        """`failures`: of this run so far, for `every_minutes: auto`; only rank 0's are used."""
        self._store, self._options, self._identity = store, options, identity
        self._world, self._events, self._is_main = world, events, world.is_main
        self._buffers = HostBuffers(sharding)
        self._writer = ThreadPoolExecutor(1, "paceline-save")
        self._pending: PendingSave | None = None
        self._reserved: Future[None] | None = None
        self._clock = SaveClock(options.every_minutes, failures or Failures(world.size))
        self._is_requested = False
        self._has_warned = False
        self.saved_step = -1  # the last published step, as far as this rank was informed
        self._published: list[int] = []  # steps published since the last call of `newly_published`

    def reserve(self, state: CheckpointState) -> None:
        """Allocate the host memory for copies in the background."""
        self._reserved = self._writer.submit(self._buffers.reserve, state, self._own_files(state))

    # --- when to save ------------------------------------------------------------------------------------------

    @property
    def is_time(self) -> bool:
        """Whether a checkpoint is due by `every_minutes`. Only rank 0's clock counts."""
        return self._is_main and self._clock.is_time

    def end_step(self, step: int) -> None:
        """Measure the time of a step, and report a new interval of `every_minutes: auto`; the others follow rank 0."""
        if report := self._clock.end_step():
            self._events.write("save_interval", step=step, **report)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing or publishing."""
        return self._pending is not None and not self._pending.work.done()

    def request(self, step: int, *, is_time: bool, is_asked: bool) -> None:
        """Request a checkpoint of this step, by `every_steps` or for one of the reasons; the same on all ranks."""
        every = self._options.every_steps
        self._is_requested = self._is_requested or is_asked or is_time or (every is not None and step % every == 0)

    @property
    def is_due(self) -> bool:
        """Whether to save now; a request during another save is kept until that one is published."""
        return self._is_requested and self._pending is None

    # --- one save, from start to publication -------------------------------------------------------------------

    def start(self, step: int, state: CheckpointState, metrics: Mapping[str, float]) -> None:
        """Copy the state and start to write it; with `async: false`, wait until it is published.

        All ranks, with the same state.
        """
        assert self._pending is None
        started_at = time.monotonic()
        if self._reserved is not None:
            self._reserved.result()
        wait_for_copy = self._buffers.copy(state, self._own_files(state))
        work = self._writer.submit(self._write_files, step, state, wait_for_copy)
        self._pending = PendingSave(step, work, state.nbytes, metrics, started_at)
        self._clock.start_save()
        self._is_requested = False
        self._events.write("saving", step=step, held_s=round(time.monotonic() - started_at, 4))
        if not self._options.is_async:
            self.finish()

    def _own_files(self, state: CheckpointState) -> list[TensorFile]:
        """Return the files that this rank writes."""
        return files_of_rank(self._world.rank, self._world.size, split_into_files(state))

    def _write_files(
        self, step: int, state: CheckpointState, wait_for_copy: Callable[[], dict[str, Tensors]]
    ) -> list[FileRecord]:
        """Write this rank's files into the partial folder. Runs in the writer thread."""
        tensors_of_files = wait_for_copy()  # before any disk error: other ranks may wait for tensors that it sends
        folder = self._store.partial(step)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        written = [tensor_files.write_tensors(folder / name, tensors) for name, tensors in tensors_of_files.items()]
        return [*written, write_values(folder, state)] if self._world.is_main else written

    def advance(self) -> None:
        """Take the pending save, if any, to its next stage. Call this when no rank is busy. All ranks."""
        pending = self._pending
        if pending is None:
            return
        if pending.is_publishing:
            self._pending = None
            self._report(pending, pending.work.exception())
            return
        outcomes = self._world.gather_objects(_outcome(pending.work))
        pending.is_publishing = True
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if errors:
            self._pending = None
            # All ranks wait until the folder is removed: the next save may be of the same step, in the same folder.
            self._world.decide(lambda: self._store.discard(pending.step))
            self._report(pending, OSError(errors[0]))
        elif self._world.is_main:
            written = [file for outcome in outcomes if not isinstance(outcome, str) for file in outcome]
            pending.work = self._writer.submit(self._publish, pending, written)

    def _publish(self, pending: PendingSave, written: list[FileRecord]) -> Path:
        """Publish the checkpoint and remove those that are no longer needed. Runs in rank 0's writer thread."""
        try:
            path = self._store.publish(pending.step, written, self._identity, pending.metrics)
        except OSError:
            self._store.discard(pending.step)  # on a full disk, the next checkpoint needs the space
            raise
        best = self._options.best
        self._store.retain(self._options.keep, (best.metric, best.mode) if best is not None else None)
        return path

    def _report(self, pending: PendingSave, error: BaseException | None) -> None:
        """Write the `checkpoint` event, or one warning for a series of failures."""
        cost_s = self._clock.end_save(started_at=pending.started_at, is_saved=error is None)
        if cost_s is not None:
            self.saved_step, self._has_warned = pending.step, False
            self._published.append(self.saved_step)
            seconds = round(time.monotonic() - pending.started_at, 3)
            self._events.write(
                "checkpoint", step=pending.step, bytes=pending.nbytes, seconds=seconds, cost_s=round(cost_s, 4)
            )
        elif not self._has_warned:
            self._has_warned = True
            text = f"the checkpoint of step {pending.step} could not be saved: {error}; training continues without it"
            self._events.write("warning", text=text, step=pending.step)

    def newly_published(self) -> list[Path]:
        """The checkpoints that were published since the last call; the same on all ranks."""
        published, self._published = self._published, []
        return [self._store.path(step) for step in published]

    def finish(self) -> None:
        """Wait until no save is pending. All ranks."""
        while self._pending is not None:
            self._pending.work.exception()
            self.advance()

    def save_now(self, step: int, state: Callable[[], CheckpointState], metrics: Mapping[str, float]) -> bool:
        """Save this step unless it has been saved, and wait for it; return whether it is saved. All ranks."""
        self.finish()
        if not self._world.decide(lambda: self.saved_step == step):
            self.start(step, state(), metrics)
            self.finish()
        return self._world.decide(lambda: self.saved_step == step)


def _outcome(work: Future[list[FileRecord]]) -> list[FileRecord] | str:
    """Return the files that a rank wrote, or the text of its error, to be sent to the other ranks."""
    error = work.exception()
    if error is None:
        return work.result()
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
