"""The heart of a rank: what counts as a move, what it writes, and how fresh it finds what others write."""

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
from paceline.observe.hangs import Place, read_place
from paceline.observe.lines import recovered_line
from paceline.observe.progress import Progress
from paceline.observe.watchdog import Watchdog, watching
from paceline.run.atomic_files import write_json
from paceline.run.layout import RunFolder
from paceline.system import cpu_time


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.log(0).touch()
    return folder


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time that hearts see, and nothing else: no CPU is used meanwhile."""
    now = [1000.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog, "others_cpu_s", lambda: 5.0)

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.fixture
def progress() -> Progress:
    return Progress("training", step=3, samples=96)


@pytest.fixture
def heart(folder: RunFolder, progress: Progress, clock: Callable[[float], None]) -> Watchdog:
    return Watchdog(0, folder, 0, 2, progress, log=2)


def beat(heart: Watchdog, clock: Callable[[float], None], seconds: float = 1.0) -> Place:
    clock(seconds)
    heart._beat()
    return read_place(heart.folder, heart.rank)


# --- what counts as a move ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["phase", "epoch", "step", "batch", "samples"])
def test_any_progress_is_a_move(
    heart: Watchdog, progress: Progress, clock: Callable[[float], None], field: str
) -> None:
    beat(heart, clock)
    assert [beat(heart, clock).idle_s for _ in range(3)] == [1, 2, 3]
    setattr(progress, field, "evaluating" if field == "phase" else 50)
    assert beat(heart, clock).idle_s == 0


def test_cpu_time_is_a_move_before_the_first_samples_only(
    heart: Watchdog, progress: Progress, clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter(range(1, 100))
    monkeypatch.setattr(watchdog, "others_cpu_s", lambda: next(used))
    progress.samples = 0
    assert [beat(heart, clock).idle_s for _ in range(3)] == [0, 0, 0]
    progress.samples = 32
    beat(heart, clock)
    assert [beat(heart, clock).idle_s for _ in range(3)] == [1, 2, 3]


def test_less_than_a_hundredth_of_a_core_is_no_move(heart: Watchdog) -> None:
    assert heart.is_busy(10.0, 1001)
    assert not heart.is_busy(10.04, 1002)
    assert not heart.is_busy(11.0, 1101)
    assert heart.is_busy(11.1, 1102)


def test_a_process_that_was_stopped_for_an_hour_has_not_been_idle_for_an_hour(
    heart: Watchdog, clock: Callable[[float], None]
) -> None:
    beat(heart, clock)
    assert beat(heart, clock, seconds=3600).idle_s < 10


def test_the_work_of_children_is_counted() -> None:
    before = cpu_time.others_cpu_s()
    burn = "import time, sys\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    used = cpu_time.others_cpu_s() - before
    child.communicate()
    assert used >= 0.2


def test_a_child_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the thread that beats would end a healthy run: what it leaves counts down."""

    def vanished(path: Path, pattern: str) -> Iterator[Path]:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "glob", vanished)
    assert cpu_time.others_cpu_s() > 0


# --- what is written and read -------------------------------------------------------------------------------


def test_a_beat_tells_rank_process_place_and_line(heart: Watchdog, clock: Callable[[float], None]) -> None:
    told = beat(heart, clock)
    assert (told.rank, told.pid, told.phase, told.step) == (0, os.getpid(), "training", 3)
    assert told.place == "training, step 3"
    assert told.location is not None
    assert told.location.startswith(f"{__file__}:")


def test_a_folder_that_is_gone_does_not_end_the_run(heart: Watchdog, clock: Callable[[float], None]) -> None:
    heart.folder.logs.rename(heart.folder.path / "elsewhere")
    beat(heart, clock)


def test_a_beat_that_stays_the_same_makes_a_rank_silent_and_old(
    heart: Watchdog, clock: Callable[[float], None]
) -> None:
    write_json(heart.folder.place(1), asdict(Place(1, "there", 7, beat=4, idle_s=2.0)))
    fresh = heart.look()[1]
    assert (fresh.is_silent, fresh.idle_s) == (False, 2.0)
    clock(10)
    stale = heart.look()[1]
    assert (stale.is_silent, stale.idle_s) == (True, 12.0)
    write_json(heart.folder.place(1), asdict(Place(1, "there", 7, beat=5, idle_s=13.0)))
    assert not heart.look()[1].is_silent


def test_a_rank_that_has_ended_is_not_silent(heart: Watchdog, clock: Callable[[float], None]) -> None:
    write_json(heart.folder.place(1), asdict(Place(1, "there", 7, beat=watchdog.ENDED)))
    heart.look()
    clock(10)
    assert not heart.look()[1].is_silent


def test_a_rank_that_has_not_started_is_idle_since_this_one_began(
    heart: Watchdog, clock: Callable[[float], None]
) -> None:
    clock(30)
    missing = heart.look()[1]
    assert (missing.pid, missing.idle_s, missing.is_silent) == (0, 30.0, False)


def test_ranks_of_a_larger_world_are_not_looked_at(heart: Watchdog) -> None:
    write_json(heart.folder.place(2), asdict(Place(2, "there", 7, beat=4)))
    assert [place.rank for place in heart.look()] == [0, 1]


def test_others_are_read_only_when_it_is_about_time(folder: RunFolder) -> None:
    afters = [Watchdog(timeout_s, folder, 0, 2, Progress(), log=2).look_after_s for timeout_s in (3, 15, 600)]
    assert afters == [0, 5, 300]


# --- before a run is ended ----------------------------------------------------------------------------------


@pytest.mark.parametrize("does_move", [False, True])
def test_a_rank_looks_again_before_it_ends_the_run(
    does_move: bool, folder: RunFolder, progress: Progress, clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    heart = Watchdog(8, folder, 0, 2, progress, log=os.open(folder.log(0), os.O_WRONLY | os.O_APPEND))
    codes: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    stopped = Place(1, "there", 7, beat=4, waits_in="barrier")

    def meanwhile(times: int) -> None:
        clock(times)
        if does_move:  # it was stopped, and continues
            write_json(folder.place(1), asdict(replace(stopped, beat=5, idle_s=1.0)))

    write_json(folder.place(1), asdict(stopped))
    heart.look()
    for _ in range(10):
        beat(heart, clock)
    monkeypatch.setattr(heart, "_beat_on", meanwhile)
    heart._look_for_hang()
    assert codes == ([] if does_move else [1])
    assert folder.hang.exists() != does_move
    if does_move:
        heart._look_for_hang()
        shown = folder.log(0).read_text().splitlines()
        assert recovered_line(0) in shown
        assert "training continues" in shown[-1]


def test_a_stop_counts_as_one_beat(heart: Watchdog, clock: Callable[[float], None]) -> None:
    beat(heart, clock)
    assert beat(heart, clock, seconds=11).idle_s == watchdog.BEAT_S


# --- around the body ----------------------------------------------------------------------------------------


def test_a_place_is_there_from_the_first_moment_and_ends_with_the_body(
    folder: RunFolder, make_config: Callable[..., Config]
) -> None:
    with watching(make_config(), folder, 0, 1, Progress()):
        assert read_place(folder, 0).beat == 1
    assert read_place(folder, 0).beat == watchdog.ENDED
    assert "paceline-watch" not in {thread.name for thread in threading.enumerate()}


def test_an_error_leaves_its_line(folder: RunFolder, make_config: Callable[..., Config]) -> None:
    with pytest.raises(ValueError, match="broken"), watching(make_config(), folder, 0, 2, Progress()):
        raise ValueError("broken")
    assert (read_place(folder, 0).location or "").startswith(f"{__file__}:")


def test_without_a_timeout_a_rank_beats_and_never_ends(folder: RunFolder, make_config: Callable[..., Config]) -> None:
    with watching(make_config(hang_timeout_s=0), folder, 0, 1, Progress()):
        began = read_place(folder, 0).beat
        while read_place(folder, 0).beat < began + 2:
            time.sleep(0.05)
