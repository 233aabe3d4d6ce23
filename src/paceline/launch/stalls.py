"""Ranks that all hold their interpreters, so that none can look at the others: the launcher finds and explains it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from paceline.launch.fork_server import LOOK_S
from paceline.launch.machines import RankGroup
from paceline.observe import hangs
from paceline.observe.hangs import position_in_dump, read_position
from paceline.observe.rank_log import failed_line
from paceline.observe.watchdog import BEAT_S, DUMP_BEATS, DUMP_SIGNAL, LAST_RESORT_S
from paceline.run.layout import RunFolder


class StallDetector:
    """How long no rank has beaten, counted in time in which this process was running itself."""

    def __init__(self, folder: RunFolder, ranks: int, timeout_s: float) -> None:
        self.folder, self.ranks, self.timeout_s = folder, ranks, timeout_s
        self._beats: dict[int, int] = {}
        self._seconds, self._looked = 0.0, time.monotonic()

    def is_hang(self) -> bool:
        """Whether it has lasted for too long; looks into the run folder once a second."""
        gap_s = time.monotonic() - self._looked
        if not self.timeout_s or gap_s < BEAT_S:
            return False
        self._looked += gap_s
        # A machine that was asleep for an hour, with all its processes, has not been silent for an hour.
        self._seconds = self._seconds + min(gap_s, 2 * BEAT_S) if self._is_silent() else 0.0
        return self._seconds >= self.timeout_s + LAST_RESORT_S

    def _is_silent(self) -> bool:
        """Whether no rank has beaten since the last look, and one should have: it has begun, and not ended."""
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
        """Have the ranks dump their stacks, and write the hang down as the failure of the rank `by`."""
        for rank in range(self.ranks):
            with suppress(OSError), self.folder.log(rank).open("a", encoding="utf-8") as log:
                print(failed_line(rank), file=log)  # the screen leaves out what follows
        started.signal(DUMP_SIGNAL)
        until = time.monotonic() + DUMP_BEATS * BEAT_S
        while started.pids and time.monotonic() < until:
            started.look(LOOK_S)
        positions = [read_position(self.folder, rank) for rank in range(self.ranks)]
        positions = [position_in_dump(replace(p, is_silent=True), self.folder) if p.beat > 0 else p for p in positions]
        hangs.write_hang(positions, by, self.timeout_s, self.folder)
