from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.telemetry import events as events_module
from paceline.telemetry.events import Events, parse, read, rewind

Open = Callable[[], Events]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def open_events(path: Path) -> Iterator[Open]:
    opened: list[Events] = []

    def make() -> Events:
        opened.append(Events(path))
        return opened[-1]

    yield make
    for events in opened:
        events.close()


class FullDisk:
    """A file on a disk with room for so many bytes; a write that does not fit writes what fits, as the system does."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room
        self.fileno = file.fileno

    def write(self, line: bytes) -> int:
        if not self._room:
            raise OSError(28, "No space left on device")
        written: int = self._file.write(line[: self._room])
        self._room -= written
        return written


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read(path)]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_an_event_is_one_line_that_is_there_at_once(path: Path, open_events: Open) -> None:
    open_events().write("step", step=3, text="größe\nof two lines", loss=0.5)
    [line] = path.read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time") > 1e9
    assert event == {"event": "step", "step": 3, "text": "größe\nof two lines", "loss": 0.5}


def test_a_run_that_goes_on_adds_to_what_is_there(path: Path, open_events: Open) -> None:
    open_events().write("first")
    open_events().write("second")
    assert kinds(path) == ["first", "second"]


def test_ranks_without_a_file_write_nothing(tmp_path: Path) -> None:
    events = Events(None)
    events.write("step")
    events.write_sometimes("step")
    events.close()
    assert list(tmp_path.iterdir()) == []


def test_what_happens_very_often_is_written_sometimes(
    path: Path, open_events: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(events_module.time, "monotonic", lambda: now[0])
    events = open_events()
    for _ in range(10):
        events.write_sometimes("batch", every_s=1.0)
        events.write_sometimes("other", every_s=1.0)
        now[0] += 0.25
    assert kinds(path) == ["batch", "other"] * 3


# --- torn lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b'{"event": "st', b'{"event": "step", "time": 1.0}', b"{", b"\xc3"])
def test_the_torn_last_line_of_a_killed_writer_costs_no_other_event(torn: bytes, path: Path, open_events: Open) -> None:
    open_events().write("before")
    with path.open("ab") as file:
        file.write(torn)
    open_events().write("after")
    assert [kind for kind in kinds(path) if kind != "step"] == ["before", "after"]


def test_reading_passes_over_everything_that_is_no_event(path: Path) -> None:
    path.write_bytes(b'{"event": "a"}\n\n[1]\n3\nnull\n{"no": 1}\n\x00\x00\xff\n{"event": "b"}\n{"event": "c"')
    assert kinds(path) == ["a", "b"]


@pytest.mark.parametrize("line", ["", "\n", "{", "[]", "null", '{"x": 1}', b"\xff"])
def test_a_line_that_is_no_event_is_none(line: str | bytes) -> None:
    assert parse(line) is None


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_while_the_disk_is_full_events_wait_and_the_run_does_not(room: int, path: Path, open_events: Open) -> None:
    events = open_events()
    events.write("before")
    file = events._file
    events._file = FullDisk(file, room)  # type: ignore[assignment]
    for n in range(5):
        events.write("late", n=n)
    assert len(kinds(path)) < 6
    events._file = file
    events.write("after")
    assert kinds(path) == ["before", *["late"] * 5, "after"]
    assert [event["n"] for event in read(path) if event["event"] == "late"] == list(range(5))
    assert len(path.read_bytes().splitlines()) == 7  # none is torn, none is there twice


def test_a_disk_that_stays_full_does_not_fill_the_memory(
    path: Path, open_events: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "WAITING_LIMIT", 1000)
    events = open_events()
    file = events._file
    events._file = FullDisk(file, 30)  # type: ignore[assignment]
    for n in range(200):
        events.write("late", n=n)
    events._file = file
    for n in range(2):
        events.write("after", n=n)
    assert path.stat().st_size < 1200
    lines = path.read_bytes().splitlines()
    assert all(parse(line) for line in lines)
    assert parse(lines[-1]) == {"event": "after", "n": 1, "time": parse(lines[-1])["time"]}  # type: ignore[index]


def test_a_device_without_any_room_is_survived() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    events = Events(Path("/dev/full"))
    events.write("lost")
    events.close()


def test_a_full_disk_while_rewinding_leaves_the_file_as_it_was(path: Path, open_events: Open) -> None:
    events = open_events()
    for step in range(10):
        events.write("step", step=step)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            rewind(path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before


def test_events_that_are_held_leave_the_file_as_it_is_until_they_are_released(path: Path, open_events: Open) -> None:
    open_events().write("before")
    held = Events(path, is_held=True)
    held.write("run_started")
    held.write_sometimes("progress")
    assert held.is_held
    assert [event["event"] for event in read(path)] == ["before"]
    rewind(path, 3)  # the file is another one now
    held.release()
    held.write("after")
    held.close()
    assert not held.is_held
    assert [event["event"] for event in read(path)] == ["before", "run_started", "progress", "after"]


# --- rewinding --------------------------------------------------------------------------------------------------------


def test_what_will_be_said_again_is_forgotten_and_all_else_stays(path: Path, open_events: Open) -> None:
    events = open_events()
    said: list[tuple[str, dict[str, Any]]] = [
        ("run_started", {}), ("step", {"step": 5}), ("digests", {"step": 5}), ("epoch", {"step": 5, "epoch": 0}),
        ("saving", {"step": 5}), ("checkpoint", {"step": 5}), ("step", {"step": 6}), ("digests", {"step": 6}),
        ("epoch", {"step": 6, "epoch": 1}), ("warning", {"text": "odd", "step": 6}), ("run_stopped", {"step": 6}),
    ]  # fmt: skip
    for kind, fields in said:
        events.write(kind, **fields)
    before = list(read(path))
    rewind(path, 5)
    assert list(read(path)) == [*before[:6], *before[9:]]
    rewind(path, -1)
    assert kinds(path) == ["run_started", "saving", "checkpoint", "warning", "run_stopped"]


def test_rewinding_leaves_whole_lines_and_no_other_file(path: Path, open_events: Open, tmp_path: Path) -> None:
    open_events().write("step", step=1, loss=float("nan"))
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    rewind(path, 1)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"}\n")
    open_events().write("step", step=2)
    assert kinds(path) == ["step", "step"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_without_events_has_nothing_to_rewind(path: Path) -> None:
    rewind(path, 3)
    assert not path.exists()


def test_events_stay_in_a_run_folder_that_is_moved_and_follow_one_that_is_created_again(tmp_path: Path) -> None:
    path, moved = tmp_path / "run" / "events.jsonl", tmp_path / "moved"
    path.parent.mkdir()
    events = Events(path)
    events.write("first")
    path.parent.rename(moved)
    events.write("second")
    assert kinds(moved / path.name) == ["first", "second"]
    assert not path.parent.exists()
    path.parent.mkdir()
    events.write("third")
    path.unlink()
    events.write("fourth")
    events.close()
    assert kinds(path) == ["fourth"]
    assert kinds(moved / path.name) == ["first", "second"]
