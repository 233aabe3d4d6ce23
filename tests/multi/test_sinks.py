"""A run and its sinks, from the config key to the events that a sink receives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from faults import events, start, stop_step
from test_resume import stopping

from paceline.observe.events import read

FAKE = """
import json, os
from types import SimpleNamespace as Settings

def setup():
    return Settings(settings=Settings(project=None, run_name=None))

class Run:
    step = 0
    def __init__(self, id):
        self.id = id
    def define_metric(self, *names, **options):
        pass
    def log(self, row, step):
        self.write(row["step"], row.get("loss"))
    def finish(self, exit_code):
        self.write("end", exit_code)
    def write(self, *entry):
        with open(os.environ["SENT"], "a") as file:
            file.write(json.dumps([self.id, *entry]) + "\\n")

def init(*, id, **options):
    if "BREAK" in os.environ:
        raise RuntimeError("no connection")
    return Run(id)
"""


@pytest.fixture(autouse=True)
def _fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "fake")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("SENT", str(tmp_path / "sent"))


def test_a_run_that_is_stopped_and_resumed_is_sent_once() -> None:
    tracked = {"log": {"every_steps": 2, "trackers": "wandb"}, "schedule": {"name": "constant"}}
    stop_step(**tracked, dataset_fn=stopping(2), procs=2)
    start(**tracked, resume="auto")
    sent = [json.loads(line) for line in Path("sent").read_text().splitlines()]
    assert len({run for run, *_ in sent}) == 1
    assert [entry for _, *entry in sent if entry[0] == "end"] == [["end", 3], ["end", 0]]
    assert [(step, loss) for _, step, loss in sent if step != "end" and loss is not None] == [
        (event["step"], event["loss"]) for event in events("step")
    ]


def test_a_tracker_that_fails_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BREAK", "1")
    result = start(log={"trackers": ["wandb"]}, num_epochs=1)
    assert result.step == 7
    warnings = [event["text"] for event in events("warning")]
    assert warnings == [
        "wandb does not receive the events of this run: no connection; training continues, and wandb is retried"
    ]
    assert "warning: wandb did not receive all events: RuntimeError: no connection" in capsys.readouterr().err


LINE_SINK = """
import json
import paceline

class LineSink(paceline.Sink):
    def restart(self):
        self.file = (self.run_dir / "lines").open("w")

    def write(self, event):
        self.file.write(json.dumps(event) + "\\n")

    def flush(self):
        self.file.flush()
"""


def test_the_sink_of_an_entry_point_receives_all_events_of_a_run(tmp_path: Path) -> None:
    metadata = tmp_path / "fake" / "line_sink-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "fake" / "line_sink.py").write_text(LINE_SINK)
    (metadata / "METADATA").write_text("Name: line-sink\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[paceline.sinks]\nlines = line_sink:LineSink\n")
    result = start(log={"trackers": "lines"}, num_epochs=1)
    received = [json.loads(line) for line in (result.run_dir / "lines").read_text().splitlines()]
    assert received == list(read(result.run_dir / "events.jsonl"))
    assert [received[0]["event"], received[-1]["event"]] == ["run_started", "run_finished"]
    assert "line_sink" not in sys.modules
