"""screen/follower.py, and the log lines of rank_log.py that it understands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.observe.event_types import Event
from paceline.observe.events import Events, rewind
from paceline.observe.rank_log import FAILED, WARNING, failed_line, recovered_line, warning_line
from paceline.observe.screen.follower import Follower, show
from paceline.observe.sinks.tensorboard import TensorBoardSink
from paceline.run.layout import RunFolder
from support.clocks import FakeClock


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
    """What a user saw of a run: the output of rank 0, and Paceline's notes."""

    def __init__(self, folder: RunFolder, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
        with Follower(folder, ranks=ranks):
            pass  # leaving the context shows everything that is in the folder
        captured = capsys.readouterr()
        self.lines, self.notes = captured.out.splitlines(), captured.err.splitlines()


# --- Follower -----------------------------------------------------------------------------------------------


def test_only_rank_0s_lines_are_shown_and_unchanged(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.log(0).write_text("epoch 1: [bold]loss[/bold] 0.5\n  indented\n")
    folder.log(1).write_text("from rank 1\n")
    shown = Shown(folder, 2, capsys)
    assert shown.lines == ["epoch 1: [bold]loss[/bold] 0.5", "  indented"]
    assert shown.notes == []


def test_a_warning_is_shown_once_even_if_all_ranks_print_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        folder.log(rank).write_text(f"{warning_line(rank, 'the rate is high')}\n" * 2)
    shown = Shown(folder, 3, capsys)
    assert shown.notes == ["warning (rank 0): the rate is high"]
    assert shown.lines == []


def test_a_warning_of_another_rank_is_shown_with_its_rank(
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


def test_a_failure_of_another_rank_hides_the_traceback_of_rank_0(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = Follower(folder, ranks=2)
    folder.log(0).write_text("epoch 1\n")
    folder.log(1).write_text(f"{failed_line(1)}\nValueError: x\n")
    follower.update()
    with folder.log(0).open("a") as log:
        log.write("RuntimeError: Connection closed by peer\n")
    follower.update()
    assert capsys.readouterr().out.splitlines() == ["epoch 1"]


def test_events_are_shown_and_an_incomplete_one_waits(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events(folder.events)
    events.write("run_started", name="digits", run_dir="/r", world_size=2, device="cpu", backend="gloo")
    events.write("unknown_to_the_screen", x=1)
    events.write("epoch", epoch=1, step=10, train_loss=0.5)
    events.close()
    with folder.events.open("a") as file:
        file.write('{"event": "epo')
    assert Shown(folder, 0, capsys).notes == [
        "digits: 2 ranks on cpu (gloo), run folder /r",
        "epoch 1  step 10  train_loss 0.5000",
    ]


def test_output_of_ranks_that_own_their_terminal_is_not_repeated(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(0).write_text("torchrun shows this itself\n")
    assert Shown(folder, 0, capsys).lines == []


def test_a_last_line_without_a_newline_is_shown_when_the_run_is_over(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log(0).write_text("epoch 1\naccuracy 0.97")
    assert Shown(folder, 1, capsys).lines == ["epoch 1", "accuracy 0.97"]


@pytest.fixture
def events(folder: RunFolder) -> Iterator[Events]:
    events = Events(folder.events)
    yield events
    events.close()


def test_a_resumed_run_does_not_show_its_earlier_attempts(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], clock: FakeClock
) -> None:
    folder.log(0).write_text("old line\n")
    events.write("warning", text="old")
    clock.now = 1001.0
    with Follower(folder, ranks=1, from_now=True):
        events.write("warning", text="new")
        with folder.log(0).open("a") as log:
            log.write("new line\n")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("new line\n", "warning: new\n")


def test_events_at_the_moment_of_the_start_are_shown(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], clock: FakeClock
) -> None:
    clock.now = 1000.0004  # rounded to 1000.0 in events
    with Follower(folder, ranks=0, from_now=True):
        events.write("restarted", text="restarting")
    assert capsys.readouterr().err == "restarting\n"


def test_a_rewound_file_shows_no_event_twice(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000, 1100))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    events.write("epoch", epoch=1, step=10, train_loss=0.5)
    follower = Follower(folder, ranks=0, from_now=True)
    events.write("restarted", text="restarting")
    follower.update()
    rewind(folder.events, 5)
    follower.update()
    later = Events(folder.events)
    later.write("resumed", step=5, checkpoint="c", changes=[])
    later.close()
    follower.update()
    assert capsys.readouterr().err == "restarting\nresuming from step 5 (c)\n"


def test_events_with_the_same_time_are_all_shown(
    folder: RunFolder, events: Events, capsys: pytest.CaptureFixture[str], clock: FakeClock
) -> None:
    follower = Follower(folder, ranks=0, from_now=True)
    for text in ("one", "two", "three"):
        events.write("warning", text=text)
        follower.update()
    assert capsys.readouterr().err.splitlines() == ["warning: one", "warning: two", "warning: three"]


# --- log lines ----------------------------------------------------------------------------------------------


def test_a_warning_is_one_line_that_is_recognized() -> None:
    line = warning_line(12, "UserWarning: first\n  second\tthird (a.py:3)")
    assert "\n" not in line
    found = WARNING.match(line)
    assert found is not None
    assert found[1] == "UserWarning: first second third (a.py:3)"


def test_output_is_shown_again_when_the_ranks_have_recovered(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = f"{failed_line(0)}\nmost recent call first\n{recovered_line(0)}\n"
    folder.log(0).write_text(f"epoch 1\n{dump}epoch 2\n")
    with Follower(folder, ranks=1):
        pass
    shown = capsys.readouterr()
    assert "epoch 2" in shown.out + shown.err
    assert "most recent" not in shown.out + shown.err


def test_a_failed_line_is_recognized() -> None:
    assert FAILED.match(failed_line(3))


@pytest.mark.parametrize("line", ["FAILED tests", "WARNING: hot", "a WARNING [rank 0] x", " FAILED [rank 0]", ""])
def test_similar_lines_of_the_user_are_not_recognized(line: str) -> None:
    assert not WARNING.match(line)
    assert not FAILED.match(line)


def test_output_of_rank_0_after_a_restart_is_shown_again(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(folder, ranks=1)
    with folder.log(0).open("a") as log:
        for line in (failed_line(0), "Traceback", "restarted", "hello again"):
            if line == "restarted":
                with closing(Events(folder.events)) as events:
                    events.write("restarted", text="rank 0 failed")
            else:
                print(line, file=log, flush=True)
            follower.update()
    out = capsys.readouterr().out
    assert "hello again" in out
    assert "Traceback" not in out


def test_a_broken_tensorboard_gives_one_warning(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sink: TensorBoardSink, event: Event) -> None:
        raise TypeError("Descriptors cannot be created directly.")

    monkeypatch.setattr(TensorBoardSink, "write", fail)
    with closing(Events(folder.events)) as events, Follower(folder, ranks=0, tensorboard=True):
        events.write("warning", text="first")
    assert capsys.readouterr().err.count("warning: TensorBoard files are not written: Descriptors") == 1


def test_a_full_disk_is_reported_once_and_again_when_it_fills_again(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the follower itself: ranks report through files, which they cannot write then."""
    full = [True]
    monkeypatch.setattr("paceline.observe.screen.follower.is_full", lambda path: full[0])
    monkeypatch.setattr("paceline.observe.screen.follower.DISK_CHECK_S", 0.0)
    follower = Follower(folder, ranks=0)
    reported = []
    for full[0] in (True, True, False, False, True):
        follower.update()
        reported.append("is full" in capsys.readouterr().err)
    assert reported == [True, False, False, False, True]


def test_a_deleted_folder_is_not_reported_as_a_full_disk(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    Follower(RunFolder(folder.path / "deleted"), ranks=0).update()
    assert capsys.readouterr().err == ""


# --- show -----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_shown_with_its_outcome_even_if_the_last_event_is_incomplete(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.observe.screen.follower.INCOMPLETE_S", 0.0)
    folder.result.write_text(
        '{"step": 3, "metrics": {"accuracy": 0.75}, "weights_sha256": "0123456789abcdef", "ema_sha256": null}'
    )
    folder.events.write_text('{"event": "warning", "time": 1.0, "text": "slow"}\n{"event": "run_fin')
    show(folder)
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["warning: slow", "done: step 3  accuracy 0.7500  weights 0123456789ab"]


def test_watching_a_run_that_was_killed_shows_how_to_resume_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.observe.screen.follower.IDLE_S", 0.0)
    folder.events.touch()
    show(folder)
    assert capsys.readouterr().err.splitlines()[-1] == "no process is training this run; resume it with --resume auto"
    folder.config.write_text("train_fn: train:train\n")
    show(folder)
    assert "--resume auto starts it from the beginning" in capsys.readouterr().err
