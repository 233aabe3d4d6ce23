"""Detects a hang that no rank can detect: all ranks block their interpreters, so that no watchdog thread runs."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from paceline.launch.fork_server import POLL_S
from paceline.launch.machines import RankGroup
from paceline.observe import hangs
from paceline.observe.hangs import position_in_dump, read_position
from paceline.observe.rank_log import failed_line
from paceline.observe.watchdog import BEAT_S, DUMP_BEATS, DUMP_SIGNAL, LAST_RESORT_S
from paceline.run.layout import RunFolder


class StallDetector:
    """Measures the time since the last heartbeat of any rank, counting only time in which this process was running."""

    def __init__(self, folder: RunFolder, ranks: int, timeout_s: float) -> None:
        self.folder, self.ranks, self.timeout_s = folder, ranks, timeout_s
        self._beats: dict[int, int] = {}
        self._silent_s, self._looked_at = 0.0, time.monotonic()

    def check(self) -> bool:
        """Read the heartbeats, at most once a second; return whether the ranks have been silent for too long."""
        gap_s = time.monotonic() - self._looked_at
        if not self.timeout_s or gap_s < BEAT_S:
            return False
        self._looked_at += gap_s
        # If the machine was suspended for an hour with all its processes, the ranks have not been silent for an hour.
        self._silent_s = self._silent_s + min(gap_s, 2 * BEAT_S) if self._is_silent() else 0.0
        return self._silent_s >= self.timeout_s + LAST_RESORT_S

    def _is_silent(self) -> bool:
        """Whether there was no heartbeat since the last check, although a rank has started and not ended."""
        is_expected = False
        for rank in range(self.ranks):
            beat = read_position(self.folder, rank).beat
            if beat > 0:
                before, self._beats[rank] = self._beats.get(rank), beat
                is_expected = True
                if beat != before:
                    return False
        return is_expected

    def report(self, started: RankGroup, by: int = 0) -> None:
        """Make the ranks dump their stacks, and write the hang to the run folder as a failure of the rank `by`."""
        for rank in range(self.ranks):
            with suppress(OSError), self.folder.log(rank).open("a", encoding="utf-8") as log:
                print(failed_line(rank), file=log)  # the screen omits the lines after it
        started.signal(DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_BEATS * BEAT_S
        while started.pids and time.monotonic() < deadline:
            started.poll(POLL_S)
        positions = [read_position(self.folder, rank) for rank in range(self.ranks)]
        positions = [position_in_dump(replace(p, is_silent=True), self.folder) if p.beat > 0 else p for p in positions]
        hangs.write_hang(positions, by, self.timeout_s, self.folder)
