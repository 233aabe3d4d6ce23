"""Follows a run folder while it is written: shows events, rank 0's output and warnings, and feeds TensorBoard."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType

from rich.console import Console

from paceline.observe.event_types import Parser
from paceline.observe.events import read
from paceline.observe.rank_log import FAILED, RECOVERED, WARNING
from paceline.observe.screen.console import Screen
from paceline.observe.sinks.sink import SinkFeeder
from paceline.observe.sinks.tensorboard import TensorBoardSink
from paceline.observe.tail import NO_FILE, Tail, file_identity
from paceline.run.layout import RunFolder
from paceline.run.lock import is_locked
from paceline.run.summary import result_text, resume_hint
from paceline.system.disk import is_full

INTERVAL_S = 0.1
DISK_CHECK_S = 2.0  # between two checks of the free disk space
INCOMPLETE_S = 1.0  # without an event, until a result is treated as the end: the last event may be an incomplete line
IDLE_S = 10.0  # without an event, until the lock is checked for a process that still trains the run
OF_THE_MIRROR = ("mirror", "mirrored")
RESUMED_S = 5.0  # a run that was stopped may be resumed immediately


class Follower:
    """A thread that shows a run. It reads the logs of `ranks` ranks; 0 where the ranks own the terminal themselves.

    `from_now` skips the output of earlier attempts of the run; `tensorboard` also writes files for TensorBoard.
    """

    def __init__(self, folder: RunFolder, ranks: int, *, from_now: bool = False, tensorboard: bool = False) -> None:
        self.screen = Screen()
        self._tensorboard = SinkFeeder(folder.events, TensorBoardSink(folder.path)) if tensorboard else None
        self._events, self._parser = Tail(folder.events, from_end=from_now), Parser()
        self._before = file_identity(folder.events) if from_now else NO_FILE
        self._logs = [Tail(folder.log(rank), from_end=from_now) for rank in range(ranks)]
        # A rewound file is read again from its start: events before this time are skipped. Their times are rounded.
        self._since = round(time.time(), 3) if from_now else 0.0
        self._shown: set[str] = set()  # events at the time `_since` that were shown
        self._warnings: set[str] = set()
        self._folder, self._is_disk_full, self._disk_checked = folder, False, 0.0
        self._is_screen_lost = False
        self._has_damage = False  # whether a line of the events could not be read
        self._failed: set[int] = set()  # ranks whose output is not shown: the launcher summarizes the first failure
        self._last = "", time.monotonic()  # the newest event: its kind, and when it was read
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-screen", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.update(to_end=True)
        self._feed_tensorboard()
        if self._tensorboard is not None:
            self._tensorboard.sink.close()
        self.screen.close()

    @property
    def is_over(self) -> bool:
        """Whether the newest event is the end of the run."""
        kind, read = self._last
        is_stopped = kind == "run_stopped" and time.monotonic() - read > RESUMED_S
        return kind in ("run_finished", "run_failed") or is_stopped

    @property
    def idle_s(self) -> float:
        """Seconds since the last event was read."""
        return time.monotonic() - self._last[1]

    def update(self, *, to_end: bool = False) -> None:
        """Show new events and output. A screen that cannot be written, such as a closed pipe, must not end the run."""
        if not self._is_screen_lost:
            try:
                self._warn_if_disk_is_full()
                self._show_logs(to_end=to_end)
                self._show_events()
            except OSError:
                self._is_screen_lost = True

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.update()
            self._feed_tensorboard()

    def _feed_tensorboard(self) -> None:
        """Write files for TensorBoard; nothing until there are new events, since the run may still be rejected."""
        if self._tensorboard is not None and file_identity(self._folder.events) != self._before:
            try:
                self._tensorboard.deliver()
            except OSError:  # the disk is full: the file is written again later
                self._tensorboard.start_over()
            except Exception as error:  # noqa: BLE001 - incompatible versions of packages raise anything
                self._tensorboard = None
                with suppress(OSError):
                    self.screen.note(f"warning: TensorBoard files are not written: {error}", style="yellow")

    def _show_logs(self, *, to_end: bool) -> None:
        """Show new output of rank 0, and each new warning of any rank once."""
        for rank, log in enumerate(self._logs):
            for line in log.lines(to_end=to_end):
                warning = WARNING.match(line)
                if warning and warning[1] not in self._warnings:
                    self._warnings.add(warning[1])
                    self.screen.note(f"warning (rank {rank}): {warning[1]}", style="yellow")
                if RECOVERED.match(line):
                    self._failed.discard(rank)
                    continue
                if FAILED.match(line):
                    self._failed.add(rank)
                if rank == 0 and not warning and not self._failed:
                    self.screen.line(line)

    def _show_events(self) -> None:
        """Show new events, each once, even if the file was rewound and is read again."""
        for line in self._events.lines():
            event = self._parser.parse(line)
            if event is None and line.strip() and not self._has_damage:
                self._has_damage = True
                self.screen.note("warning: damaged lines of events.jsonl are skipped", style="yellow")
            if event is None or event["time"] < self._since or line in self._shown:
                continue
            if event["time"] > self._since:
                self._since = event["time"]
                self._shown.clear()
            self._shown.add(line)
            if event["event"] not in OF_THE_MIRROR:  # they may follow the end of the run
                self._last = event["event"], time.monotonic()
            if event["event"] == "restarted":
                self._failed.clear()
            self.screen.show(event)

    def _warn_if_disk_is_full(self) -> None:
        """Print a warning when the disk fills up: ranks report through files, which they cannot write then."""
        now = time.monotonic()
        if now - self._disk_checked < DISK_CHECK_S:
            return
        before, self._disk_checked = self._is_disk_full, now
        with suppress(OSError):  # the folder was deleted
            self._is_disk_full = is_full(self._folder.path)
        if self._is_disk_full and not before:
            text = f"the disk of {self._folder.path} is full: nothing can be saved or shown until space is freed"
            self.screen.note(f"warning: {text}; training continues, and waits for space at its end", style="yellow")


def replay(folder: RunFolder) -> None:
    """Print the events of a run so far to stdout, without the progress within an epoch."""
    screen = Screen()
    screen.console, screen.is_live = Console(highlight=False, soft_wrap=True), False
    for event in read(folder.events) if folder.events.exists() else ():
        screen.show(event)
    if (outcome := result_text(folder)) is not None:
        screen.note(f"done: {outcome}")


def show(folder: RunFolder) -> None:
    """Show a run of another process, from its events alone, until it has ended."""
    with Follower(folder, ranks=0) as follower:
        if not folder.events.exists():
            follower.screen.note("the run has not started yet")
        while not follower.is_over:
            time.sleep(INTERVAL_S)
            if follower.idle_s > INCOMPLETE_S and folder.result.exists() and not is_locked(folder):
                break
            if follower.idle_s > IDLE_S and folder.events.exists() and not is_locked(folder):
                follower.screen.note(f"no process is training this run; {resume_hint(folder)}")
                return
    if (outcome := result_text(folder)) is not None:
        follower.screen.note(f"done: {outcome}")
