"""telemetry/tracker.py, track.py and trackers.py with a tracker of our own; W&B and MLflow where they are installed."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.config import Config
from paceline.errors import ConfigError, MissingExtra
from paceline.observe.events import Events, read, rewind
from paceline.observe.sinks import process, trackers
from paceline.observe.sinks.sink import Channel, Event
from paceline.observe.sinks.tracker import Ending, Tracker
from paceline.run.layout import RunFolder

MakeConfig = Callable[..., Config]


class Notebook(Tracker):
    """Writes down what it is told."""

    name = "notebook"
    told: ClassVar[list[Any]] = []

    def open(self, name: str, config: dict[str, Any], known: str | None) -> str:
        self.told.append(("open", name, config["seed"], known))
        return known or "first"

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        self.told.append((event["step"], numbers))

    def send(self) -> None:
        pass

    def end(self, ending: Ending) -> None:
        self.told.append(ending)


@pytest.fixture(autouse=True)
def _empty_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notebook, "told", [])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    folder.config.write_text("name: lab\nseed: 3\noptimizer: {name: sgd, lr: 0.5}\n")
    return folder


def say(folder: RunFolder, *events: tuple[str, dict[str, Any]]) -> None:
    writer = Events(folder.events)
    for name, fields in events:
        writer.write(name, **fields)
    writer.close()


def steps(*numbers: int) -> list[tuple[str, dict[str, Any]]]:
    return [("step", {"step": n, "steps": 9, "loss": 1 / n, "grad_norm": None, "step_ms": [n, 2.0]}) for n in numbers]


EPOCH = ("epoch", {"epoch": 1, "step": 3, "val_loss": 0.25})
FINISHED = ("run_finished", {"step": 3, "metrics": {"val_loss": 0.25}, "config": {}})


def tell_all(folder: RunFolder) -> list[Any]:
    """One life of a tracker, and what it was told."""
    Notebook.told.clear()
    tracker = Notebook(folder)
    Channel(folder.events, tracker).look()
    tracker.close()
    return Notebook.told


def test_a_tracker_gets_what_is_plotted_and_how_the_run_ends(folder: RunFolder) -> None:
    say(folder, ("run_started", {}), *steps(2, 3), EPOCH, FINISHED)
    assert tell_all(folder) == [
        ("open", "lab", 3, None),
        (2, {"loss": 0.5, "step_ms/rank-0": 2, "step_ms/rank-1": 2.0}),
        (3, {"loss": 1 / 3, "step_ms/rank-0": 3, "step_ms/rank-1": 2.0}),
        (3, {"epoch": 1, "val_loss": 0.25}),
        "finished",
    ]


def test_a_later_life_goes_on_with_the_same_run_and_repeats_nothing(folder: RunFolder) -> None:
    say(folder, ("run_started", {}), *steps(1, 2, 3))
    assert tell_all(folder)[-1] == "failed"
    rewind(folder.events, 1)
    say(folder, ("run_started", {}), *steps(2, 3), EPOCH, *steps(4), ("run_stopped", {"step": 4}))
    told = tell_all(folder)
    assert told[0] == ("open", "lab", 3, "first")
    assert [entry[0] for entry in told[1:-1]] == [3, 4]
    assert told[1][1]["val_loss"] == 0.25  # the epoch's; the steps that it ends with are known
    assert told[-1] == "stopped"
    say(folder, ("run_started", {}), FINISHED)
    assert tell_all(folder) == [("open", "lab", 3, "first"), "finished"]


def pace(step: int) -> tuple[str, dict[str, Any]]:
    return "pace", {"step": step, "steps": 9, "step_ms": [1.0]}


def test_all_events_of_one_step_are_sent_each_once(folder: RunFolder) -> None:
    say(folder, *steps(3), pace(3))
    assert [entry[0] for entry in tell_all(folder)[1:-1]] == [3, 3]
    say(folder, pace(3), EPOCH)
    assert tell_all(folder)[1:-1] == [(3, {"epoch": 1, "val_loss": 0.25})]


def test_a_tracker_of_version_1_knows_what_it_has_sent(folder: RunFolder) -> None:
    folder.tracker("notebook").write_text('{"id": "old", "step": 3, "is_epoch": false}')
    say(folder, *steps(3), pace(3), EPOCH, *steps(4))
    told = tell_all(folder)
    assert told[0] == ("open", "lab", 3, "old")
    assert [entry[0] for entry in told[1:-1]] == [3, 4]
    assert told[1][1]["val_loss"] == 0.25


def test_events_that_are_taken_back_meanwhile_are_not_told_twice(folder: RunFolder) -> None:
    tracker = Notebook(folder)
    channel = Channel(folder.events, tracker)
    say(folder, *steps(1, 2))
    channel.look()
    rewind(folder.events, 0)
    say(folder, *steps(1, 2, 3))
    channel.look()
    assert [entry[0] for entry in Notebook.told] == ["open", 1, 2, 3]


def test_a_run_without_numbers_is_not_opened(folder: RunFolder) -> None:
    say(folder, ("run_started", {}), FINISHED)
    assert tell_all(folder) == []
    assert not folder.tracker("notebook").exists()


# --- errors ---------------------------------------------------------------------------------------------------------


def warnings_in(folder: RunFolder) -> list[str]:
    return [event["text"] for event in read(folder.events) if event["event"] == "warning"]


def test_an_error_costs_one_warning_and_is_tried_again_from_where_it_was(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, lives = threading.Event(), []

    class Moody(Notebook):
        def __init__(self, folder: RunFolder) -> None:
            super().__init__(folder)
            lives.append(self)
            if len(lives) == 4:
                over.set()

        def log(self, event: Event, numbers: dict[str, float]) -> None:
            if len(lives) < 4 and event["step"] == len(lives):
                raise ConnectionError("the line is dead\nand more")
            super().log(event, numbers)

    monkeypatch.setattr(process, "RETRY_S", 0.0)
    monkeypatch.setattr(process, "INTERVAL_S", 0.0)
    say(folder, ("run_started", {}), *steps(1, 2, 3), FINISHED)
    assert process.follow(Moody, folder, over)
    assert warnings_in(folder) == [
        "notebook is not told of this run: the line is dead; the run goes on, and it is tried again"
    ]
    assert [entry[0] for entry in Notebook.told[:-1] if entry[0] != "open"][-3:] == [1, 2, 3]
    assert Notebook.told[-1] == "finished"


def test_what_never_works_is_told_at_the_end(folder: RunFolder) -> None:
    class Broken(Notebook):
        def open(self, name: str, config: dict[str, Any], known: str | None) -> str:
            raise RuntimeError("")

    over = threading.Event()
    over.set()
    say(folder, *steps(1))
    assert not process.follow(Broken, folder, over)
    assert len(warnings_in(folder)) == 1
    assert "RuntimeError" in warnings_in(folder)[0]


ENDS_WELL, FAILS = "import sys; sys.stdin.read()", "import sys; sys.stdin.read(); sys.exit('no such host')"
HANGS = "import time; print('still sending', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("command", "notes"),
    [
        (ENDS_WELL, []),
        (FAILS, ["warning: wandb could not be told everything: no such host", "  full log: {log}"]),
        (
            HANGS,
            [
                "waiting for wandb to take the last numbers; Ctrl-C goes on without",
                "warning: wandb was not done in time: still sending",
                "  full log: {log}",
            ],
        ),
    ],
)
def test_a_process_of_its_own_has_some_time_at_the_end(
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    notes: list[str],
) -> None:
    monkeypatch.setattr(trackers, "command_of", lambda *words, options: [sys.executable, "-c", command])
    with trackers.tracking(["wandb"], folder):
        while command is HANGS and not folder.tracker_log("wandb").stat().st_size:
            time.sleep(0.01)
        if command is HANGS:
            monkeypatch.setattr(trackers, "QUIET_S", 0.1)
            monkeypatch.setattr(trackers, "PATIENCE_S", 0.1)
    said = capsys.readouterr().err.splitlines()
    assert said == [note.format(log=folder.tracker_log("wandb")) for note in notes]


# --- the key --------------------------------------------------------------------------------------------------------


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "mlflow" else object())
    trackers.check(["wandb"])
    with pytest.raises(MissingExtra, match=r"log\.trackers=mlflow needs mlflow; run: pip install 'paceline\[mlflow\]'"):
        trackers.check(["wandb", "mlflow"])


def test_one_tracker_or_several_and_none_for_a_loop_of_your_own(make_config: MakeConfig) -> None:
    assert make_config(log={"trackers": "wandb"}).log.trackers == ["wandb"]
    assert make_config(log={"trackers": ["wandb", "mlflow"]}).log.trackers == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match=r"log\.trackers\S* input should be 'wandb' or 'mlflow'"):
        make_config(log={"trackers": "comet"})
    with pytest.raises(ConfigError, match=r"log\.trackers records only the managed loop"):
        make_config(log={"trackers": "wandb"}, loss_fn=None, train_fn=lambda a, b, c, d, e: None)


# --- the real ones --------------------------------------------------------------------------------------------------


def two_lives(name: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails and goes on, told by processes as a launcher starts them."""
    monkeypatch.setattr(trackers, "PATIENCE_S", 250.0)
    with trackers.tracking([name], folder):
        say(folder, ("run_started", {}), *steps(1, 2, 3))
    rewind(folder.events, 1)
    with trackers.tracking([name], folder):
        say(folder, ("run_started", {}), *steps(2, 3), EPOCH, *steps(4), FINISHED)
    assert warnings_in(folder) == []


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_each_number_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_lives("wandb", folder, monkeypatch)
    files = sorted((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    rows = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (n, pytest.approx(1 / n)) for n in (1, 2, 3, 4)
    ]
    assert [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row] == [(3, 0.25)]
    runs = [record.run for record in records if record.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads(folder.tracker("wandb").read_text())["id"]}
    assert {(run.project, run.display_name) for run in runs} == {("lab", "run")}
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a file that W&B keeps to be synced later: LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


@pytest.mark.skipif(not (find_spec("mlflow") and find_spec("sqlalchemy")), reason="mlflow is not installed")
def test_mlflow_has_each_number_once(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    two_lives("mlflow", folder, monkeypatch)
    kept = json.loads(folder.tracker("mlflow").read_text())
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        numbers = base.execute("select key, step, value from metrics order by step").fetchall()
        assert [(step, value) for key, step, value in numbers if key == "loss"] == [
            (n, pytest.approx(1 / n)) for n in (1, 2, 3, 4)
        ]
        assert [(step, value) for key, step, value in numbers if key == "val_loss"] == [(3, 0.25)]
        assert base.execute("select run_uuid, status, name from runs").fetchall() == [(kept["id"], "FINISHED", "run")]
        assert dict(base.execute("select key, value from params").fetchall())["optimizer.lr"] == "0.5"
        assert ("lab",) in base.execute("select name from experiments").fetchall()
    base.close()
