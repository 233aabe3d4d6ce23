"""tail.py: the lines of a file that is still being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.tail import Tail


def test_an_incomplete_last_line_waits_until_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    tail = Tail(path)
    with path.open("w", buffering=1) as log:
        log.write("one\ntwo\nthr")
        log.flush()
        assert list(tail.lines()) == ["one", "two"]
        log.write("ee")
        log.flush()
        assert list(tail.lines()) == []
        log.write("\nfour\n")
        log.flush()
        assert list(tail.lines()) == ["three", "four"]
        assert list(tail.lines()) == []


def test_a_character_that_is_split_between_two_writes_is_decoded_correctly(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    tail = Tail(path)
    content = "größe\n".encode()
    path.write_bytes(content[:3])
    assert list(tail.lines()) == []
    path.write_bytes(content)
    assert list(tail.lines()) == ["größe"]


def test_empty_lines_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("\n\nx\n")
    assert list(Tail(path).lines()) == ["", "", "x"]


def test_a_file_that_does_not_exist_yet_has_no_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rank-0.log")
    assert list(tail.lines()) == []
    (tmp_path / "rank-0.log").write_text("here now\n")
    assert list(tail.lines()) == ["here now"]


def test_bytes_that_are_not_text_do_not_hide_later_lines(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"\xff\xfe broken\nfine\n")
    assert list(Tail(tmp_path / "rank-0.log").lines())[1] == "fine"


@pytest.mark.parametrize("content", ["new\n", "new and longer than before\n" * 3])
def test_a_file_that_was_replaced_is_read_from_its_beginning(content: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one", "two"]
    (tmp_path / "other").write_text(content)
    (tmp_path / "other").replace(path)
    assert list(tail.lines()) == content.splitlines()
    assert list(tail.lines()) == []


def test_a_file_that_was_truncated_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one", "two"]
    path.write_text("x\n")
    assert list(tail.lines()) == ["x"]


def test_from_the_end_only_what_is_added_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    before_it_exists = Tail(path, from_end=True)
    path.write_text("old\n")
    tail = Tail(path, from_end=True)
    with path.open("a") as log:
        log.write("new\n")
    assert list(tail.lines()) == ["new"]
    assert list(before_it_exists.lines()) == ["old", "new"]
