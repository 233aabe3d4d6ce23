"""telemetry/follow.py and the lines of telemetry/lines.py that it understands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.observe import follow
from paceline.observe.events import Events, rewind
from paceline.observe.follow import Follower, Tail
from paceline.observe.lines import FAILED, WARNING, failed_line, recovered_line, warning_line
from paceline.observe.sinks.sink import Event
from paceline.observe.sinks.tensorboard import Board
from paceline.run.layout import RunFolder


@pytest.fixture(autouse=True)
def _plain_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


class Shown:
    """What a person saw of a run: the ranks' own lines, and Paceline's notes."""

    def __init__(self, folder: RunFolder, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
        with Follower(folder, ranks=ranks):
            pass  # leaving it looks once more, at all that is there
        captured = capsys.readouterr()
        self.lines, self.notes = captured.out.splitlines(), captured.err.splitlines()


# --- Tail ---------------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_kept_until_it_is_whole(tmp_path: Path) -> None:
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


def test_a_letter_torn_in_the_middle_is_read_whole(tmp_path: Path) -> None:
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


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rank-0.log")
    assert list(tail.lines()) == []
    (tmp_path / "rank-0.log").write_text("here now\n")
    assert list(tail.lines()) == ["here now"]


def test_bytes_that_are_no_text_do_not_stop_the_screen(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"\xff\xfe broken\nfine\n")
    assert list(Tail(tmp_path / "rank-0.log").lines())[1] == "fine"


@pytest.mark.parametrize("content", ["new\n", "new and longer than before\n" * 3])
def test_a_file_that_is_written_anew_is_read_from_its_beginning(content: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one", "two"]
    (tmp_path / "other").write_text(content)
    (tmp_path / "other").replace(path)
    assert list(tail.lines()) == content.splitlines()
    assert list(tail.lines()) == []


def test_a_file_that_is_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert list(tail.lines()) == ["one", "two"]
    path.write_text("x\n")
    assert list(tail.lines()) == ["x"]


def test_from_the_end_only_what_is_added_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    not_there_yet = Tail(path, from_end=True)
    path.write_text("old\n")
    tail = Tail(path, from_end=True)
    with path.open("a") as log:
        log.write("new\n")
    assert list(tail.lines()) == ["new"]
    assert list(not_there_yet.lines()) == ["old", "new"]


# --- Follower -----------------------------------------------------------------------------------------------


def test_only_rank_0s_lines_are_shown_and_unchanged(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.log(0).write_text("epoch 1: [bold]loss[/bold] 0.5\n  indented\n")
    folder.log(1).write_text("from rank 1\n")
    shown = Shown(folder, 2, capsys)
    assert shown.lines == ["epoch 1: [bold]loss[/bold] 0.5", "  indented"]
    assert shown.notes == []


def test_a_warning_is_shown_once_however_many_ranks_give_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        folder.log(rank).write_text(f"{warning_line(rank, 'the rate is high')}\n" * 2)
    shown = Shown(folder, 3, capsys)
    assert shown.notes == ["warning (rank 0): the rate is high"]
    assert shown.lines == []


def test_a_warning_of_another_rank_alone_is_shown_with_its_rank(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(0).write_text("fine\n")
    folder.log(1).write_text(f"{warning_line(1, 'disk is nearly full')}\nother\n")
    shown = Shown(folder, 2, capsys)
    assert shown.notes == ["warning (rank 1): disk is nearly full"]
    assert shown.lines == ["fine"]


def test_different_warnings_are_all_shown(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.log(0).write_text(f"{warning_line(0, 'one')}\n{warning_line(0, 'two')}\n")
    assert Shown(folder, 1, capsys).notes == ["warning (rank 0): one", "warning (rank 0): two"]


def test_lines_after_a_failure_are_not_shown(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.log(0).write_text(f"epoch 1\n{failed_line(0)}\nTraceback (most recent call last):\nValueError: x\n")
    assert Shown(folder, 1, capsys).lines == ["epoch 1"]


def test_a_failure_of_another_rank_silences_rank_0s_traceback_too(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = Follower(folder, ranks=2)
    folder.log(0).write_text("epoch 1\n")
    folder.log(1).write_text(f"{failed_line(1)}\nValueError: x\n")
    follower._look()
    with folder.log(0).open("a") as log:
        log.write("RuntimeError: Connection closed by peer\n")
    follower._look()
    assert capsys.readouterr().out.splitlines() == ["epoch 1"]


def test_events_are_shown_and_a_torn_one_waits(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(folder.events)
    events.write("run_started", name="digits", run_dir="/r", world_size=2, device="cpu", backend="gloo")
    events.write("of_no_interest_to_the_screen", x=1)
    events.write("epoch", epoch=1, step=10, train_loss=0.5)
    events.close()
    with folder.events.open("a") as file:
        file.write('{"event": "epo')
    assert Shown(folder, 0, capsys).notes == [
        "digits: 2 ranks on cpu (gloo), run folder /r",
        "epoch 1  step 10  train_loss 0.5000",
    ]


def test_ranks_that_own_their_terminal_are_not_shown_again(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(0).write_text("torchrun shows this itself\n")
    assert Shown(folder, 0, capsys).lines == []


def test_a_last_line_without_an_end_is_shown_when_the_run_is_over(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(0).write_text("epoch 1\naccuracy 0.97")
    assert Shown(folder, 1, capsys).lines == ["epoch 1", "accuracy 0.97"]


@pytest.fixture
def events(folder: RunFolder) -> Iterator[Events]:
    events = Events(folder.events)
    yield events
    events.close()


def test_a_run_that_goes_on_does_not_show_its_earlier_life(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    folder.log(0).write_text("old line\n")
    events.write("warning", text="old")
    monkeypatch.setattr(time, "time", lambda: 1001.0)
    with Follower(folder, ranks=1, from_now=True):
        events.write("warning", text="new")
        with folder.log(0).open("a") as log:
            log.write("new line\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("new line\n", "warning: new\n")


def test_what_is_said_at_the_very_beginning_is_shown(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0004)  # events say 1000.0
    with Follower(folder, ranks=0, from_now=True):
        events.write("restarted", text="starting again")
    assert capsys.readouterr().err == "starting again\n"


def test_a_run_that_is_rewound_says_nothing_twice(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000, 1100))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    events.write("epoch", epoch=1, step=10, train_loss=0.5)
    follower = Follower(folder, ranks=0, from_now=True)
    events.write("restarted", text="starting again")
    follower._look()
    rewind(folder.events, 5)
    follower._look()
    later = Events(folder.events)
    later.write("resumed", step=5, checkpoint="c", changes=[])
    later.close()
    follower._look()
    assert capsys.readouterr().err == "starting again\ngoing on from step 5 (c)\n"


def test_events_of_one_moment_are_all_shown(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    follower = Follower(folder, ranks=0, from_now=True)
    for text in ("one", "two", "three"):
        events.write("warning", text=text)
        follower._look()
    assert capsys.readouterr().err.splitlines() == ["warning: one", "warning: two", "warning: three"]


# --- lines --------------------------------------------------------------------------------------------------


def test_a_warning_is_one_line_that_is_found_again() -> None:
    line = warning_line(12, "UserWarning: first\n  second\tthird (a.py:3)")
    assert "\n" not in line
    found = WARNING.match(line)
    assert found is not None
    assert found[1] == "UserWarning: first second third (a.py:3)"


def test_output_is_shown_again_when_the_ranks_have_recovered(folder: RunFolder, capsys) -> None:
    dump = f"{failed_line(0)}\nmost recent call first\n{recovered_line(0)}\n"
    folder.log(0).write_text(f"epoch 1\n{dump}epoch 2\n")
    with Follower(folder, ranks=1):
        pass
    shown = capsys.readouterr()
    assert "epoch 2" in shown.out + shown.err
    assert "most recent" not in shown.out + shown.err


def test_a_failed_line_is_found_again() -> None:
    assert FAILED.match(failed_line(3))


@pytest.mark.parametrize("line", ["FAILED tests", "WARNING: hot", "a WARNING [rank 0] x", " FAILED [rank 0]", ""])
def test_the_users_own_lines_are_not_taken_for_ours(line: str) -> None:
    assert not WARNING.match(line)
    assert not FAILED.match(line)


def test_what_rank_0_says_after_a_restart_is_shown_again(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(folder, ranks=1)
    with folder.log(0).open("a") as log:
        for line in (failed_line(0), "Traceback", "restarted", "hello again"):
            if line == "restarted":
                with closing(Events(folder.events)) as events:
                    events.write("restarted", text="rank 0 failed")
            else:
                print(line, file=log, flush=True)
            follower._look()
    out = capsys.readouterr().out
    assert "hello again" in out
    assert "Traceback" not in out


def test_a_tensorboard_that_does_not_work_costs_one_note(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plot(board: Board, event: Event) -> None:
        raise TypeError("Descriptors cannot be created directly.")

    monkeypatch.setattr(Board, "take", plot)
    with closing(Events(folder.events)) as events, Follower(folder, ranks=0, board=True):
        events.write("warning", text="first")
    assert capsys.readouterr().err.count("nothing is written for TensorBoard: Descriptors") == 1


def test_a_full_disk_is_told_once_and_again_when_it_fills_again(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the follower itself: what ranks say of it does not reach the disk."""
    full = [True]
    monkeypatch.setattr("paceline.observe.follow.is_full", lambda path: full[0])
    monkeypatch.setattr("paceline.observe.follow.DISK_S", 0.0)
    follower = Follower(folder, ranks=0)
    told = []
    for full[0] in (True, True, False, False, True):
        follower._look()
        told.append("is full" in capsys.readouterr().err)
    assert told == [True, False, False, False, True]


def test_a_folder_that_has_vanished_is_not_full(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Follower(RunFolder(folder.path / "gone"), ranks=0)
    gone._look()
    assert capsys.readouterr().err == ""


# --- show -----------------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_is_shown_with_its_outcome_even_if_the_last_line_is_torn(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "TORN_S", 0.0)
    folder.result.write_text(
        '{"step": 3, "metrics": {"accuracy": 0.75}, "weights_sha256": "0123456789abcdef", "ema_sha256": null}'
    )
    folder.events.write_text('{"event": "warning", "time": 1.0, "text": "slow"}\n{"event": "run_fin')
    follow.show(folder)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["warning: slow", "done: step 3  accuracy 0.7500  weights 0123456789ab"]


def test_whoever_watches_a_run_that_was_left_reads_whether_it_can_go_on(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "IDLE_S", 0.0)
    folder.events.touch()
    follow.show(folder)
    assert capsys.readouterr().err.splitlines()[-1] == "nobody trains this run; resume it with --resume auto"
    folder.config.write_text("train_fn: train:train\n")
    follow.show(folder)
    assert "--resume auto starts it from the beginning" in capsys.readouterr().err
