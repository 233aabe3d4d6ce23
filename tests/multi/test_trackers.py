"""A run and a tracker, from the config key to what the tracker is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import events, start, stop_step
from test_resume import stopping

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
        with open(os.environ["TOLD"], "a") as file:
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
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))


def test_a_run_that_is_stopped_and_goes_on_is_told_once() -> None:
    tracked = {"log": {"every_steps": 2, "trackers": "wandb"}, "schedule": {"name": "constant"}}
    stop_step(**tracked, dataset_fn=stopping(2), procs=2)
    start(**tracked, resume="auto")
    told = [json.loads(line) for line in Path("told").read_text().splitlines()]
    assert len({run for run, *_ in told}) == 1
    assert [entry for _, *entry in told if entry[0] == "end"] == [["end", 3], ["end", 0]]
    assert [(step, loss) for _, step, loss in told if step != "end" and loss is not None] == [
        (event["step"], event["loss"]) for event in events("step")
    ]


def test_a_tracker_that_fails_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BREAK", "1")
    result = start(log={"trackers": ["wandb"]}, num_epochs=1)
    assert result.step == 7
    warnings = [event["text"] for event in events("warning")]
    assert warnings == ["wandb is not told of this run: no connection; the run goes on, and it is tried again"]
    assert "warning: wandb could not be told everything: RuntimeError: no connection" in capsys.readouterr().err
