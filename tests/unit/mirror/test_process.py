"""The process that copies: what it reports when a store cannot be reached, and how it ends. And the wait for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.mirror import process, supervisor
from paceline.mirror.claim import claim
from paceline.mirror.place import MirrorPlace
from paceline.mirror.process import MirrorProcess
from support.mirrors import make_run
from support.runs import events_of


@pytest.fixture
def is_over(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The end of the run, which is there already; without waiting for a store."""
    monkeypatch.setattr(process, "LAST_RETRY_S", 0.0)
    is_over = threading.Event()
    is_over.set()
    return is_over


def options(mirror: Path, **changes: Any) -> dict[str, Any]:
    return {"mirror": str(mirror), "name": "lab", "keep": 3, "best": None, **changes}


def test_a_store_that_fails_is_reported_once_and_the_mirror_catches_up(
    tmp_path: Path, is_over: threading.Event, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, failures = make_run(tmp_path / "run", 3, 6), [ConnectionError("no answer from s3://K:secret@b")] * 3
    write = MirrorPlace.put

    def failing(self: MirrorPlace, name: str, *rest: Any) -> str:
        if "state.pt" in name and failures:
            raise failures.pop()
        return write(self, name, *rest)

    monkeypatch.setattr(MirrorPlace, "put", failing)
    assert MirrorProcess(folder, options(tmp_path / "disk"), is_over).run()
    [warning] = events_of(folder.path, "warning")
    assert "is not mirrored to" in warning["text"]
    texts = [event["text"] for event in events_of(folder.path, "mirror")]
    place = tmp_path / "disk" / "lab" / "run"
    assert texts == [f"checkpoints will be copied to {place}", f"{place} can be written again and is up to date"]
    assert [event["step"] for event in events_of(folder.path, "mirrored")] == [6, 3]
    assert (place / "events.jsonl").read_bytes() == folder.events.read_bytes()
    shown = folder.events.read_text() + folder.mirror_state.read_text() + "".join(capfd.readouterr())
    assert "secret" not in shown


def test_a_run_that_is_taken_over_is_no_longer_mirrored(tmp_path: Path, is_over: threading.Event) -> None:
    folder = make_run(tmp_path / "run", 3)
    mirroring = MirrorProcess(folder, options(tmp_path / "disk"), is_over)
    first = mirroring._copy

    def copy(*, is_last: bool) -> None:
        if mirroring._copier is not None:
            claim(folder, str(tmp_path / "disk"), "lab")
            folder.events.write_text(folder.events.read_text() * 2)
        first(is_last=is_last)
        is_over.clear()

    mirroring._copy = copy  # type: ignore[method-assign]
    is_over.clear()
    process_interval, process.INTERVAL_S = process.INTERVAL_S, 0.0
    try:
        thread = threading.Thread(target=mirroring.run, daemon=True)
        mirroring._copy(is_last=True)
        is_over.set()
        thread.start()
        thread.join(20)
    finally:
        process.INTERVAL_S = process_interval
    assert not thread.is_alive()
    assert any("is no longer mirrored" in event["text"] for event in events_of(folder.path, "warning"))


def test_a_run_whose_folder_was_deleted_and_created_again_keeps_its_place(
    tmp_path: Path, is_over: threading.Event
) -> None:
    folder = make_run(tmp_path / "run", 3)
    mirroring = MirrorProcess(folder, options(tmp_path / "disk"), is_over)
    mirroring._copy(is_last=False)
    shutil.rmtree(folder.path)
    make_run(folder.path, 6)  # as the launcher and the ranks do
    assert mirroring.run()
    assert claim(folder, str(tmp_path / "disk"), "lab").place.url == str(tmp_path / "disk" / "lab" / "run")


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="needs the scheduler's groups of Linux")
def test_the_last_files_are_copied_with_the_usual_priority() -> None:
    code = (
        "import time; from pathlib import Path; from paceline.mirror.process import _lower_priority, _restore_priority;"
        "_lower_priority(); low = Path('/proc/self/autogroup').read_text();"
        "time.sleep(0.15); _restore_priority();"  # Linux permits a change every 0.1 s
        "print(low.split()[-1], Path('/proc/self/autogroup').read_text().split()[-1])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert ended.stdout.split() == ["19", "0"], ended.stderr


def test_the_wait_ends_without_progress_and_earlier_for_a_run_that_was_stopped() -> None:
    finished, stopped = (supervisor._Wait(0.0, is_short=is_short) for is_short in (False, True))
    assert not finished.is_over(50.0)
    finished.observe({"left_work": 30}, 50.0)
    assert not finished.is_over(100.0)
    finished.observe({"left_work": 40}, 109.0)  # the same file again
    assert finished.is_over(50.0 + supervisor.STALLED_S)
    stopped.observe({"left_work": 30}, 50.0)
    assert stopped.is_over(supervisor.STOP_S)
    finished.observe({"left_work": 20}, 100.0)
    finished.shorten(15, None)
    assert not finished.is_over(121.0)
    finished.observe({"left_work": 10}, 150.0)
    assert finished.is_over(150.0)


def test_what_is_missing_is_listed() -> None:
    left = [f"step-0000000{n}" for n in range(9)]
    text = supervisor._left_text({"left": left, "left_bytes": 3e9})
    assert text == ("step-00000000, step-00000001, step-00000002, step-00000003 and 5 more (3.0 GB) not copied yet")


def test_a_short_wait_or_one_for_logs_alone_is_not_announced() -> None:
    def notices(*left: str) -> list[int]:
        wait = supervisor._Wait(0.0, is_short=False)
        wait.observe({"left": list(left)}, 0.0)
        return [second for second in range(30) if wait.is_notice_due(second)]

    assert notices("logs/rank-1.log", "step-00000003") == [3, 13, 23]
    assert notices("logs/rank-1.log", "logs/rank-0.log") == notices() == [10, 20]
