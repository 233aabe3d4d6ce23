"""watchdog.py: what counts as progress, what a rank writes, and how old the positions of others are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.config import Config
from paceline.observe import watchdog
from paceline.observe.hangs import RankPosition, read_position
from paceline.observe.progress import Progress
from paceline.observe.rank_log import recovered_line
from paceline.observe.watchdog import Watchdog, watching
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system import cpu_time
from support.clocks import FakeClock


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.log(0).touch()
    return folder


@pytest.fixture
def clock(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """While this clock is advanced, no CPU time is used."""
    monkeypatch.setattr(watchdog, "others_cpu_s", lambda: 5.0)
    return clock


@pytest.fixture
def progress() -> Progress:
    return Progress("training", step=3, samples=96)


@pytest.fixture
def dog(folder: RunFolder, progress: Progress, clock: FakeClock) -> Watchdog:
    return Watchdog(0, folder, 0, 2, progress, log=2)


def beat(dog: Watchdog, clock: FakeClock, seconds: float = 1.0) -> RankPosition:
    clock.advance(seconds)
    dog.beat()
    return read_position(dog.folder, dog.rank)


# --- what is progress ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["phase", "epoch", "step", "batch", "samples"])
def test_any_change_of_the_position_resets_the_idle_time(
    dog: Watchdog, progress: Progress, clock: FakeClock, field: str
) -> None:
    beat(dog, clock)
    assert [beat(dog, clock).idle_s for _ in range(3)] == [1, 2, 3]
    setattr(progress, field, "evaluating" if field == "phase" else 50)
    assert beat(dog, clock).idle_s == 0


def test_cpu_time_counts_as_progress_only_before_the_first_samples(
    dog: Watchdog, progress: Progress, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter(range(1, 100))
    monkeypatch.setattr(watchdog, "others_cpu_s", lambda: next(used))
    progress.samples = 0
    assert [beat(dog, clock).idle_s for _ in range(3)] == [0, 0, 0]
    progress.samples = 32
    beat(dog, clock)
    assert [beat(dog, clock).idle_s for _ in range(3)] == [1, 2, 3]


def test_less_than_a_hundredth_of_a_core_is_not_progress(dog: Watchdog) -> None:
    assert dog.is_busy(10.0, 1001)
    assert not dog.is_busy(10.04, 1002)
    assert not dog.is_busy(11.0, 1101)
    assert dog.is_busy(11.1, 1102)


def test_a_process_that_was_suspended_for_an_hour_has_not_been_idle_for_an_hour(
    dog: Watchdog, clock: FakeClock
) -> None:
    beat(dog, clock)
    assert beat(dog, clock, seconds=3600).idle_s < 10


def test_cpu_time_of_child_processes_is_counted() -> None:
    before = cpu_time.others_cpu_s()
    burn = "import time, sys\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    used = cpu_time.others_cpu_s() - before
    child.communicate()
    assert used >= 0.2


def test_a_child_that_ends_during_the_measurement_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the watchdog's thread, and its timer would then end a healthy run."""

    def vanished(path: Path, pattern: str) -> Iterator[Path]:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "glob", vanished)
    assert cpu_time.others_cpu_s() > 0


# --- what is written and read -------------------------------------------------------------------------------


def test_a_beat_writes_rank_process_position_and_line(dog: Watchdog, clock: FakeClock) -> None:
    written = beat(dog, clock)
    assert (written.rank, written.pid, written.phase, written.step) == (0, os.getpid(), "training", 3)
    assert written.place == "training, step 3"
    assert written.location is not None
    assert written.location.startswith(f"{__file__}:")


def test_a_folder_that_was_deleted_does_not_end_the_run(dog: Watchdog, clock: FakeClock) -> None:
    dog.folder.logs.rename(dog.folder.path / "elsewhere")
    beat(dog, clock)


def test_a_rank_whose_beat_stays_the_same_is_silent_and_idle(dog: Watchdog, clock: FakeClock) -> None:
    write_json(dog.folder.place(1), asdict(RankPosition(1, "there", 7, beat=4, idle_s=2.0)))
    fresh = dog.look()[1]
    assert (fresh.is_silent, fresh.idle_s) == (False, 2.0)
    clock.advance(10)
    stale = dog.look()[1]
    assert (stale.is_silent, stale.idle_s) == (True, 12.0)
    write_json(dog.folder.place(1), asdict(RankPosition(1, "there", 7, beat=5, idle_s=13.0)))
    assert not dog.look()[1].is_silent


def test_a_rank_that_has_ended_is_not_silent(dog: Watchdog, clock: FakeClock) -> None:
    write_json(dog.folder.place(1), asdict(RankPosition(1, "there", 7, beat=watchdog.ENDED)))
    dog.look()
    clock.advance(10)
    assert not dog.look()[1].is_silent


def test_a_rank_that_has_not_started_is_idle_since_this_one_started(dog: Watchdog, clock: FakeClock) -> None:
    clock.advance(30)
    missing = dog.look()[1]
    assert (missing.pid, missing.idle_s, missing.is_silent) == (0, 30.0, False)


def test_files_of_ranks_beyond_the_world_size_are_ignored(dog: Watchdog) -> None:
    write_json(dog.folder.place(2), asdict(RankPosition(2, "there", 7, beat=4)))
    assert [position.rank for position in dog.look()] == [0, 1]


def test_positions_of_others_are_read_only_near_the_timeout(folder: RunFolder) -> None:
    afters = [Watchdog(timeout_s, folder, 0, 2, Progress(), log=2).look_after_s for timeout_s in (3, 15, 600)]
    assert afters == [0, 5, 300]


# --- before a run is ended ----------------------------------------------------------------------------------


@pytest.mark.parametrize("does_move", [False, True])
def test_a_rank_checks_the_others_again_before_it_ends_the_run(
    does_move: bool, folder: RunFolder, progress: Progress, clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dog = Watchdog(8, folder, 0, 2, progress, log=os.open(folder.log(0), os.O_WRONLY | os.O_APPEND))
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    suspended = RankPosition(1, "there", 7, beat=4, waits_in="barrier")

    def meanwhile(beats: int) -> None:
        clock.advance(beats)
        if does_move:  # it was suspended, and continues
            write_json(folder.place(1), asdict(replace(suspended, beat=5, idle_s=1.0)))

    write_json(folder.place(1), asdict(suspended))
    dog.look()
    for _ in range(10):
        beat(dog, clock)
    monkeypatch.setattr(dog, "_wait_beating", meanwhile)
    dog.look_for_hang()
    assert codes == ([] if does_move else [1])
    assert folder.hang.exists() != does_move
    if does_move:
        dog.look_for_hang()
        shown = folder.log(0).read_text().splitlines()
        assert recovered_line(0) in shown
        assert "training continues" in shown[-1]


def test_a_suspension_counts_as_one_beat(dog: Watchdog, clock: FakeClock) -> None:
    beat(dog, clock)
    assert beat(dog, clock, seconds=11).idle_s == watchdog.BEAT_S


# --- watching() ---------------------------------------------------------------------------------------------


def test_a_position_is_written_from_the_start_and_ends_with_the_body(
    folder: RunFolder, make_config: Callable[..., Config]
) -> None:
    with watching(make_config(), folder, 0, 1, Progress()):
        assert read_position(folder, 0).beat == 1
    assert read_position(folder, 0).beat == watchdog.ENDED
    assert "paceline-watch" not in {thread.name for thread in threading.enumerate()}


def test_the_line_of_an_error_is_written(folder: RunFolder, make_config: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="broken"), watching(make_config(), folder, 0, 2, Progress()):
        raise ValueError("broken")
    assert (read_position(folder, 0).location or "").startswith(f"{__file__}:")


def test_without_a_timeout_a_rank_keeps_beating(folder: RunFolder, make_config: Callable[..., Config]) -> None:
    with watching(make_config(hang_timeout_s=0), folder, 0, 1, Progress()):
        began = read_position(folder, 0).beat
        while read_position(folder, 0).beat < began + 2:
            time.sleep(0.05)
