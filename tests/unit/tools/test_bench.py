"""`paceline bench`: which cells are measured, and how the figures are compared. Nothing is timed here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline import __version__
from paceline.cli import bench as cli
from paceline.errors import ConfigError, PacelineError
from paceline.tools.bench import bench as module
from paceline.tools.bench.bench import (
    BenchPlan,
    Cell,
    Measurements,
    bench,
    cells_of,
    ratio_rows,
    scaling_rows,
    version_of,
)
from paceline.tools.bench.contenders import CONTENDERS
from paceline.tools.bench.loops import window_speeds
from paceline.tools.bench.models import WORKLOADS, OneByOne
from paceline.tools.bench.processes import run_jobs, window_of
from paceline.tools.bench.setup import WindowTimer
from paceline.tools.bench.worker import BenchJob

CPU = torch.device("cpu")


def measure(jobs: Sequence[BenchJob]) -> dict[str, object]:
    """Stands for the processes of a measurement."""
    return {"us_per_step": 100.0, "has_ddp": True}


def measured_of(**us_per_step: list[float]) -> dict[Cell, Measurements]:
    return {Cell("mnist", name.replace("_", "-"), 1): Measurements(us) for name, us in us_per_step.items()}


def test_ratios_are_of_medians_over_the_rounds_to_the_hand_written_loop() -> None:
    measured = measured_of(hand_written=[100.0, 900.0, 200.0], paceline=[150.0, 140.0, 1.0])
    rows = ratio_rows(measured, "mnist", 1, ["hand-written", "paceline"])
    assert [(row["us_per_step"], row["ratio"]) for row in rows] == [(200.0, 1.0), (140.0, 0.7)]
    assert [row["version"] for row in rows] == [version_of("torch"), __version__]


def test_a_loop_that_failed_has_its_error_and_no_figures() -> None:
    measured = measured_of(hand_written=[100.0])
    measured[Cell("mnist", "fabric", 1)] = Measurements([90.0], error="ValueError: no")
    [_, row] = ratio_rows(measured, "mnist", 1, ["hand-written", "fabric"])
    assert (row["us_per_step"], row["ratio"], row["error"]) == (None, None, "ValueError: no")


def test_without_the_hand_written_loop_there_are_no_ratios() -> None:
    [row] = ratio_rows(measured_of(paceline=[50.0]), "mnist", 1, ["paceline"])
    assert (row["us_per_step"], row["ratio"]) == (50.0, None)


def test_scaling_compares_each_loop_with_itself_on_the_fewest_ranks() -> None:
    measured = {
        Cell("mnist", "hand-written", 2): Measurements([100.0]),
        Cell("mnist", "hand-written", 4): Measurements([200.0]),
        Cell("mnist", "paceline", 2): Measurements([50.0]),
        Cell("mnist", "paceline", 4): Measurements([], error="no"),
    }
    rows = scaling_rows(measured, "mnist", [4, 2], batch_size=10)
    assert [(row["contender"], row["procs"]) for row in rows] == [
        ("hand-written", 2), ("hand-written", 4), ("paceline", 2), ("paceline", 4)
    ]  # fmt: skip
    assert [row["samples_per_s"] for row in rows[:3]] == pytest.approx([2e5, 2e5, 4e5])
    assert [(row["speed_up"], row["efficiency"]) for row in rows[:3]] == [(1.0, 1.0), (1.0, 0.5), (1.0, 1.0)]
    assert rows[3]["error"] == "no"


def test_scaling_adds_cells_only_for_the_two_loops_that_it_compares() -> None:
    cells = cells_of(BenchPlan(models=["mnist"], procs=1, scaling=[1, 2]), ["hand-written", "paceline", "fabric"])
    assert [cell.contender for cell in cells if cell.procs == 2] == ["hand-written", "paceline"]
    assert len(cells) == 5  # the cells of --procs 1 are measured once


def test_all_mistakes_of_a_plan_are_reported_together() -> None:
    with pytest.raises(ConfigError) as raised:
        bench(
            BenchPlan(models=["imagenet"], contenders=["handwritten"], procs=0, steps=2, rounds=0, device="tpu"),
            log=print,
        )
    assert raised.value.problems == [
        "--models imagenet is not known; use mnist, cifar",
        f"--only handwritten is not known; use {', '.join(CONTENDERS)}",
        "--device tpu is not known; use auto, cpu, cuda",
        "--procs 0 is too few; use at least 1",
        "--rounds 0 is too few; use at least 1",
        "--steps 2 is too few; use at least 5",
    ]


@pytest.mark.parametrize(("steps", "window"), [(5, 1), (60, 10), (250, 50), (1000, 200), (10_000, 400)])
def test_there_are_at_least_five_windows_and_they_divide_an_epoch(steps: int, window: int) -> None:
    assert window_of(steps, 800) == window
    assert 267 % window_of(steps, 267) == 0
    assert window_of(steps, 10) <= 10


def test_the_recorded_graph_runs_only_on_a_single_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_type", lambda name: name)
    monkeypatch.setattr(module, "machine", lambda device: {})

    def loops(device: str, procs: int) -> tuple[list[str], str]:
        logged: list[str] = []
        plan = BenchPlan(
            models=["mnist"], contenders=["hand-written", "recorded"], rounds=1, device=device, procs=procs
        )
        return [row["contender"] for row in bench(plan, logged.append, measure)["models"][0]["rows"]], logged[0]

    assert loops("cuda", 1)[0] == ["hand-written", "recorded"]
    message = "CUDA graph by hand needs one GPU and one process; skipped"
    assert loops("cuda", 2) == loops("cpu", 1) == (["hand-written"], message)


def test_the_timer_times_whole_windows_and_reports_the_last_step() -> None:
    timer = WindowTimer(steps=5, window=2, device=CPU)
    assert [timer.tick() for _ in range(5)] == [False, False, False, False, True]
    assert len(timer.seconds) == 2


def test_windows_that_the_end_of_an_epoch_cuts_short_are_left_out(tmp_path: Path) -> None:
    steps = [(10, 1.0), (20, 2.0), (25, 3.0), (30, 4.0), (40, 5.0)]  # an epoch ends at step 25
    events: list[dict[str, object]] = [{"event": "run_started"}]
    events += [{"event": "pace", "step": step, "samples_per_s": speed} for step, speed in steps]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, events)))
    assert window_speeds(path, 10) == [1.0, 2.0, 5.0]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_takes_its_data_and_both_data_sets_hold_the_same_samples(name: str) -> None:
    workload = WORKLOADS[name]
    samples = workload.dataset_fn()
    assert len(samples) == workload.samples
    assert len(samples) % (8 * workload.batch_size) in (0, 4 * workload.batch_size)
    images, labels = samples[:4]
    assert workload.model_fn()(images).shape == (4, 10)
    one_by_one = OneByOne(samples)
    assert not hasattr(one_by_one, "__getitems__")
    assert len(one_by_one) == len(samples)
    assert torch.equal(one_by_one[3][0], images[3])
    assert one_by_one[3][1] == labels[3]


# --- the processes --------------------------------------------------------------------------------------------------


def test_a_package_that_is_not_installed_is_named_and_the_other_loops_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "version_of", lambda package: None if package == "lightning" else "1.0")
    logged: list[str] = []
    report = bench(
        BenchPlan(models=["mnist"], contenders=["hand-written", "fabric", "lightning"], rounds=2, device="cpu"),
        logged.append,
        measure,
    )
    assert logged[0] == "not installed: lightning (pip install lightning)"
    assert report["missing"] == ["lightning"]
    [row] = report["models"][0]["rows"]
    assert row["rounds"] == [100.0, 100.0]


def test_a_loop_that_needs_a_second_package_is_left_out_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version_of", lambda package: None if package == "accelerate" else "1.0")
    logged: list[str] = []
    names = ["hand-written", "accelerate", "transformers"]
    report = bench(BenchPlan(models=["mnist"], contenders=names, rounds=1, device="cpu"), logged.append, measure)
    assert logged[0] == "not installed: accelerate (pip install accelerate)"
    assert (report["missing"], len(logged), len(report["models"][0]["rows"])) == (["accelerate"], 2, 1)


def test_an_error_is_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    error = "ImportError: pip install transformers[torch]"
    row = {"title": "HF", "package": "transformers", "version": "5", "error": error, "procs": 2}
    model = {"model": "mnist", "title": "small", "procs": 1, "rows": [row], "scaling": [row]}
    where = {"gpu": None, "cores": 2, "torch": "2", "python": "3"}
    cli.show_report({"machine": where, "rounds": 1, "models": [model]})
    assert capsys.readouterr().out.count(error) == 2


def test_a_loop_that_fails_is_not_repeated_and_the_others_are_measured() -> None:
    def run(jobs: Sequence[BenchJob]) -> dict[str, object]:
        return {"error": "ValueError: no"} if jobs[0].contender == "paceline" else measure(jobs)

    logged: list[str] = []
    plan = BenchPlan(models=["mnist"], contenders=["hand-written", "paceline"], rounds=2, device="cpu")
    rows = bench(plan, logged.append, run)["models"][0]["rows"]
    assert [row["error"] for row in rows] == ["", "ValueError: no"]
    assert len([line for line in logged if "ValueError: no" in line]) == 1


def test_if_nothing_can_be_measured_the_errors_are_reported() -> None:
    plan = BenchPlan(models=["mnist"], contenders=["paceline"], device="cpu")
    with pytest.raises(PacelineError, match=r"all measurements failed\nPaceline, 1 process: OSError: gone"):
        bench(plan, print, lambda jobs: {"error": "OSError: gone"})


def test_the_error_of_the_first_failing_rank_is_returned_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import json, sys, time, pathlib\n"
        "job = json.loads(sys.argv[-1])\n"
        "if job['rank'] == 0: time.sleep(60)\n"
        "pathlib.Path(job['folder'], 'outcome-1.json').write_text('{\"error\": \"ValueError: rank 1\"}')\n"
        "sys.exit(1)\n"
    )
    (tmp_path / "fake").write_text(f"#!{sys.executable}\n{script}")
    (tmp_path / "fake").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "fake"))
    fields = {"procs": 2, "device": "cpu", "threads": 1, "workers": 0, "steps": 5, "window": 1, "parent": 1}
    jobs = [
        BenchJob(contender="hand-written", model="mnist", rank=rank, folder=str(tmp_path), **fields)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert run_jobs(jobs) == {"error": "ValueError: rank 1"}
