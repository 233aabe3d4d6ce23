"""events.py and event_types.py: writing, parsing and rewinding `events.jsonl`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import events as events_module
from paceline.observe.event_types import parse, values_in
from paceline.observe.events import Events, damage_text, failed_attempts, read, rewind
from support.clocks import FakeClock
from support.disks import file_size_limit

Open = Callable[[], Events]
DOCS = Path(__file__).parents[3] / "docs" / "events.md"


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


def kinds(path: Path) -> list[str]:
    return [event["event"] for event in read(path)]


# --- writing ----------------------------------------------------------------------------------------------------------


def test_an_event_is_one_line_that_is_written_at_once(path: Path, open_events: Open) -> None:
    open_events().write("step", step=3, text="größe\nof two lines", loss=0.5)
    [line] = path.read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time") > 1e9
    assert event == {"event": "step", "step": 3, "text": "größe\nof two lines", "loss": 0.5}


def test_a_second_writer_appends_to_the_file(path: Path, open_events: Open) -> None:
    open_events().write("first")
    open_events().write("second")
    assert kinds(path) == ["first", "second"]


def test_ranks_without_a_file_write_nothing(tmp_path: Path) -> None:
    events = Events(None)
    events.write("step")
    events.write_sometimes("step")
    events.close()
    assert list(tmp_path.iterdir()) == []


def test_frequent_events_are_written_at_most_once_per_interval(path: Path, open_events: Open, clock: FakeClock) -> None:
    events = open_events()
    for _ in range(10):
        events.write_sometimes("batch", every_s=1.0)
        events.write_sometimes("other", every_s=1.0)
        clock.advance(0.25)
    assert kinds(path) == ["batch", "other"] * 3


def test_events_of_a_batch_are_written_together_and_in_order(path: Path, open_events: Open) -> None:
    events = open_events()
    with events.batch():
        events.write("first", time=5.0)
        events.write("second")
        assert path.read_bytes() == b""
    assert kinds(path) == ["first", "second"]
    assert next(read(path))["time"] == 5.0
    events.write("third")
    assert kinds(path)[2:] == ["third"]


# --- incomplete lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incomplete", [b'{"event": "st', b'{"event": "step", "time": 1.0}', b"{", b"\xc3"])
def test_the_incomplete_last_line_of_a_killed_writer_damages_no_other_event(
    incomplete: bytes, path: Path, open_events: Open
) -> None:
    open_events().write("before")
    with path.open("ab") as file:
        file.write(incomplete)
    open_events().write("after")
    assert [kind for kind in kinds(path) if kind != "step"] == ["before", "after"]


def test_reading_skips_lines_that_are_not_events(path: Path) -> None:
    path.write_bytes(
        b'{"event": "a", "time": 1}\n\n[1]\n3\nnull\n{"no": 1}\n\x00\x00\xff\n{"event": "b", "time": 2}\n{"event": "c"'
    )
    assert kinds(path) == ["a", "b"]


@pytest.mark.parametrize("line", ["", "\n", "{", "[]", "null", '{"x": 1}', b"\xff"])
def test_parsing_a_line_that_is_not_an_event_gives_none(line: str | bytes) -> None:
    assert parse(line) is None


def test_text_that_is_not_utf_8_is_written_as_valid_json(path: Path, open_events: Open) -> None:
    open_events().write("warning", text=b"gr\xf6\xdfe \xf0\x9f\x98\x80".decode("utf-8", "surrogateescape"))
    [event] = read(path)
    assert event["text"] == "gr??e 😀"


def test_the_examples_in_the_documentation_are_valid_events() -> None:
    examples = re.findall(r"^```json\n(.+)\n```$", DOCS.read_text(), flags=re.MULTILINE)
    assert len(examples) == 24
    assert [parse(line) for line in examples] == [json.loads(line) for line in examples]


STEP = {"event": "step", "time": 1.0, "step": 5, "loss": 0.5, "step_ms": [1.0, 2.0], "phase_ms": {"data": [0.5, 0.5]}}


@pytest.mark.parametrize(
    "damage",
    [
        {"time": "1"}, {"time": None}, {"time": -1}, {"time": 1e300}, {"step": 5.5}, {"step": True}, {"step": 2**60},
        {"loss": "0.5"}, {"step_ms": 3.0}, {"step_ms": [None]}, {"step_ms": [1e300, 1.0]},
        {"phase_ms": {"data": [1.0]}}, {"values": [1.0]}, {"values": {"a": "1"}}, {"values": {"a": [1.0]}},
        {"event": ["step"]}, {"event": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_step_with_a_wrong_type_is_not_an_event(damage: dict[str, Any]) -> None:
    assert parse(json.dumps(STEP)) == STEP
    assert parse(json.dumps({**STEP, **damage})) is None


def test_the_further_values_of_a_step_do_not_replace_its_own_fields() -> None:
    event = parse(json.dumps({**STEP, "values": {"perplexity": 2, "loss": 9.0, "missing": None, "lr": 0.5}}))
    assert event is not None
    assert dict(values_in(event)) == {"perplexity": 2.0, "lr": 0.5}
    assert dict(values_in(STEP)) == {}


def test_unknown_fields_are_dropped_and_unknown_events_are_kept() -> None:
    assert parse(json.dumps({**STEP, "added": {"a": 1}})) == STEP
    assert parse('{"event": "added", "time": 1, "a": 2}') == {"event": "added", "time": 1.0, "a": 2}


def test_an_epoch_keeps_its_metrics_and_nothing_else() -> None:
    epoch = {"event": "epoch", "time": 1.0, "epoch": 0, "step": 5, "val_loss": 0.5, "count": 3, "mine": None}
    assert parse(json.dumps({**epoch, "words": "x", "list": [1], "flag": True, "huge": 10**400})) == epoch
    diverged = parse('{"event": "epoch", "time": 1, "epoch": 0, "step": 5, "val_loss": NaN}')
    assert diverged is not None
    assert math.isnan(diverged["val_loss"])


def test_damaged_lines_are_listed_but_not_empty_or_incomplete_ones(path: Path) -> None:
    path.write_bytes(b'\n{"event": "a", "time": 1}\n{"event": "b"}\n\xff\n{"event": "c", "ti')
    damaged: list[int] = []
    assert [event["event"] for event in read(path, damaged)] == ["a"]
    assert damaged == [3, 4]
    assert damage_text(damaged) == "2 damaged lines of events.jsonl were skipped: 3, 4"
    assert damage_text(range(1, 30)) == (
        "29 damaged lines of events.jsonl were skipped: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …"
    )


def test_rewinding_leaves_lines_as_they_were_written(path: Path) -> None:
    line = b'{"time": 1.50, "event": "added",   "later": {"version": 2}}\n'
    path.write_bytes(line)
    rewind(path, 3)
    assert path.read_bytes() == line


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", range(0, 60, 7))
def test_events_are_kept_in_memory_while_the_disk_is_full(free: int, path: Path, open_events: Open) -> None:
    events = open_events()
    events.write("before")
    with file_size_limit(path.stat().st_size + free):
        for n in range(5):
            events.write("late", n=n)
        assert len(kinds(path)) < 6
    events.write("after")
    assert kinds(path) == ["before", *["late"] * 5, "after"]
    assert [event["n"] for event in read(path) if event["event"] == "late"] == list(range(5))
    assert len(path.read_bytes().splitlines()) == 7  # each complete, and each once


def test_a_disk_that_stays_full_does_not_fill_the_memory(
    path: Path, open_events: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "UNWRITTEN_LIMIT", 1000)
    events = open_events()
    with file_size_limit(30):
        for n in range(200):
            events.write("late", n=n)
    for n in range(2):
        events.write("after", n=n)
    assert path.stat().st_size < 1200
    lines = path.read_bytes().splitlines()
    assert all(parse(line) for line in lines)
    assert parse(lines[-1]) == {"event": "after", "n": 1, "time": parse(lines[-1])["time"]}  # type: ignore[index]


def test_writing_to_a_full_device_raises_nothing() -> None:
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
    with file_size_limit(100), pytest.raises(OSError, match="File too large"):
        rewind(path, 8)
    assert path.read_bytes() == before


def test_held_events_are_not_written_until_release(path: Path, open_events: Open) -> None:
    open_events().write("before")
    held = Events(path, is_held=True)
    held.write("run_started")
    held.write_sometimes("progress")
    assert held.is_held
    assert [event["event"] for event in read(path)] == ["before"]
    rewind(path, 3)  # replaces the file
    held.release()
    held.write("after")
    held.close()
    assert not held.is_held
    assert [event["event"] for event in read(path)] == ["before", "run_started", "progress", "after"]


def test_attempts_that_were_neither_stopped_nor_finished_have_failed(path: Path, open_events: Open) -> None:
    events = open_events()
    for kind, at in [
        ("run_started", 100), ("pace", 110), ("restarted", 111),  # a rank was killed
        ("run_started", 1000), ("saving", 1020), ("run_stopped", 1030),  # later, on request
        ("run_started", 2000), ("checkpoint", 2050),  # the launcher was killed
    ]:  # fmt: skip
        fields = {"restarted": {"text": "rank 1 was killed"}}.get(kind, {"step": 1})
        events.write(kind, time=at, **fields)
    with path.open("ab") as file:
        file.write(b'{"event": "pace", "ti\n')
    assert failed_attempts(path) == (2, 11 + 30 + 50)


# --- rewinding --------------------------------------------------------------------------------------------------------


def test_rewinding_removes_steps_that_will_be_repeated_and_keeps_other_events(path: Path, open_events: Open) -> None:
    events = open_events()
    written: list[tuple[str, dict[str, Any]]] = [
        ("run_started", {}), ("step", {"step": 5}), ("digests", {"step": 5, "digests": [1]}),
        ("epoch", {"step": 5, "epoch": 1}), ("saving", {"step": 5}), ("checkpoint", {"step": 5}),
        ("step", {"step": 6}), ("pace", {"step": 6}), ("digests", {"step": 6, "digests": [2]}),
        ("epoch", {"step": 6, "epoch": 2}), ("warning", {"text": "odd", "step": 6}), ("run_stopped", {"step": 6}),
    ]  # fmt: skip
    for kind, fields in written:
        events.write(kind, **fields)
    before = list(read(path))
    rewind(path, 5)
    assert list(read(path)) == [*before[:6], *before[10:]]
    rewind(path, -1)
    assert kinds(path) == ["run_started", "saving", "checkpoint", "warning", "run_stopped"]


def test_rewinding_leaves_complete_lines_and_no_other_file(path: Path, open_events: Open, tmp_path: Path) -> None:
    open_events().write("step", step=1, loss=float("nan"))
    with path.open("ab") as file:
        file.write(b'{"event": "step", "st')
    rewind(path, 1)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"}\n")
    open_events().write("step", step=2)
    assert kinds(path) == ["step", "step"]
    assert list(tmp_path.iterdir()) == [path]


def test_rewinding_without_a_file_does_nothing(path: Path) -> None:
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


def test_epochs_count_from_1_in_files_of_version_1_and_after_a_resume_by_version_2(path: Path) -> None:
    path.write_text(
        '{"event": "run_started", "time": 1, "version": 1}\n'
        '{"event": "step", "time": 2, "step": 5, "epoch": 0, "epochs": 2}\n'
        '{"event": "epoch", "time": 3, "step": 5, "epoch": 0}\n'
        '{"event": "run_started", "time": 4, "version": 2}\n'
        '{"event": "epoch", "time": 5, "step": 10, "epoch": 2}\n'
        '{"event": "run_finished", "time": 6, "step": 10, "epoch": null}\n'
    )
    assert [event.get("epoch") for event in read(path)] == [None, 1, 1, None, 2, None]
