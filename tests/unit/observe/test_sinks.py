"""sinks/: names, delivery, processes and trackers; W&B and MLflow where they are installed."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest

import paceline
from paceline.config import Config
from paceline.errors import ConfigError, MissingExtra
from paceline.observe.event_types import Event
from paceline.observe.events import Events, rewind
from paceline.observe.sinks import process, registry, supervisor
from paceline.observe.sinks.sink import Sink, SinkFeeder
from paceline.observe.sinks.tracker import RunEnding, TrackerSink
from paceline.run.layout import RunFolder
from support.runs import warnings_in

MakeConfig = Callable[..., Config]


class ListTracker(TrackerSink):
    """Appends every call to a list."""

    name = "list"
    calls: ClassVar[list[Any]] = []

    def open(self, project: str, config: dict[str, Any], run_id: str | None) -> str:
        self.calls.append(("open", project, config["seed"], run_id))
        return run_id or "first"

    def log(self, event: Event, numbers: dict[str, float]) -> None:
        self.calls.append((event["step"], numbers))

    def send(self) -> None:
        pass

    def end(self, ending: RunEnding) -> None:
        self.calls.append(ending)


@pytest.fixture(autouse=True)
def _empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListTracker, "calls", [])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    folder.config.write_text("name: lab\nseed: 3\noptimizer: {name: sgd, lr: 0.5}\n")
    return folder


def write(folder: RunFolder, *events: tuple[str, dict[str, Any]]) -> None:
    writer = Events(folder.events)
    for name, fields in events:
        writer.write(name, **fields)
    writer.close()


def steps(*numbers: int) -> list[tuple[str, dict[str, Any]]]:
    return [("step", {"step": n, "steps": 9, "loss": 1 / n, "grad_norm": None, "step_ms": [n, 2.0]}) for n in numbers]


EPOCH = ("epoch", {"epoch": 1, "step": 3, "val_loss": 0.25})
FINISHED = ("run_finished", {"step": 3, "metrics": {"val_loss": 0.25}, "config": {}})


def deliver_all(folder: RunFolder) -> list[Any]:
    """The calls that a new tracker receives for the events so far."""
    ListTracker.calls.clear()
    tracker = ListTracker(folder.path)
    SinkFeeder(folder.events, tracker).deliver()
    tracker.close()
    return ListTracker.calls


def test_a_tracker_receives_plotted_numbers_and_the_ending(folder: RunFolder) -> None:
    write(folder, ("run_started", {}), *steps(2, 3), EPOCH, FINISHED)
    assert deliver_all(folder) == [
        ("open", "lab", 3, None),
        (2, {"loss": 0.5, "step_ms/rank-0": 2, "step_ms/rank-1": 2.0}),
        (3, {"loss": 1 / 3, "step_ms/rank-0": 3, "step_ms/rank-1": 2.0}),
        (3, {"epoch": 1, "val_loss": 0.25}),
        "finished",
    ]


def test_a_tracker_receives_the_further_values_of_a_step_under_their_names(folder: RunFolder) -> None:
    write(folder, ("run_started", {}), ("step", {"step": 2, "loss": 0.5, "values": {"perplexity": 1.5, "loss": 9.0}}))
    assert deliver_all(folder)[1] == (2, {"loss": 0.5, "perplexity": 1.5})


def test_a_later_attempt_reopens_the_remote_run_and_repeats_nothing(folder: RunFolder) -> None:
    write(folder, ("run_started", {}), *steps(1, 2, 3))
    assert deliver_all(folder)[-1] == "failed"
    rewind(folder.events, 1)
    write(folder, ("run_started", {}), *steps(2, 3), EPOCH, *steps(4), ("run_stopped", {"step": 4}))
    calls = deliver_all(folder)
    assert calls[0] == ("open", "lab", 3, "first")
    assert [entry[0] for entry in calls[1:-1]] == [3, 4]
    assert calls[1][1]["val_loss"] == 0.25  # of the epoch; the numbers of step 3 itself were sent before
    assert calls[-1] == "stopped"
    write(folder, ("run_started", {}), FINISHED)
    assert deliver_all(folder) == [("open", "lab", 3, "first"), "finished"]


def pace(step: int) -> tuple[str, dict[str, Any]]:
    return "pace", {"step": step, "steps": 9, "step_ms": [1.0]}


def test_all_events_of_one_step_are_sent_each_once(folder: RunFolder) -> None:
    write(folder, *steps(3), pace(3))
    assert [entry[0] for entry in deliver_all(folder)[1:-1]] == [3, 3]
    write(folder, pace(3), EPOCH)
    assert deliver_all(folder)[1:-1] == [(3, {"epoch": 1, "val_loss": 0.25})]


def test_the_state_file_of_version_1_is_understood(folder: RunFolder) -> None:
    folder.tracker("list").write_text('{"id": "old", "step": 3, "is_epoch": false}')
    write(folder, *steps(3), pace(3), EPOCH, *steps(4))
    calls = deliver_all(folder)
    assert calls[0] == ("open", "lab", 3, "old")
    assert [entry[0] for entry in calls[1:-1]] == [3, 4]
    assert calls[1][1]["val_loss"] == 0.25


def test_events_that_are_repeated_after_a_resume_are_sent_once(folder: RunFolder) -> None:
    feeder = SinkFeeder(folder.events, ListTracker(folder.path))
    write(folder, *steps(1, 2))
    feeder.deliver()
    rewind(folder.events, 0)
    write(folder, *steps(1, 2, 3))
    feeder.deliver()
    assert [entry[0] for entry in ListTracker.calls] == ["open", 1, 2, 3]


def test_a_run_without_numbers_is_not_opened(folder: RunFolder) -> None:
    write(folder, ("run_started", {}), FINISHED)
    assert deliver_all(folder) == []
    assert not folder.tracker("list").exists()


# --- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_gives_one_warning_and_delivery_resumes_after_the_last_number(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, opened = threading.Event(), []

    class Unreliable(ListTracker):
        def __init__(self, run_dir: Path) -> None:
            super().__init__(run_dir)
            opened.append(self)
            if len(opened) == 4:
                is_over.set()

        def log(self, event: Event, numbers: dict[str, float]) -> None:
            if len(opened) < 4 and event["step"] == len(opened):
                raise ConnectionError("no route to host\nand more")
            super().log(event, numbers)

    monkeypatch.setattr(process, "RETRY_S", 0.0)
    monkeypatch.setattr(process, "INTERVAL_S", 0.0)
    write(folder, ("run_started", {}), *steps(1, 2, 3), FINISHED)
    assert process.run("list", lambda: Unreliable(folder.path), folder, is_over)
    assert warnings_in(folder.path) == [
        "list does not receive the events of this run: no route to host; training continues, and list is retried"
    ]
    assert [entry[0] for entry in ListTracker.calls[:-1] if entry[0] != "open"][-3:] == [1, 2, 3]
    assert ListTracker.calls[-1] == "finished"


def test_a_tracker_that_never_works_gives_one_warning_and_a_failure(folder: RunFolder) -> None:
    class Broken(ListTracker):
        def open(self, project: str, config: dict[str, Any], run_id: str | None) -> str:
            raise RuntimeError("")

    is_over = threading.Event()
    is_over.set()
    write(folder, *steps(1))
    assert not process.run("list", lambda: Broken(folder.path), folder, is_over)
    assert len(warnings_in(folder.path)) == 1
    assert "RuntimeError" in warnings_in(folder.path)[0]


ENDS_WELL, FAILS = "import sys; sys.stdin.read()", "import sys; sys.stdin.read(); sys.exit('no such host')"
HANGS = "import time; print('still sending', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("command", "notes"),
    [
        (ENDS_WELL, []),
        (FAILS, ["warning: wandb did not receive all events: no such host", "  full log: {log}"]),
        (
            HANGS,
            [
                "waiting for wandb to receive the last events; press Ctrl-C to skip",
                "warning: wandb did not finish within 0.1 s: still sending",
                "  full log: {log}",
            ],
        ),
    ],
)
def test_the_process_of_a_sink_has_some_time_at_the_end(
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    notes: list[str],
) -> None:
    monkeypatch.setattr(supervisor, "command_of", lambda *words, options: [sys.executable, "-c", command])
    with supervisor.running_sinks(["wandb"], folder):
        while command is HANGS and not folder.tracker_log("wandb").stat().st_size:
            time.sleep(0.01)
        if command is HANGS:
            monkeypatch.setattr(supervisor, "NOTICE_S", 0.1)
            monkeypatch.setattr(supervisor, "FINISH_S", 0.1)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [note.format(log=folder.tracker_log("wandb")) for note in notes]


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package with a sink that works and two that cannot be loaded."""
    site = tmp_path / "site"
    metadata = site / "own_sinks-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "own_sinks.py").write_text("import paceline\nclass Works(paceline.Sink): pass\nNotASink = list\n")
    (metadata / "METADATA").write_text("Name: own-sinks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[paceline.sinks]\nworks = own_sinks:Works\nwrong = own_sinks:NotASink\nmissing = no_such_module:Sink\n"
    )
    monkeypatch.syspath_prepend(site)


@pytest.mark.usefixtures("entry_points")
def test_the_sink_of_an_entry_point_is_opened_by_its_name(folder: RunFolder) -> None:
    sink = registry.open_sink("works", folder.path)
    assert isinstance(sink, Sink)
    assert (type(sink).__name__, sink.run_dir) == ("Works", folder.path)


@pytest.mark.usefixtures("entry_points")
@pytest.mark.parametrize(("name", "reason"), [("wrong", "is not a subclass of paceline.Sink"), ("missing", "no_such")])
def test_an_entry_point_that_cannot_be_loaded_gives_one_warning(name: str, reason: str, folder: RunFolder) -> None:
    is_over = threading.Event()
    is_over.set()
    write(folder, *steps(1))
    assert not process.run(name, lambda: registry.open_sink(name, folder.path), folder, is_over)
    [warning] = warnings_in(folder.path)
    assert reason in warning


@pytest.mark.usefixtures("entry_points")
def test_checking_a_name_loads_no_sink(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "own_sinks", raising=False)
    registry.check(make_config(log={"trackers": ["works", "missing"]}).log.trackers)
    assert "own_sinks" not in sys.modules


@pytest.mark.usefixtures("entry_points")
def test_an_unknown_name_is_reported_with_the_known_ones_and_with_all_other_mistakes() -> None:
    with pytest.raises(ConfigError) as raised:
        paceline.Trainer(log={"trackers": ["works", "comet"]}, metrics=["nothing"])
    *_, trackers, metrics = raised.value.problems
    known = "wandb, mlflow, works, wrong, missing"
    assert trackers.startswith(f"log.trackers='comet' is not known; use {known}, or install a package")
    assert metrics.startswith("metrics='nothing' is not known")


def test_the_sink_in_the_documentation_works(folder: RunFolder) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(import json\n.*?)```", docs, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    feeder = SinkFeeder(folder.events, names["LineSink"](folder.path))
    write(folder, ("run_started", {}), *steps(1, 2))
    feeder.deliver()
    rewind(folder.events, 1)
    write(folder, EPOCH)
    feeder.deliver()
    received = [json.loads(line)["event"] for line in (folder.path / "lines.txt").read_text().splitlines()]
    assert received == ["step", "epoch"]


def test_a_sink_must_implement_write(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"Sink must implement write\(event\)"):
        Sink(tmp_path).write({"event": "step", "time": 0.0})


def test_a_tracker_that_is_not_installed_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, hide_package: Callable[[str], None]
) -> None:
    hide_package("mlflow")
    monkeypatch.setitem(sys.modules, "wandb", module_from_spec(ModuleSpec("wandb", None)))
    registry.check(["wandb"])
    with pytest.raises(MissingExtra, match=r"log\.trackers=mlflow needs mlflow; run: pip install 'paceline\[mlflow\]'"):
        registry.check(["wandb", "mlflow"])


def test_one_tracker_or_several_and_none_for_the_users_own_loop(make_config: MakeConfig) -> None:
    assert make_config(log={"trackers": "wandb"}).log.trackers == ["wandb"]
    assert make_config(log={"trackers": ["wandb", "mlflow"]}).log.trackers == ["wandb", "mlflow"]
    with pytest.raises(ConfigError, match=r"log\.trackers has nothing to record in a train_fn without `run`"):
        make_config(log={"trackers": "wandb"}, loss_fn=None, train_fn=lambda a, b, c, d, e: None)


# --- W&B and MLflow -------------------------------------------------------------------------------------------------


def two_attempts(name: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails and is resumed, with the processes that a launcher starts."""
    monkeypatch.setattr(supervisor, "FINISH_S", 250.0)
    with supervisor.running_sinks([name], folder):
        write(folder, ("run_started", {}), *steps(1, 2, 3))
    rewind(folder.events, 1)
    with supervisor.running_sinks([name], folder):
        write(folder, ("run_started", {}), *steps(2, 3), EPOCH, *steps(4), FINISHED)
    assert warnings_in(folder.path) == []


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_has_each_number_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_attempts("wandb", folder, monkeypatch)
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
    """The records of a file that W&B keeps for a later sync, in LevelDB's log format."""
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
    two_attempts("mlflow", folder, monkeypatch)
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
