"""`paceline tune` with real runs on two ranks: pruned, killed, side by side, and after the search was killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

optuna = pytest.importorskip("optuna")

from paceline.config import build, override, read_yaml  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.tools.tune.space import parse  # noqa: E402
from paceline.tools.tune.tune import TunePlan, tune  # noqa: E402
from support.runs import events_of  # noqa: E402

PACELINE = str(Path(sys.executable).parent / "paceline")
STUDY = Path("runs/lab-tune")
RANGE = "optimizer.lr=log:1e-3:1e-1"


@pytest.fixture(autouse=True)
def lab(tmp_path: Path) -> Path:
    """A config with its module, in the working folder. Its data is slow while a file `slow` exists."""
    sys.modules.pop("lab_tune", None)  # of the test before
    (tmp_path / "lab_tune.py").write_text(
        textwrap.dedent("""
        import os, signal, time
        from pathlib import Path
        import torch
        from torch import nn

        SLOW = Path(__file__).with_name("slow")

        class Points(torch.utils.data.Dataset):
            def __init__(self):
                self.x = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
            def __len__(self):
                return 80
            def __getitem__(self, index):
                if SLOW.exists():
                    time.sleep(0.3)
                return self.x[index], (self.x[index].sum() > 0).long()

        def get_model(killed_rank=None):
            if killed_rank == int(os.environ["RANK"]):
                os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when there is no memory left
            return nn.Linear(3, 2)
        """)
    )
    (tmp_path / "config.yaml").write_text(
        textwrap.dedent("""
        name: lab
        model_fn: "lab_tune:get_model"
        dataset_fn: "lab_tune:Points"
        loss_fn: cross_entropy
        batch_size: 4
        num_epochs: 2
        procs: 2
        log: {tensorboard: false}
        """)
    )
    return tmp_path


def events(number: int, kind: str) -> list[dict]:
    return events_of(STUDY / f"trial-{number:04}", kind)


def table() -> list[dict[str, str]]:
    return list(csv.DictReader((STUDY / "trials.csv").read_text().splitlines()))


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_trials_side_by_side_with_one_killed_give_the_best_config(run, lab: Path) -> None:
    ended = run(
        "paceline", "tune", "config.yaml", "--parallel", "2", "--trials", "3", "--sampler", "random", "--seed", "1",
        RANGE, "model_args.killed_rank=null", "model_args.killed_rank=1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = table()
    assert sorted(row["state"] for row in rows) == ["done", "done", "failed"]
    for row in rows:
        is_killed = row["model_args.killed_rank"] == "1"
        assert row["state"] == ("failed" if is_killed else "done")
        assert ("SIGKILL" in row["reason"]) == is_killed
        written = yaml.safe_load(Path(row["run_dir"], "config.yaml").read_text())
        assert written["optimizer"]["lr"] == float(row["optimizer.lr"])
        if not is_killed:
            result = json.loads(Path(row["run_dir"], "result.json").read_text())
            assert result["world_size"] == 2
            assert result["metrics"]["val_loss"] == float(row["val_loss"])
    best = min((row for row in rows if row["val_loss"]), key=lambda row: float(row["val_loss"]))
    assert f"best: trial {best['trial']}, val_loss" in ended.stdout
    config = build(read_yaml(STUDY / "best.yaml"), folder=STUDY)  # found from another folder
    assert config.optimizer.lr == float(best["optimizer.lr"])
    assert config.folder == lab
    assert config.run_dir is None


def search_here(lab: Path, *words: str, **options: Any) -> list[str]:
    """Search in this process; returns the logged lines."""
    space, fixed = parse(words)
    raw = read_yaml(lab / "config.yaml")
    override(raw, fixed)
    logged: list[str] = []
    tune(TunePlan(raw, lab, space, **options), log=logged.append, show_status=lambda text: None)
    return logged


def test_a_pruned_trial_ends_on_both_ranks_at_one_step(lab: Path) -> None:
    prune_all = optuna.pruners.ThresholdPruner(upper=0.0)
    before = psutil.Process().children(recursive=True)  # a fork server, if an earlier test has left one
    with pytest.raises(PacelineError, match="no trial finished"):
        search_here(lab, RANGE, "num_epochs=100000", trials=1, pruner=prune_all)
    assert [row["state"] for row in table()] == ["pruned"]
    [stopped] = events(0, "run_stopped")
    assert stopped["reason"] == "SIGTERM"
    assert stopped["is_saved"]  # both ranks save at the same step
    assert psutil.Process().children(recursive=True) == before


def test_a_killed_search_is_resumed_with_its_trial_and_keeps_the_total(lab: Path) -> None:
    words = (RANGE, "checkpoint.every_steps=1")
    (lab / "slow").touch()
    with subprocess.Popen([PACELINE, "tune", "config.yaml", "--trials", "2", *words], stderr=subprocess.PIPE) as search:
        log = STUDY / "trial-0000" / "events.jsonl"
        wait_for(lambda: log.exists() and events(0, "checkpoint"), "no checkpoint")
        family = psutil.Process(search.pid).children(recursive=True)
        assert len(family) >= 4  # a trial process, its fork server, two ranks
        os.kill(search.pid, signal.SIGKILL)
    wait_for(lambda: not any(each.is_running() for each in family), "processes outlive the search")
    assert not (STUDY / "trial-0000" / "result.json").exists()  # else they have finished without it
    before = yaml.safe_load((STUDY / "trial-0000.yaml").read_text())
    (lab / "slow").unlink()
    search_here(lab, *words, trials=2)
    assert [(row["trial"], row["state"], row["epochs"]) for row in table()] == [("0", "done", "2"), ("1", "done", "2")]
    assert events(0, "resumed")[0]["step"] > 0
    assert yaml.safe_load((STUDY / "trial-0000.yaml").read_text()) == before
