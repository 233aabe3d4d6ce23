"""Follows a run folder while it is being written: events to the screen and TensorBoard, rank 0's output, warnings."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console

from paceline.observe.console import Screen
from paceline.observe.event_types import Parser
from paceline.observe.events import read
from paceline.observe.lines import FAILED, RECOVERED, WARNING
from paceline.observe.sinks.sink import Channel
from paceline.observe.sinks.tensorboard import Board
from paceline.observe.tail import NO_FILE, Tail, identity_of
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.summary import result_text, resume_hint
from paceline.system.disk import is_full

INTERVAL_S = 0.1
DISK_S = 2.0  # between two looks at the disk
TORN_S = 1.0  # without a word, until a result counts as the end: the last line of the events may be torn
IDLE_S = 10.0  # without a word, until it is looked whether the run still lives
AGAIN_S = 5.0  # a run that was stopped may be started again at once


class Follower:
    """A thread that shows a run. `ranks` are those whose logs it reads; none where they own the terminal themselves.

    `from_now` leaves out what an earlier life of the run has written; `board` also writes for TensorBoard.
    """

    def __init__(self, folder: RunFolder, ranks: int, *, from_now: bool = False, board: bool = False) -> None:
        self.screen = Screen()
        self._board = Channel(folder.events, Board(folder.tensorboard)) if board else None
        self._events, self._parser = Tail(folder.events, from_end=from_now), Parser()
        self._before = identity_of(folder.events) if from_now else NO_FILE
        self._logs = [Tail(folder.log(rank), from_end=from_now) for rank in range(ranks)]
        # Older events come by again when the file is rewound. Their times are rounded, so this one is too.
        self._since = round(time.time(), 3) if from_now else 0.0
        self._shown: set[str] = set()  # of the moment `_since`
        self._warned: set[str] = set()
        self._folder, self._is_full, self._asked = folder, False, 0.0  # whether its disk is, and when it was asked
        self._is_blind = False
        self._has_damage = False  # whether a line of the events could not be read
        self._failed: set[int] = set()  # ranks: the summary of the first failure has the last word
        self._last = "", time.monotonic()  # the newest event: its kind, and when it was read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="paceline-screen", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look(to_end=True)
        self._plot()
        if self._board is not None:
            self._board.sink.close()
        self.screen.close()

    @property
    def is_over(self) -> bool:
        """Whether the run has said that it has ended, and nothing since."""
        kind, read = self._last
        is_stopped = kind == "run_stopped" and time.monotonic() - read > AGAIN_S
        return kind in ("run_finished", "run_failed") or is_stopped

    @property
    def idle_s(self) -> float:
        """Seconds since the last event was read."""
        return time.monotonic() - self._last[1]

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._look()
            self._plot()

    def _plot(self) -> None:
        """Write for TensorBoard; nothing until there are new events, for the run may be refused."""
        if self._board is not None and identity_of(self._folder.events) != self._before:
            try:
                self._board.look()
            except OSError:  # a disk that is full costs the file, which is made again later
                self._board.start_over()
            except Exception as error:  # noqa: BLE001 - versions that do not fit together raise anything
                self._board = None
                with suppress(OSError):
                    self.screen.note(f"nothing is written for TensorBoard: {error}", style="yellow")

    def _look(self, *, to_end: bool = False) -> None:
        """Show what is new. A screen that is gone, such as a closed pipe, must not end the run."""
        if not self._is_blind:
            try:
                self._show(to_end=to_end)
            except OSError:
                self._is_blind = True

    def _show(self, *, to_end: bool) -> None:
        self._tell_if_full()
        for rank, log in enumerate(self._logs):
            for line in log.lines(to_end=to_end):
                warning = WARNING.match(line)
                if warning and warning[1] not in self._warned:
                    self._warned.add(warning[1])
                    self.screen.note(f"warning (rank {rank}): {warning[1]}", style="yellow")
                if RECOVERED.match(line):
                    self._failed.discard(rank)
                    continue
                if FAILED.match(line):
                    self._failed.add(rank)
                if rank == 0 and not warning and not self._failed:
                    self.screen.line(line)
        for line in self._events.lines():
            event = self._parser.parse(line)
            if event is None and line.strip() and not self._has_damage:
                self._has_damage = True
                self.screen.note("warning: damaged lines of events.jsonl are left out", style="yellow")
            if event is None or event["time"] < self._since or line in self._shown:
                continue
            if event["time"] > self._since:
                self._since = event["time"]
                self._shown.clear()
            self._shown.add(line)
            self._last = event["event"], time.monotonic()
            if event["event"] == "restarted":
                self._failed.clear()
            self.screen.show(event)

    def _tell_if_full(self) -> None:
        """Ranks tell everything by way of the disk, but for this."""
        now = time.monotonic()
        if now - self._asked < DISK_S:
            return
        before, self._asked = self._is_full, now
        with suppress(OSError):  # the folder has gone
            self._is_full = is_full(self._folder.path)
        if self._is_full and not before:
            text = f"the disk of {self._folder.path} is full: nothing can be saved or shown until there is room"
            self.screen.note(f"warning: {text}; training goes on, and waits for room at its end", style="yellow")


def replay(folder: RunFolder) -> None:
    """Print to stdout what a run has reported so far, without the progress within an epoch."""
    screen = Screen()
    screen.console, screen.is_live = Console(highlight=False, soft_wrap=True), False
    for event in read(folder.events) if folder.events.exists() else ():
        screen.show(event)
    if (outcome := result_text(folder)) is not None:
        screen.note(f"done: {outcome}")


def show(folder: RunFolder) -> None:
    """Show a run that lives elsewhere, from its events alone, until it has ended."""
    with Follower(folder, ranks=0) as follower:
        if not folder.events.exists():
            follower.screen.note("the run has not begun yet")
        while not follower.is_over:
            time.sleep(INTERVAL_S)
            if follower.idle_s > TORN_S and folder.result.exists() and not is_locked(folder):
                break
            if follower.idle_s > IDLE_S and folder.events.exists() and not is_locked(folder):
                follower.screen.note(f"nobody trains this run; {resume_hint(folder)}")
                return
    if (outcome := result_text(folder)) is not None:
        follower.screen.note(f"done: {outcome}")
