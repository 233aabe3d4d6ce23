"""Detects hangs: every rank writes its position to the run folder, and reads the others' if none makes progress.

It uses plain files because collectives may be what hangs. `hangs` describes a hang in words.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from paceline.config import Config
from paceline.observe.hangs import (
    WORKERS,
    RankPosition,
    StackFrame,
    location_in,
    position_in_dump,
    read_position,
    stacks_in,
    write_hang,
)
from paceline.observe.progress import Progress
from paceline.observe.rank_log import failed_line, read_end, recovered_line, warning_line
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.cpu_time import others_cpu_s

BEAT_S = 1.0
SILENT_S = 3.0  # a rank whose last heartbeat is older blocks its interpreter, or has ended
DUMP_BEATS = 3  # time for other ranks to dump their stacks
LAST_RESORT_S = 15.0  # after the timeout, if no rank can check the others
ENDED = -1  # in place of the number of a heartbeat
BUSY_SHARE, BUSY_S = 0.01, 0.05  # of CPU time: a rank that is still starting and uses more makes progress
# Dumps all stacks even while a call blocks the interpreter; DataLoader workers inherit it. No library uses this signal.
DUMP_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


@contextmanager
def watching(
    config: Config, folder: RunFolder, rank: int, world_size: int, progress: Progress, *, has_launcher: bool = True
) -> Iterator[None]:
    """Write this rank's position while the body runs; end the process in a hang, unless hang_timeout_s is 0.

    If all ranks block their interpreters, none can check: Paceline's launcher does, or without it a timer in each rank.
    """
    with folder.log(rank).open("a", encoding="utf-8") as log:
        has_timer = not has_launcher and config.hang_timeout_s > 0
        watchdog = Watchdog(
            config.hang_timeout_s, folder, rank, world_size, progress, log.fileno(), has_timer=has_timer
        )
        was_enabled = faulthandler.is_enabled()
        if not was_enabled:
            faulthandler.enable(log)  # a process that Gloo aborts dumps its stacks
        faulthandler.register(DUMP_SIGNAL, log)
        watchdog.start()
        try:
            yield
        except BaseException as error:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            watchdog.stop(StackFrame(frame.filename, frame.lineno or 0, frame.name) for frame in frames)
            raise
        else:
            watchdog.stop()
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            if not was_enabled:
                faulthandler.disable()


class Watchdog:
    """A thread of one rank: samples its main thread, writes its position, and reads those of the others in a hang."""

    def __init__(
        self, timeout_s: float, folder: RunFolder, rank: int, world_size: int, progress: Progress, log: int, *,
        has_timer: bool = False,
    ) -> None:  # fmt: skip
        self.timeout_s, self.folder, self.rank, self.world_size = timeout_s, folder, rank, world_size
        self.progress, self.log, self.has_timer = progress, log, has_timer
        self._main_thread = threading.get_ident()
        self._own = RankPosition(rank, socket.gethostname(), os.getpid(), log_start=folder.log(rank).stat().st_size)
        self._looked = self._began = time.monotonic()
        self._cpu_s, self._cpu_since = 0.0, self._looked
        self._last: tuple[object, ...] = ()
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # of each rank, its last heartbeat and when this rank first saw it
        self._dumped: list[int] = []  # ranks, including this one, whose stacks this rank has requested
        self._worker_location: str | None = None  # in a DataLoader worker that this rank waits for
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        # Reading the positions of all ranks only when a hang is near: on a large cluster these are many files.
        self.look_after_s = max(0.0, min(timeout_s / 2, timeout_s - 10))

    def start(self) -> None:
        """Write a heartbeat now and then every second."""
        self.beat()
        self._thread.start()

    def stop(self, frames: Iterable[StackFrame] | None = None) -> None:
        """Stop the heartbeat; write where an error was raised, if `frames` are given."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        location, waits_in = (None, "the end of the run") if frames is None else location_in(frames)
        self._write_position(beat=ENDED, location=location, waits_in=waits_in)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.beat()
            if self.timeout_s:
                self.look_for_hang()

    def look_for_hang(self) -> None:
        """Report a hang if no rank made progress for the timeout; show output again if ranks continue after a dump."""
        positions = self.look() if self._own.idle_s >= self.look_after_s else []
        if positions and self._is_hang(positions):
            self._on_hang(positions)
        elif self._dumped:
            self._recover()

    def _is_hang(self, positions: list[RankPosition]) -> bool:
        return min(position.idle_s for position in positions) >= self.timeout_s

    def beat(self) -> None:
        """Write the position of this rank, and how long it has been idle."""
        if self.has_timer:
            faulthandler.dump_traceback_later(self.timeout_s + LAST_RESORT_S, exit=True, file=self.log)
        now = time.monotonic()
        # A process that was suspended for an hour and continues has not been idle for an hour.
        idle_s = 0.0 if self._has_moved(now) else self._own.idle_s + min(now - self._looked, BEAT_S)
        self._looked = now
        location, waits_in = location_in(_stack(self._main_thread))
        waits_in = waits_in if self.world_size > 1 else None
        location = self._worker_location or location
        self._write_position(beat=self._own.beat + 1, location=location, waits_in=waits_in, idle_s=idle_s)

    def _wait_beating(self, beats: int) -> None:
        """Wait for other ranks, and keep writing heartbeats meanwhile."""
        for _ in range(beats):
            self._ended.wait(BEAT_S)
            self.beat()

    def _write_position(self, **changes: Any) -> None:
        at = self.progress
        now: dict[str, Any] = {"phase": at.phase, "step": at.step, "batch": at.batch, "place": at.describe()}
        self._own = replace(self._own, **now, **changes)
        with suppress(OSError):  # a full disk must not end a run
            write_json(self.folder.place(self.rank), asdict(self._own), is_lasting=False)  # fsync may be slow

    def _has_moved(self, now: float) -> bool:
        at = self.progress
        current = (at.phase, at.epoch, at.step, at.batch, at.samples)
        if current != self._last:
            self._last = current
            return True
        # Before the first samples there is no counter, and tokenising for an hour is not a hang.
        return not at.samples and self.is_busy(others_cpu_s(), now)

    def is_busy(self, cpu_s: float, now: float) -> bool:
        """Whether CPU time was used since the last call that returned True."""
        is_busy = cpu_s - self._cpu_s > BUSY_S + BUSY_SHARE * (now - self._cpu_since)
        if is_busy:
            self._cpu_s, self._cpu_since = cpu_s, now
        return is_busy

    def look(self) -> list[RankPosition]:
        """The positions of all ranks, with their age as this rank sees it. Clocks of other hosts are not compared."""
        now, positions = time.monotonic(), []
        for rank in range(self.world_size):
            position = read_position(self.folder, rank)
            if rank not in self._seen or self._seen[rank][0] != position.beat:
                self._seen[rank] = (position.beat, now if position.pid else self._began)
            age_s = now - self._seen[rank][1]
            is_silent = position.beat > 0 and age_s > SILENT_S
            positions.append(replace(position, idle_s=position.idle_s + age_s, is_silent=is_silent))
        return positions

    def _on_hang(self, positions: list[RankPosition]) -> None:
        if not self._dumped:
            self._dumped = [self.rank]
            os.write(self.log, f"{failed_line(self.rank)}\n".encode())  # the screen does not show what follows
            self._worker_location = self._dump_workers()
            faulthandler.dump_traceback(self.log)
            self.beat()
        if self.folder.hang.exists():  # the run is ending, and on another host no other process ends this rank
            self._wait_beating(DUMP_BEATS)
            os._exit(1)
        if self.rank == min((p.rank for p in positions if p.beat > 0 and not p.is_silent), default=0):
            self._report()

    def _dump_workers(self) -> str | None:
        """Dump the stacks of the DataLoader workers; the user's file:line in one of them if this rank waits for it."""
        log = self.folder.log(self.rank)
        before = log.stat().st_size
        for child in multiprocessing.active_children():
            _signal(child.pid)
        for _ in range(6 if self._own.waits_in == WORKERS else 0):
            self._ended.wait(BEAT_S / 4)
            found = [location_in(stack)[0] for stack in stacks_in(read_end(log, before))]
            if any(found):
                return next(filter(None, found))
        return None

    def _report(self) -> None:
        """Write the hang to the run folder and end this rank, so the launcher ends all; return if ranks continue."""
        self._wait_beating(DUMP_BEATS)
        silent = [position for position in self.look() if position.is_silent and position.host == self._own.host]
        for position in silent:
            self._dumped.append(position.rank)
            self._append(position.rank, failed_line(position.rank))
            _signal(position.pid)
        self._wait_beating(DUMP_BEATS if silent else 0)
        positions = [position_in_dump(p, self.folder) if p.is_silent else p for p in self.look()]
        if not self._is_hang(positions):
            return
        text = write_hang(positions, self.rank, self.timeout_s, self.folder)
        # Directly to the file: another thread may hold the lock of sys.stderr.
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
        os._exit(1)

    def _recover(self) -> None:
        """Make the screen show the ranks' output again: a rank was only suspended, or slow."""
        for rank in self._dumped:
            self._append(rank, recovered_line(rank))
        if len(self._dumped) > 1 or self.rank == 0:
            text = f"no rank made progress for hang_timeout_s={self.timeout_s:g} s; now they do, and training continues"
            self._append(self.rank, warning_line(self.rank, text))
        self._dumped, self._worker_location = [], None

    def _append(self, rank: int, line: str) -> None:
        with suppress(OSError), self.folder.log(rank).open("a", encoding="utf-8") as log:
            print(line, file=log)


def _stack(thread: int) -> Iterator[StackFrame]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _signal(pid: int | None) -> None:
    with suppress(OSError):
        if pid:  # 0 would signal the whole process group
            os.kill(pid, DUMP_SIGNAL)
