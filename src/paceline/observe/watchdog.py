"""The hang watch: every rank tells the run folder where it is, and the ranks read it when nothing moves any more.

A side channel of plain files, since the collectives are what hangs. Words are made in hang.py.
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
    Frame,
    Place,
    log_since,
    place_by_dump,
    place_in,
    read_place,
    stacks_in,
    write_hang,
)
from paceline.observe.lines import failed_line, recovered_line, warning_line
from paceline.observe.progress import Progress
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system.cpu_time import others_cpu_s

BEAT_S = 1.0
SILENT_S = 3.0  # a rank whose beat is older holds its interpreter, or has ended
DUMP_BEATS = 3  # for other ranks to write their stacks down
LAST_RESORT_S = 15.0  # after the timeout, for ranks of which none can look at the others
ENDED = -1  # in place of the number of a beat
BUSY_SHARE, BUSY_S = 0.01, 0.05  # of CPU time, by which a rank moves that is still building
# Dumps all stacks even while something holds the interpreter; DataLoader workers inherit it. No library uses this one.
DUMP_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


@contextmanager
def watching(
    config: Config, folder: RunFolder, rank: int, world_size: int, progress: Progress, *, has_launcher: bool = True
) -> Iterator[None]:
    """Note where this rank is while the body runs; end the process if no rank moves, unless hang_timeout_s is 0.

    Ranks that all hold their interpreters cannot look: Paceline's launcher does, and without it, a timer of each rank.
    """
    with folder.log(rank).open("a", encoding="utf-8") as log:
        has_timer = not has_launcher and config.hang_timeout_s > 0
        heart = Watchdog(config.hang_timeout_s, folder, rank, world_size, progress, log.fileno(), has_timer=has_timer)
        was_enabled = faulthandler.is_enabled()
        if not was_enabled:
            faulthandler.enable(log)  # what Gloo aborts leaves its stacks, too
        faulthandler.register(DUMP_SIGNAL, log)
        heart.start()
        try:
            yield
        except BaseException as error:
            heart.stop(
                Frame(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(error.__traceback__))
            )
            raise
        else:
            heart.stop()
        finally:
            faulthandler.unregister(DUMP_SIGNAL)
            if not was_enabled:
                faulthandler.disable()


class Watchdog:
    """A thread that beats in one rank: looks at its main thread, writes the place, reads the others' if none moves."""

    def __init__(
        self, timeout_s: float, folder: RunFolder, rank: int, world_size: int, progress: Progress, log: int, *,
        has_timer: bool = False,
    ) -> None:  # fmt: skip
        self.timeout_s, self.folder, self.rank, self.world_size = timeout_s, folder, rank, world_size
        self.progress, self.log, self.has_timer = progress, log, has_timer
        self._watched = threading.get_ident()
        self._me = Place(rank, socket.gethostname(), os.getpid(), log_start=folder.log(rank).stat().st_size)
        self._looked = self._began = time.monotonic()
        self._cpu_s, self._cpu_since = 0.0, self._looked
        self._last: tuple[object, ...] = ()
        self._seen: dict[int, tuple[int, float]] = {}  # of each rank, its last beat and when this one saw it first
        self._dumped: list[int] = []  # ranks whose stacks this one has asked for, its own among them
        self._in_worker: str | None = None  # where a DataLoader worker is, of a rank that waits for it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="paceline-watch", daemon=True)
        # Everybody reads everything only when it is about time: on a large cluster that is many files.
        self.look_after_s = max(0.0, min(timeout_s / 2, timeout_s - 10))

    def start(self) -> None:
        """Beat once, then every second."""
        self._beat()
        self._thread.start()

    def stop(self, frames: Iterable[Frame] | None = None) -> None:
        """Beat no more; leave where an error came from, if there was one."""
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        location, waits = (None, "the end of the run") if frames is None else place_in(frames)
        self._tell(beat=ENDED, location=location, waits_in=waits)

    def _live(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beat()
            if self.timeout_s:
                self._look_for_hang()

    def _look_for_hang(self) -> None:
        places = self.look() if self._me.idle_s >= self.look_after_s else []
        if places and self._is_hang(places):
            self._on_hang(places)
        elif self._dumped:
            self._recover()

    def _is_hang(self, places: list[Place]) -> bool:
        return min(place.idle_s for place in places) >= self.timeout_s

    def _beat(self) -> None:
        if self.has_timer:
            faulthandler.dump_traceback_later(self.timeout_s + LAST_RESORT_S, exit=True, file=self.log)
        now = time.monotonic()
        # A process that was stopped for an hour and continues has not been idle for an hour.
        idle_s = 0.0 if self._has_moved(now) else self._me.idle_s + min(now - self._looked, BEAT_S)
        self._looked = now
        location, waits = place_in(_stack(self._watched))
        waits = waits if self.world_size > 1 else None
        self._tell(beat=self._me.beat + 1, location=self._in_worker or location, waits_in=waits, idle_s=idle_s)

    def _beat_on(self, times: int) -> None:
        """Wait for the others, alive in their eyes."""
        for _ in range(times):
            self._ended.wait(BEAT_S)
            self._beat()

    def _tell(self, **changes: Any) -> None:
        at = self.progress
        now: dict[str, Any] = {"phase": at.phase, "step": at.step, "batch": at.batch, "place": at.describe()}
        self._me = replace(self._me, **now, **changes)
        with suppress(OSError):  # a full disk is no reason to end a run
            write_json(self.folder.place(self.rank), asdict(self._me), is_lasting=False)  # a disk may be slow

    def _has_moved(self, now: float) -> bool:
        at = self.progress
        current = (at.phase, at.epoch, at.step, at.batch, at.samples)
        if current != self._last:
            self._last = current
            return True
        # Before the first samples nothing is counted, and tokenising for an hour is no hang.
        return not at.samples and self.is_busy(others_cpu_s(), now)

    def is_busy(self, cpu_s: float, now: float) -> bool:
        """Whether CPU time was used since this last was true."""
        is_busy = cpu_s - self._cpu_s > BUSY_S + BUSY_SHARE * (now - self._cpu_since)
        if is_busy:
            self._cpu_s, self._cpu_since = cpu_s, now
        return is_busy

    def look(self) -> list[Place]:
        """Where all ranks are, with this rank's view of how fresh that is. Clocks of other hosts are not compared."""
        now, places = time.monotonic(), []
        for rank in range(self.world_size):
            place = read_place(self.folder, rank)
            if rank not in self._seen or self._seen[rank][0] != place.beat:
                self._seen[rank] = (place.beat, now if place.pid else self._began)
            age_s = now - self._seen[rank][1]
            is_silent = place.beat > 0 and age_s > SILENT_S
            places.append(replace(place, idle_s=place.idle_s + age_s, is_silent=is_silent))
        return places

    def _on_hang(self, places: list[Place]) -> None:
        if not self._dumped:
            self._dumped = [self.rank]
            os.write(self.log, f"{failed_line(self.rank)}\n".encode())  # the screen leaves out what follows
            self._in_worker = self._dump_workers()
            faulthandler.dump_traceback(self.log)
            self._beat()
        if self.folder.hang.exists():  # the run is ending; on another machine nobody else ends this rank
            self._beat_on(DUMP_BEATS)
            os._exit(1)
        if self.rank == min((place.rank for place in places if place.beat > 0 and not place.is_silent), default=0):
            self._report()

    def _dump_workers(self) -> str | None:
        """Let the DataLoader workers dump their stacks; the user's file:line in one of them, if this rank waits."""
        log = self.folder.log(self.rank)
        before = log.stat().st_size
        for child in multiprocessing.active_children():
            _signal(child.pid)
        for _ in range(6 if self._me.waits_in == WORKERS else 0):
            self._ended.wait(BEAT_S / 4)
            found = [place_in(stack)[0] for stack in stacks_in(log_since(log, before))]
            if any(found):
                return next(filter(None, found))
        return None

    def _report(self) -> None:
        """Write the hang down and end this rank, so that the launcher ends the others; not if they move again."""
        self._beat_on(DUMP_BEATS)
        silent = [place for place in self.look() if place.is_silent and place.host == self._me.host]
        for place in silent:
            self._dumped.append(place.rank)
            self._append(place.rank, failed_line(place.rank))
            _signal(place.pid)
        self._beat_on(DUMP_BEATS if silent else 0)
        places = [place_by_dump(place, self.folder) if place.is_silent else place for place in self.look()]
        if not self._is_hang(places):
            return
        text = write_hang(places, self.rank, self.timeout_s, self.folder)
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())  # no lock that somebody holds
        os._exit(1)

    def _recover(self) -> None:
        """Have the screen show the ranks' output again: one of them was only stopped, or slow."""
        for rank in self._dumped:
            self._append(rank, recovered_line(rank))
        if len(self._dumped) > 1 or self.rank == 0:
            text = f"no rank had moved for hang_timeout_s={self.timeout_s:g} s, now they do; training continues"
            self._append(self.rank, warning_line(self.rank, text))
        self._dumped, self._in_worker = [], None

    def _append(self, rank: int, line: str) -> None:
        with suppress(OSError), self.folder.log(rank).open("a", encoding="utf-8") as log:
            print(line, file=log)


def _stack(thread: int) -> Iterator[Frame]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back


def _signal(pid: int | None) -> None:
    with suppress(OSError):
        if pid:  # 0 would be everybody
            os.kill(pid, DUMP_SIGNAL)
