"""`paceline plan` as people use it: a table, a page, JSON, and the plan in the report of the run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LAB = """import torch

def data(): return torch.utils.data.TensorDataset(torch.randn(200, 4), torch.arange(200) % 2)

def model(): return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 2))
"""
CONFIG = (
    "name: lab\nmodel_fn: 'planned_lab:model'\ndataset_fn: 'planned_lab:data'\nloss_fn: cross_entropy\nbatch_size: 8\n"
    "num_epochs: 2\ndevice: cpu\n"
)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "planned_lab.py").write_text(LAB)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_a_plan_of_two_ranks_per_host_is_compared_with_the_run(run, lab: Path) -> None:
    ended = run("paceline", "plan", "config.yaml", "--procs", "2", "--steps", "3", "--price", "2.5", "--deadline", "1h")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "2 × cpu measured" in lines[0]
    assert lines[2].split()[0] == "ranks"
    assert [line.split()[0] for line in lines[3:14]] == [
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
        "64",
        "128",
        "256",
        "512",
        "1,024",
    ]
    assert "→ the deadline is met with 1 rank" in ended.stdout
    assert (lab / "runs" / "lab" / "plan.json").exists()
    assert run("paceline", "train", "config.yaml", "--procs", "2").returncode == 0
    assert run("paceline", "report").returncode == 0
    assert '"planned":{"rows":[["step",' in (lab / "report.html").read_text()
    if CHROMIUM is not None:
        assert "efficiency" in shown_by_browser(lab / "plan.html", lab)
        page = shown_by_browser(lab / "report.html", lab)
        assert "actual, median" in page


def shown_by_browser(page: Path, folder: Path) -> str:
    """The HTML of a page after its scripts have run; fails on an error in the console."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000")
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={folder / 'browser'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    return done.stdout


def test_a_plan_as_json_has_the_wanted_ranks_and_what_it_was_computed_from(run, lab: Path) -> None:
    ended = run("paceline", "plan", "config.yaml", "--ranks", "64,1", "--link", "1gbit,1ms", "--steps", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    assert [row["ranks"] for row in plan["rows"]] == [1, 64]
    assert plan["terms"]["link"] == {"bytes_per_s": 125e6, "latency_s": 1e-3}
    assert plan["rows"][1]["limit"] == "latency"
    assert sum(plan["rows"][1]["shares"].values()) == pytest.approx(1)
    measured = plan["measured"]
    assert sum(gradient["size"] for gradient in measured["gradients"]) == 4 * (4 * 64 + 64 + 64 + 64 + 64 * 2 + 2)
    assert measured["concurrent"] == 1
    assert measured["buffer_bytes"] == 4 * 128 + 8
    assert (plan["keys"]["samples"], plan["rows"][0]["steps"]) == (180, 46)


def test_what_cannot_be_planned_is_answered_at_once(run_here, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab)
    ended = run_here("paceline", "plan", "config.yaml", "lanes=4", "--ranks", "8")
    assert ended.returncode == 2
    assert "--ranks 8 but lanes=4" in ended.stderr
    own = run_here("paceline", "plan", "config.yaml", "train_fn=planned_lab:model")
    assert own.returncode == 2
    assert run_here("paceline", "plan", "config.yaml", "--link", "fast").returncode == 2
