"""The events of real runs: as docs/events.md lists them, and the same numbers in a report."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from faults import Disturbed, send_self, start, stop_step

from paceline.report.read import facts_of
from paceline.run_folder import RunFolder
from paceline.telemetry.events import read

DOCS = Path(__file__).parents[2] / "docs" / "events.md"
OPTIONAL = {"warning": {"step"}}


def documented_fields() -> dict[str, set[str]]:
    parts = re.findall(r"^### `(\w+)`\n(.*?)```json", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {kind: {"event", "time", *re.findall(r"^\| `(\w+)`", body, re.MULTILINE)} for kind, body in parts}


def test_a_run_that_was_stopped_and_had_a_failure_writes_what_is_documented_and_has_a_report() -> None:
    log, saves = Path("fetched").resolve(), {"every_steps": 5}
    dies = {"dataset_fn": lambda: Disturbed(log, [1], send_self(signal.SIGKILL)), "max_restarts": 1}
    stopped_at = stop_step(procs=2, checkpoint=saves, time_limit=0.001)  # over before the first step is done
    result = start(procs=2, checkpoint=saves, resume="auto", log={"every_steps": 2, "digests": True}, **dies)

    seen, documented = list(read(Path("run/events.jsonl"))), documented_fields()
    often = {"run_started", "resumed", "restarted", "step", "epoch", "saving", "checkpoint", "digests", "run_stopped"}
    assert {*often, "run_finished"} <= {event["event"] for event in seen}
    for event in seen:
        kind = event["event"]
        metrics = {"accuracy"} if kind == "epoch" else set()
        assert documented[kind] | metrics >= set(event) >= documented[kind] - OPTIONAL.get(kind, set()), kind

    facts = facts_of(RunFolder(Path("run").resolve()), "run")
    assert facts.state == "finished"
    assert (facts.step, facts.weights_sha256) == (result.step, result.weights_sha256)
    assert facts.curves["val_loss"].value == [row["val_loss"] for row in result.history]
    assert facts.curves["loss"].step == sorted(set(facts.curves["loss"].step))
    assert len(facts.lives) == 3
    assert facts.lives[1].step == stopped_at
    assert [mark.kind for mark in facts.marks if mark.kind in ("stopped", "restarted", "finished")] == [
        "stopped",
        "restarted",
        "finished",
    ]
