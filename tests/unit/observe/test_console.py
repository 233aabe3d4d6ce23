"""screen/console.py: the view on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.screen.console import PLAIN_INTERVAL_S, Screen
from support.clocks import FakeClock

STEP = {
    "event": "step", "time": 1000.0, "step": 40, "steps": 100, "epoch": 2, "epochs": 5, "loss": 0.125, "lr": 0.003,
    "samples_per_s": 2000.0, "step_ms": [100.0, 100.0], "memory_mb": [300.0, 300.0],
}  # fmt: skip
STARTED = {
    "event": "run_started", "time": 999.0, "name": "digits", "run_dir": "/r", "world_size": 2,
    "device": "cpu", "backend": "gloo",
}  # fmt: skip


# --- plain lines --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_terminal_a_plain_line_is_printed_every_few_seconds(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen()
    for _ in range(10):
        clock.advance(PLAIN_INTERVAL_S / 2)
        screen.show(STEP)
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["epoch 2/5  loss 0.1250  lr 0.003  2,000 samples/s  6 s left  [40/100]"] * 5


def test_steps_are_shown_only_with_the_next_pace_event(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    measured = ("samples_per_s", "step_ms", "memory_mb")
    recorded = {name: value for name, value in STEP.items() if name not in measured}
    for step in range(30, 40):
        clock.advance(PLAIN_INTERVAL_S)
        screen.show({**recorded, "step": step})
    assert capsys.readouterr().err == ""
    screen.show({name: value for name, value in STEP.items() if name not in ("loss", "lr")} | {"event": "pace"})
    printed = "epoch 2/5  loss 0.1250  lr 0.003  2,000 samples/s  6 s left  [40/100]\n"
    assert capsys.readouterr().err == printed


def test_streams_evaluations_and_own_loops_have_plain_lines(
    clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen()
    progress = {"event": "progress", "time": 0.0, "phase": "training", "epoch": 3, "batch": 4, "batches": None}
    for event in ({**STEP, "steps": None}, {"event": "evaluating", "time": 0.0, "batch": 1, "batches": 6}, progress):
        clock.advance(PLAIN_INTERVAL_S)
        screen.show(event)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 2/5  loss 0.1250  lr 0.003  2,000 samples/s  time left unknown  [40]",
        "evaluating  [1/6]",
        "epoch 3 training  [5]",
    ]


def test_the_text_of_a_straggler_event_is_shown(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    Screen().show({"event": "straggler", "time": 0.0, "text": "rank 1 on n2 delays the others"})
    assert capsys.readouterr().err == "rank 1 on n2 delays the others\n"


def test_texts_of_events_cannot_control_the_terminal(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.show({**STARTED, "name": "digits\x1b[2J"})
    screen.show({"event": "epoch", "time": 1001.0, "epoch": 0, "step": 40, "accuracy\x1b[2J": 0.5})
    screen.show({"event": "warning", "time": 1002.0, "text": "slow\x1b[2J"})
    shown = capsys.readouterr().err
    assert shown.count("\\x1b[2J") == 3
    assert "\x1b" not in shown


# --- a terminal ---------------------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of 80 columns, and the text on its screen."""

    SEQUENCE = re.compile(rb"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")

    def __init__(self, command: list[str], cwd: Path, **streams: Any) -> None:
        self.leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("TTY_", "FORCE_COLOR"))}
        self.process = subprocess.Popen(
            command, cwd=cwd, stdin=follower, stderr=follower, **{"stdout": follower, **streams},
            env={**plain, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        )  # fmt: skip
        os.close(follower)
        self.bytes = b""

    def read(self, until: str | None = None, limit_s: float = 30.0) -> str:
        """The text on the screen, as soon as it contains `until`; without it, when the command has ended."""
        deadline = time.monotonic() + limit_s
        while until is None or until not in self.text:
            is_new, *_ = select.select([self.leader], [], [], max(deadline - time.monotonic(), 0.0))
            new = b""
            with suppress(OSError):  # the command has ended and closed the terminal
                new = os.read(self.leader, 1 << 16) if is_new else b""
            if not new and is_new and until is None:
                break
            assert new, f"{until!r} is not on the screen:\n{self.text}"
            self.bytes += new
        return self.text

    @property
    def text(self) -> str:
        rows, row = [""], 0
        for code, letter, end, new in self.SEQUENCE.findall(self.bytes):
            if end == b"\n" or letter == b"A":
                row = row + 1 if end else max(row - int(code or 1), 0)
                rows += [""] * (row + 1 - len(rows))
            elif letter == b"K":
                rows[row] = ""
            elif new:  # every line is written from its beginning
                rows[row] += new.decode(errors="replace")
        return "\n".join(rows).rstrip("\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.leader)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: digits\n")
    return folder


def write(run: Path, *events: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_a_terminal_shows_the_view_during_the_run_and_removes_it_at_the_end(run: Path) -> None:
    write(run, STARTED, STEP)
    terminal = Terminal([str(Path(sys.executable).parent / "paceline"), "watch", "run"], run.parent)
    try:
        shown = terminal.read(until="slowest")
        for text in ("digits: 2 ranks", "40/100 steps", "s left", "epoch 2/5", "loss 0.1250", "lr 0.003", "300 MB"):
            assert text in shown
        write(run, {"event": "epoch", "time": 1001.0, "epoch": 2, "step": 40, "train_loss": 0.2, "accuracy": 0.75})
        terminal.read(until="evaluation  accuracy 0.7500")
        # After a restart the view is removed until there is new progress.
        write(run, {"event": "restarted", "time": 1002.0, "text": "rank 1 failed; restarting"})
        assert "40/100" not in terminal.read(until="restarting")
        write(run, {**STARTED, "time": 1002.5})
        terminal.read(until="restarting\ndigits")
        write(run, {**STEP, "time": 1003.0, "step": 41}, {**STEP, "time": 1004.0, "step": 42})
        terminal.read(until="42/100")
        write(run, {"event": "run_finished", "time": 1005.0})
        started = "digits: 2 ranks on cpu (gloo), run folder /r"
        epoch = "epoch 2  step 40  train_loss 0.2000  accuracy 0.7500"
        assert terminal.read().split("\n") == [started, epoch, "rank 1 failed; restarting", started]
    finally:
        terminal.close()


PRINTING = """
import json, sys
from paceline.observe.screen.console import Screen
screen = Screen()
screen.show(json.loads(sys.argv[1]))
screen.line("[red] from rank 0: " + 80 * "x")
screen.close()
"""
PRINTED = f"[red] from rank 0: {80 * 'x'}"


def test_what_rank_0_prints_stays_above_the_view(tmp_path: Path) -> None:
    terminal = Terminal([sys.executable, "-c", PRINTING, json.dumps(STEP)], tmp_path)
    try:
        assert terminal.read() == PRINTED
        assert b"loss 0.1250" in terminal.bytes
    finally:
        terminal.close()


def test_what_rank_0_prints_into_a_file_stays_out_of_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        terminal = Terminal([sys.executable, "-c", PRINTING, json.dumps(STEP)], tmp_path, stdout=out)
        try:
            assert terminal.read().strip() == ""
            assert b"loss 0.1250" in terminal.bytes
        finally:
            terminal.close()
    assert (tmp_path / "out").read_text() == f"{PRINTED}\n"
