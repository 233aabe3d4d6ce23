"""The process that copies a run to its mirror while the run trains, so that no error of a store reaches the run.

It has a low priority, reads the run folder, and ends when everything is copied after it has received a byte on its
standard input. If that is closed without a byte, the launcher was killed: it then copies for a limited time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.store import Manifest
from paceline.mirror.claim import InsideRunFolder, TakenOver, claim
from paceline.mirror.copier import Copier, Retention, status_of
from paceline.mirror.place import reason_of
from paceline.observe.events import Events
from paceline.observe.tail import file_identity
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder

INTERVAL_S = 1.0
STATE_INTERVAL_S = 0.5
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0  # the first and the longest time between two attempts to reach a store
LAST_RETRY_S = 2.0  # the same, when the run is over
REST = 4.0  # times as long as the processor was used: at most a fifth of one core, while the run trains
ORPHAN_S = 60.0  # for the last files after the launcher was killed


def main() -> None:
    """Mirror the run folder `PATH` as `OPTIONS` say; exit code 1 if the mirror is not complete at the end."""
    path, options, before = sys.argv[-3:]
    _lower_priority()
    folder, is_over = RunFolder(Path(path)), threading.Event()
    threading.Thread(target=_wait_for_end, args=(is_over,), daemon=True).start()
    while str(file_identity(folder.events)) == before:  # the run may still be rejected, and has changed nothing yet
        if is_over.wait(STATE_INTERVAL_S / 5):
            if str(file_identity(folder.events)) == before:
                sys.exit(0)
            break
    sys.exit(0 if MirrorProcess(folder, json.loads(options), is_over).run() else 1)


def _lower_priority() -> None:
    """Let the ranks have the processor first; Linux may apply a priority to the processes of a session together."""
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def _restore_priority() -> None:
    """Copy the last files as fast as any other process, when the ranks need the processor no longer."""
    with suppress(OSError):  # without privileges, Linux permits this for the session, and not for the process
        Path("/proc/self/autogroup").write_text("0", encoding="ascii")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, os.getpid(), 0)


def _wait_for_end(is_over: threading.Event) -> None:
    launcher = os.getppid()
    is_asked = bool(sys.stdin.buffer.read(1))
    _restore_priority()
    is_over.set()
    while is_asked and os.getppid() == launcher:  # which ends this process when it does not want to wait any longer
        time.sleep(INTERVAL_S)
    time.sleep(ORPHAN_S)
    os._exit(1)


@dataclass
class MirrorProcess:
    """Copies one run until it is over and everything is copied; reports by events and by a state file."""

    folder: RunFolder
    options: Mapping[str, Any]  # mirror, name, keep, best
    is_over: threading.Event
    _copier: Copier | None = None
    _error: str | None = None  # why the store cannot be used now
    _is_compared: bool = False  # whether what is copied was compared with the mirror, at the end
    _failures: int = 0
    _transferred: int = 0  # bytes of the current file, written and read back
    _used_s: float = field(default_factory=time.process_time)  # of the processor, at the last rest
    _state_at: float = 0.0

    def run(self) -> bool:
        """Copy until the run is over and nothing is left; False if another process has taken the mirror over."""
        while True:
            is_last = self.is_over.is_set()
            try:
                self._copy(is_last=is_last)
            except (TakenOver, InsideRunFolder) as end:
                self._end_early(end)
                return False
            except Exception as error:  # noqa: BLE001 - libraries of stores raise anything, and none may end the run
                self._failed(error)
                continue
            if self._error is not None:
                self._recovered()
            elif is_last:
                self._write_state(is_done=True)
                return True
            else:
                self.is_over.wait(INTERVAL_S)

    def _copy(self, *, is_last: bool) -> None:
        if self._copier is None:
            best = self.options.get("best")
            owned = claim(self.folder, self.options["mirror"], self.options["name"])
            self._copier = Copier(
                self.folder, owned, Retention(self.options["keep"], (best["metric"], best["mode"]) if best else None),
                self._on_bytes, self._on_mirrored,
            )  # fmt: skip
            self._used_s = time.process_time()  # the start of a library needs no rest, so the first copies are early
            if self._error is None:
                url = owned.place.url
                self._report(
                    lambda events: events.write("mirror", place=url, text=f"checkpoints will be copied to {url}")
                )
        elif self._error is not None:
            self._copier.claim.reopen()
        self._copier.claim.note(self.folder)
        while self._copier.copy_next(is_last=is_last):
            self._transferred = 0
            self._write_state(is_frequent=True)
            is_last = is_last or self.is_over.is_set()
        if is_last and not self._is_compared:
            self._is_compared = True
            if self._copier.forget_removed():
                self._copy(is_last=True)

    def _failed(self, error: Exception) -> None:
        """Report the first error of a series, and wait; later attempts have new connections and credentials."""
        reason = reason_of(error)
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        if self._error is None:
            text = (
                f"the run is not mirrored to {self.options['mirror']} at the moment: {reason}; training continues, and "
                "copying is tried again"
            )
            self._report(lambda events: events.write("warning", text=text))
        self._error, self._failures, self._transferred = reason, self._failures + 1, 0
        self._write_state()
        if self.is_over.is_set():
            time.sleep(LAST_RETRY_S)
        else:
            self.is_over.wait(min(LONGEST_RETRY_S, RETRY_S * 2 ** min(self._failures - 1, 10)))

    def _recovered(self) -> None:
        assert self._copier is not None
        self._error, self._failures = None, 0
        url = self._copier.claim.place.url
        text = f"{url} can be written again and is up to date"
        self._report(lambda events: events.write("mirror", place=url, text=text))

    def _end_early(self, end: Exception) -> None:
        if isinstance(end, InsideRunFolder):
            text = f"checkpoint.mirror={self.options['mirror']} is inside the run folder, so the run is not mirrored"
        else:
            text = f"the run is no longer mirrored: {end}"
        self._error = text
        self._report(lambda events: events.write("warning", text=text))
        self._write_state(is_done=True)

    def _on_mirrored(self, manifest: Manifest, seconds: float) -> None:
        assert self._copier is not None
        step, place, size = manifest.step, self._copier.claim.place.url, manifest.size
        self._report(
            lambda events: events.write("mirrored", step=step, place=place, bytes=size, seconds=round(seconds, 3))
        )

    def _on_bytes(self, count: int) -> None:
        self._transferred += count
        if not self.is_over.is_set():  # the checksums of a local disk would otherwise use a whole core
            self.is_over.wait(REST * (time.process_time() - self._used_s))
            self._used_s = time.process_time()
        self._write_state(is_frequent=True)

    def _report(self, write: Callable[[Events], None]) -> None:
        """Add an event, unless the run folder cannot be written."""
        with suppress(OSError), closing(Events(self.folder.events)) as events:
            write(events)

    def _write_state(self, *, is_done: bool = False, is_frequent: bool = False) -> None:
        """Write what is left for the launcher, which reads it at the end of the run."""
        now = time.monotonic()
        if is_frequent and now - self._state_at < STATE_INTERVAL_S:
            return
        self._state_at = now
        state: dict[str, Any] = {"error": self._error, "is_done": is_done}
        with suppress(OSError):
            if self._copier is not None:
                left = status_of(self._copier)
                state |= {"place": self._copier.claim.place.url, **left._asdict()}
                state["left_work"] = 2 * left.left_bytes - self._transferred
            write_json(self.folder.mirror_state, state, is_lasting=False)
