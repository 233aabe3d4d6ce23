"""`paceline report`: the facts of a run folder, thinned curves of long runs, and a page that no string can break."""

from __future__ import annotations

import ast
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import cli
from paceline.errors import ConfigError
from paceline.observe.events import VERSION
from paceline.run.layout import RunFolder
from paceline.run.lock import locked
from paceline.tools.report.facts import facts_of, facts_of_all
from paceline.tools.report.page import as_script, page_of
from paceline.tools.report.phases import Phases, PhaseSums
from paceline.tools.report.thin import Point, StepTimes, heat_of, stragglers_in, thinned
from support.runs import write_run

STARTED = {
    "event": "run_started", "version": 1, "name": "lab", "seed": 7, "world_size": 2, "lanes": 4, "device": "cpu",
    "backend": "gloo", "machine": {"host": "node7", "system": "Linux", "cores": 8, "gpu": None},
    "versions": {"paceline": "0.1.0", "torch": "2.13.0"}, "commit": "4f1c2a90b7de-dirty",
}  # fmt: skip
DOCS = Path(__file__).parents[3] / "docs"


def step(number: int, loss: float | None = 0.5, **fields: Any) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "steps": 100, "epoch": 1, "epochs": 1, "loss": loss, "lr": 0.1,
        "samples_per_s": 100.0 + number, "grad_norm": None, "step_ms": [10.0, 11.0], "memory_mb": [50.0, 60.0 + number],
        **fields,
    }  # fmt: skip


# --- facts ------------------------------------------------------------------------------------------------------


def test_the_facts_come_from_the_events_and_the_result(tmp_path: Path) -> None:
    epoch = {"event": "epoch", "epoch": 1, "step": 20, "train_loss": 0.4, "val_loss": 0.3, "accuracy": 0.9}
    saved = [
        {"event": "saving", "step": 20, "held_s": 0.25},
        {"event": "checkpoint", "step": 20, "bytes": 2_000_000, "seconds": 0.5},
    ]
    finished = {"event": "run_finished", "step": 20, "epoch": 1, "metrics": {}}
    folder = write_run(tmp_path / "r", STARTED, step(10, 0.75), step(20, 0.5), epoch, *saved, finished)
    folder.result.write_text(
        json.dumps(
            {
                "step": 20,
                "metrics": {"val_loss": 0.3, "accuracy": 0.9},
                "seconds": 2.5,
                "samples": 640,
                "weights_sha256": "ab" * 32,
                "ema_sha256": None,
            }
        )
    )
    facts = facts_of(folder, "r")
    assert (facts.name, facts.state, facts.step, facts.ranks, facts.seconds) == ("lab", "finished", 20, 2, 6.0)
    loss = facts.curves["loss"]
    assert (loss.per, loss.step, loss.seconds, loss.value) == ("step", [10, 20], [1.0, 2.0], [0.75, 0.5])
    assert facts.curves["accuracy"].per == "epoch"
    assert facts.curves["memory_mb"].value == [70.0, 80.0]  # the largest of all ranks
    assert {"step", "steps", "epoch", "epochs", "time", "grad_norm", "step_ms"}.isdisjoint(facts.curves)
    assert facts.metrics == {"val_loss": 0.3, "accuracy": 0.9}
    assert (facts.samples_per_s, facts.memory_mb, facts.weights_sha256) == (115.0, 80.0, "ab" * 32)
    assert facts.heat is not None
    assert facts.heat.columns == [[10.0, 11.0], [10.0, 11.0]]
    assert [(mark.kind, mark.step, mark.text) for mark in facts.marks] == [
        ("checkpoint", 20, "2.0 MB in 0.5 s"),
        ("finished", 20, ""),
    ]
    about = dict(facts.about)
    assert about["ranks"] == "2 ranks on cpu (gloo), lanes 4"
    assert about["machine"] == "node7, Linux, 8 cores"
    assert about["versions"] == "paceline 0.1.0, torch 2.13.0"
    assert about["commit"] == "4f1c2a90b7de, with changes"
    assert about["time"] == "6.0 s, 2.5 s of it in training steps, 0.25 s paused for checkpoints"


def test_curves_come_from_step_events_and_times_from_pace_events(tmp_path: Path) -> None:
    def recorded(number: int) -> dict[str, Any]:
        fields = ("event", "step", "steps", "epoch", "epochs", "loss", "lr", "grad_norm")
        return {name: value for name, value in step(number, loss=1 / number).items() if name in fields}

    def pace(number: int, data: float) -> dict[str, Any]:
        measured = {"samples_per_s": 100.0, "step_ms": [10.0], "phase_ms": {"data": [data]}, "memory_mb": [50.0]}
        return {"event": "pace", "step": number, "steps": 100, "epoch": 0, "epochs": 1, **measured}

    events = [recorded(1), recorded(5), pace(7, 2.0), recorded(10), recorded(15), pace(17, 5.0)]
    facts = facts_of(write_run(tmp_path / "r", STARTED, *events), "r")
    assert facts.curves["loss"].step == facts.curves["lr"].step == [1, 5, 10, 15]
    assert facts.curves["samples_per_s"].step == facts.curves["memory_mb"].step == [7, 17]
    assert facts.heat is not None
    assert facts.heat.steps == [7, 17]
    assert facts.phases is not None
    assert facts.phases.ms[0] == [round((7 * 2.0 + 10 * 5.0) / 17, 3)]
    assert facts.step == 17


def test_further_values_of_steps_have_curves(tmp_path: Path) -> None:
    events = [step(number, values={"perplexity": 2.0 * number, "absent": None}) for number in (1, 5)]
    curves = facts_of(write_run(tmp_path / "r", STARTED, *events), "r").curves
    assert (curves["perplexity"].per, curves["perplexity"].value) == ("step", [2.0, 10.0])
    assert "absent" not in curves


def test_phases_are_means_over_all_steps_since_the_number_of_ranks_changed(tmp_path: Path) -> None:
    def timed(number: int, data: list[float], reduction: list[float]) -> dict[str, Any]:
        return step(number, step_ms=[10.0] * len(data), phase_ms={"data": data, "reduction": reduction})

    late = {"event": "straggler", "step": 40, "rank": 1, "text": "rank 1 on n2 delays the others"}
    folder = write_run(
        tmp_path / "r", STARTED, timed(10, [9.0], [0.0]),  # one rank; left out
        STARTED, {"event": "resumed", "step": 10, "checkpoint": "c", "changes": []},
        timed(20, [1.0, 4.0], [8.0, 5.0]), timed(50, [2.0, 8.0], [7.0, 1.0]), late,
    )  # fmt: skip
    facts = facts_of(folder, "r")
    assert facts.phases == Phases(["data", "reduction"], [[1.75, 7.0], [7.25, 2.0]])
    assert facts.heat is not None
    assert facts.heat.columns == [[10.0], [2.0, 5.0], [3.0, 9.0]]  # without the time of waiting
    assert facts.heat.slow_points == {1: 2}
    assert [(mark.kind, mark.step, mark.text) for mark in facts.marks][-1] == ("straggler", 40, late["text"])


def test_where_only_data_is_timed_the_rest_of_the_step_is_one_phase(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", STARTED, step(10, phase_ms={"data": [4.0, 1.0]}))  # steps of 10 and 11 ms
    facts = facts_of(folder, "r")
    assert facts.phases == Phases(["data", "device"], [[4.0, 1.0], [6.0, 10.0]])
    assert facts.heat is not None
    assert facts.heat.columns == [[10.0, 11.0]]


def test_phases_timed_on_a_gpu_are_kept_when_its_ranks_are_restarted() -> None:
    sums = PhaseSums()
    sums.add(5, [10.0], {"data": [4.0]})
    assert sums.mean() == Phases(["data", "device"], [[4.0], [6.0]])
    sums.add(5, [10.0], {"data": [1.0], "forward": [9.0]})
    sums.add(5, [30.0], {"data": [25.0]})  # nothing was timed on the GPU yet
    assert sums.mean() == Phases(["data", "forward"], [[1.0], [9.0]])
    sums.add(5, [10.0], {"data": [3.0], "forward": [7.0]})
    assert sums.mean() == Phases(["data", "forward"], [[2.0], [8.0]])
    sums.add(5, [10.0, 12.0], {"data": [4.0, 5.0]})  # another number of ranks
    assert sums.mean() == Phases(["data", "device"], [[4.0, 5.0], [6.0, 7.0]])


def test_a_run_without_phases_has_none(tmp_path: Path) -> None:
    assert facts_of(write_run(tmp_path / "r", STARTED, step(10)), "r").phases is None


def test_a_resumed_run_has_each_step_once_and_shows_where_it_resumed(tmp_path: Path) -> None:
    restarted = {"event": "restarted", "text": "rank 1 failed"}
    resumed = {"event": "resumed", "step": 20, "checkpoint": "/runs/r/checkpoints/step-00000020", "changes": ["procs"]}
    first = [STARTED, *(step(number, 9.0) for number in (10, 20, 30, 40))]
    folder = write_run(
        tmp_path / "r", *first, restarted, {**STARTED, "world_size": 1}, resumed, step(30, 1.0), step(40, 2.0)
    )
    facts = facts_of(folder, "r")
    assert facts.curves["loss"].step == [10, 20, 30, 40]
    assert facts.curves["loss"].value == [9.0, 9.0, 1.0, 2.0]
    assert facts.heat is not None
    assert facts.heat.steps == [10, 20, 30, 40]
    assert [(each.start, each.end, each.ranks, each.step) for each in facts.attempts] == [(0, 4, 2, 0), (6, 9, 1, 20)]
    assert [mark.kind for mark in facts.marks] == ["restarted", "resumed"]
    assert dict(facts.about)["starts"] == "2: 2 ranks at first, then from step 20 on 1"


def test_a_run_that_started_from_a_checkpoint_of_another_run_names_it(tmp_path: Path) -> None:
    resumed = {"event": "resumed", "step": 20, "checkpoint": "/other/checkpoints/step-00000020", "changes": []}
    facts = facts_of(write_run(tmp_path / "r", STARTED, resumed, step(30)), "r")
    assert dict(facts.about)["lineage"] == "started from /other/checkpoints/step-00000020, step 20"


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    facts = facts_of(write_run(tmp_path / "r", STARTED, step(10), tail='{"event": "step", "st'), "r")
    assert facts.curves["loss"].step == [10]


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (step(10), "ended early"),
        ({"event": "run_stopped", "step": 10, "reason": "SIGTERM", "is_saved": True}, "stopped"),
        ({"event": "run_finished", "step": 10}, "finished"),
    ],
)
def test_the_state_of_a_run_is_how_it_ended(tmp_path: Path, last: dict[str, Any], state: str) -> None:
    assert facts_of(write_run(tmp_path / "r", STARTED, last), "r").state == state


def test_a_run_that_was_stopped_and_resumed_is_running(tmp_path: Path) -> None:
    stopped = {"event": "run_stopped", "step": 10, "reason": "SIGTERM", "is_saved": True}
    folder = write_run(tmp_path / "r", STARTED, step(10), stopped, STARTED)
    with locked(folder):
        assert facts_of(folder, "r").state == "running"


def test_a_run_without_events_has_a_page(tmp_path: Path) -> None:
    tmp_path.joinpath("r").mkdir()
    facts = facts_of(RunFolder(tmp_path / "r"), "r")
    assert facts.state == "not started"
    assert '"curves":{}' in page_of([facts])


def test_missing_and_non_finite_numbers_are_not_drawn(tmp_path: Path) -> None:
    facts = facts_of(write_run(tmp_path / "r", STARTED, step(10, None), step(20, math.nan), step(30, 1.0)), "r")
    assert facts.curves["loss"].step == [30]


def test_several_runs_have_different_labels_and_each_appears_once(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, STARTED, step(10)).path for name in ("a/x", "a/y", "b/x")]
    assert [facts.label for facts in facts_of_all([*paths, paths[0]])] == ["a/x", "a/y", "b/x"]
    assert facts_of_all(paths[:1])[0].label == "x"


# --- long runs --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 50))
def test_a_thinned_curve_is_within_the_limit_and_keeps_its_ends_and_extremes(values: list[float], limit: int) -> None:
    points = [Point(step, float(step), value) for step, value in enumerate(values)]
    kept = thinned(points, limit)
    assert len(kept) <= limit or len(kept) == len(points) <= limit
    assert set(kept) <= set(points)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(values), max(values)} <= {point.value for point in kept}


def test_a_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write_run(folder, STARTED)
    line = json.dumps({"time": 2000.0, **step(0, 0.123456789012345, step_ms=[10.123] * 16, grad_norm=1.23456789)})
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(line.replace('"step": 0', f'"step": {n}') + "\n" for n in range(1, 6_001))
    facts = facts_of(RunFolder(folder), "r")
    assert {len(curve.value) for curve in facts.curves.values()} <= set(range(1000, 2001))
    assert facts.curves["loss"].step[-1] == 6_000
    assert len(page_of([facts])) < 1_000_000


def test_ranks_slower_than_1_25_times_the_median_are_stragglers() -> None:
    assert stragglers_in([10.0, 10.5, 12.0, 14.0]) == [3]
    assert stragglers_in([10.0, 20.0]) == [1]
    assert stragglers_in([10.0]) == stragglers_in([]) == []


def test_a_heat_strip_keeps_the_longest_times_and_every_straggler() -> None:
    usual = [StepTimes(step, [10.0, 10.0, 10.0]) for step in range(1, 101)]
    usual[41] = StepTimes(42, [10.0, 30.0, 10.0])
    heat = heat_of(usual, 10)
    assert heat.steps == list(range(10, 101, 10))
    assert heat.columns[4] == [10.0, 30.0, 10.0]
    assert heat.stragglers == [[], [], [], [], [1], [], [], [], [], []]
    assert (heat.points, heat.slow_points) == (100, {1: 1})


def test_a_heat_strip_of_a_run_that_resumed_on_fewer_ranks() -> None:
    heat = heat_of([StepTimes(1, [1.0, 1.0]), StepTimes(2, [3.0])], 1)
    assert heat.columns == [[3.0, 1.0]]


# --- the page ---------------------------------------------------------------------------------------------------


def data_in(page: str) -> Any:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_no_string_of_a_run_is_read_as_html(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><!-- & "\u2028'
    folder = write_run(tmp_path / "r", {**STARTED, "name": evil}, step(10), config=f"name: '{evil}'\n")
    page = page_of(facts_of_all([folder.path]))
    assert "<script>alert" not in page
    assert page.count("</script>") == 3
    assert data_in(page)["runs"][0]["name"] == evil


def test_nan_and_infinity_are_null() -> None:
    assert as_script({"a": [math.nan, math.inf, 1.5], "b": (1, None)}) == '{"a":[null,null,1.5],"b":[1,null]}'


def test_the_page_loads_no_other_file(tmp_path: Path) -> None:
    page = page_of(facts_of_all([write_run(tmp_path / "r", STARTED, step(10)).path]))
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []
    assert "@import" not in page
    assert "url(" not in page
    assert "Permission is hereby granted" in page  # the licence of uPlot, which is part of the page


# --- the documented events ---------------------------------------------------------------------------------------


def written_events() -> dict[str, set[str]]:
    """The kinds of events that the sources write, with the fields that are named in the calls."""
    found: dict[str, set[str]] = {}
    for path in Path(paceline.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=writer, attr="write" | "write_sometimes"),
                    args=[ast.Constant(value=str(kind)), *_],
                    keywords=keywords,
                ) if ast.unparse(writer).endswith("events"):
                    found.setdefault(kind, set()).update(word.arg for word in keywords if word.arg is not None)
    return found


def documented_events() -> dict[str, tuple[set[str], dict[str, Any]]]:
    """The kinds of events in docs/events.md, each with its fields and its example."""
    text = DOCS.joinpath("events.md").read_text(encoding="utf-8")
    parts = re.findall(r"^### `(\w+)`\n(.*?)```json\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)
    return {kind: (set(re.findall(r"^\| `(\w+)`", body, re.M)), json.loads(line)) for kind, body, line in parts}


def test_every_event_that_is_written_is_documented() -> None:
    written, documented = written_events(), documented_events()
    assert {"run_started", "step", "progress", "checkpoint"} <= set(written)  # else this test finds nothing
    assert set(documented) == set(written)
    for kind, fields in written.items():
        assert fields - {"time"} <= documented[kind][0], kind  # which every event has


def test_the_examples_in_the_documentation_have_the_fields_that_it_lists() -> None:
    for kind, (fields, example) in documented_events().items():
        assert example.pop("event") == kind
        assert isinstance(example.pop("time"), float)
        assert fields == set(example) - {"accuracy"}  # one of the user's metrics


def test_the_documented_version_is_the_one_that_is_written() -> None:
    assert f"**version {VERSION}**" in DOCS.joinpath("events.md").read_text(encoding="utf-8")
    assert documented_events()["run_started"][1]["version"] == VERSION


# --- the command ------------------------------------------------------------------------------------------------


def test_folders_without_a_run_are_left_out_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", STARTED)
    (tmp_path / "runs" / "profile").mkdir()
    (tmp_path / "runs" / "notes.txt").touch()
    cli.app(["report", "runs/a", "runs/notes.txt", "runs/profile"], standalone_mode=False)
    assert capsys.readouterr().err == "skipped, not a run folder: runs/notes.txt, runs/profile\n"
    assert "node7" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "."], "profile is not a run folder; give one"),
        (["a", "nowhere"], "nowhere is not a run folder; give one"),
        (["a", "--out", "."], r"--out \. is a folder; give a file, such as report\.html$"),
        (["a", "--out", "profile"], r"--out profile is a folder; give a file, such as profile/report\.html$"),
    ],
)
def test_a_wrong_command_line_gives_one_message_and_writes_nothing(
    tmp_path: Path, words: list[str], message: str
) -> None:
    write_run(tmp_path / "a", STARTED)
    (tmp_path / "profile").mkdir()
    with pytest.raises(ConfigError, match=message):
        cli.app(["report", *words], standalone_mode=False)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "profile"}
