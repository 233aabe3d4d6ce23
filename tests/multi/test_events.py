"""The events of real runs: as docs/events.md lists them, and the same numbers in a report."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exactness_cases import Images, conv_net
from faults import Disturbed, events, send, send_self, start, stop_step

from paceline.observe.events import read
from paceline.run.layout import RunFolder
from paceline.tools.report.facts import facts_of

DOCS = Path(__file__).parents[2] / "docs" / "events.md"
OPTIONAL = {"warning": {"step"}, "step": {"values"}, "run_finished": {"reason"}}


def documented_fields() -> dict[str, set[str]]:
    parts = re.findall(r"^### `(\w+)`\n(.*?)```json", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {kind: {"event", "time", *re.findall(r"^\| `(\w+)`", body, re.MULTILINE)} for kind, body in parts}


def test_a_run_that_was_stopped_and_had_a_failure_writes_what_is_documented_and_has_a_report() -> None:
    log, saves = Path("fetched").resolve(), {"every_steps": 5}
    dies = {"dataset_fn": lambda: Disturbed(log, [1], send_self(signal.SIGKILL)), "max_restarts": 1}
    stopped_at = stop_step(procs=2, checkpoint=saves, time_limit=0.001)  # over before the first step is done
    result = start(procs=2, checkpoint=saves, resume="auto", log={"every_steps": 2, "digests": True}, **dies)

    seen, documented = list(read(Path("run/events.jsonl"))), documented_fields()
    often = {
        "run_started",
        "resumed",
        "restarted",
        "step",
        "pace",
        "epoch",
        "saving",
        "checkpoint",
        "digests",
        "run_stopped",
    }
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
    assert len(facts.attempts) == 3
    assert facts.attempts[1].step == stopped_at
    assert [mark.kind for mark in facts.marks if mark.kind in ("stopped", "restarted", "finished")] == [
        "stopped",
        "restarted",
        "finished",
    ]


class Interrupted(Disturbed):
    """Slow, with a rank that is killed in the third epoch; the seventh epoch is asked to stop."""

    def __init__(self, log: Path, launcher: int) -> None:
        super().__init__(log, [3, 7], self.interrupt)
        self.launcher = launcher

    def interrupt(self) -> None:
        (send_self(signal.SIGKILL) if self.log.stat().st_size == 3 else send(signal.SIGTERM, self.launcher))()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.001)
        return super().__getitem__(index)


def test_the_records_of_a_run_do_not_depend_on_its_speed_its_ranks_or_its_interruptions() -> None:
    """Over 200 steps, from which on a record stands for several, with checkpoints between two records."""
    short = {
        "model_fn": lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 10)), "precision": "fp32",
        "batch_size": 1, "lanes": 2, "num_epochs": 8, "clip_norm": 0.5, "log": {}, "val_dataset_fn": None,
        "val_fraction": 0,
    }  # fmt: skip
    fast = start(**short, run_dir="fast")
    log, launcher = Path("fetched").resolve(), os.getpid()
    broken = {"dataset_fn": lambda: Interrupted(log, launcher), "max_restarts": 1, "checkpoint": {"every_steps": 7}}
    stopped_at = stop_step(**short, **broken, procs=2)
    slow = start(**short, procs=1, resume="auto")
    assert slow.weights_sha256 == fast.weights_sha256
    fields = ("step", "steps", "epoch", "epochs", "loss", "lr", "grad_norm")
    of_fast, of_slow = (
        [[event[name] for name in fields] for event in events("step", run.run_dir)] for run in (fast, slow)
    )
    assert len(events("restarted")) == 1
    assert 0 < stopped_at < fast.step
    assert 200 < len(of_fast) < fast.step
    assert of_fast == of_slow


class SlowOnRank1(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02 if dist.get_rank() == 1 else 0)
        return super().__getitem__(index)


def slow_on_rank_0() -> torch.nn.Module:
    """With BatchNorm, so that the other rank waits at the beginning of its forward, too."""
    model = conv_net()
    model.register_forward_pre_hook(lambda *_: time.sleep(0.06 if dist.get_rank() == 0 and model.training else 0))
    return model


@pytest.mark.parametrize(
    ("slow", "rank", "phase"),
    [
        ({"dataset_fn": lambda: SlowOnRank1(84)}, 1, "data"),
        ({"dataset_fn": lambda: Images(84), "model_fn": slow_on_rank_0}, 0, "forward"),
    ],
)
def test_the_rank_that_holds_the_others_back_is_reported_with_its_phase(slow: dict, rank: int, phase: str) -> None:
    start(**slow, procs=2, lanes=2, num_epochs=8, val_dataset_fn=None, val_fraction=0)
    [late] = events("straggler")
    assert (late["rank"], late["phase"]) == (rank, phase)
    assert late["behind_ms"] > 50
    paces = events("pace")
    for pace in paces:  # the phases are all there is
        for of_rank, total in enumerate(pace["step_ms"]):
            parts = sum(times[of_rank] for times in pace["phase_ms"].values())
            assert parts == pytest.approx(total, rel=0.01, abs=0.05)

    def usual(phase: str, rank: int) -> float:
        return statistics.median(pace["phase_ms"][phase][rank] for pace in paces)

    assert usual(phase, rank) > 50 > usual(phase, 1 - rank)
    assert usual("reduction", 1 - rank) > 50 > usual("reduction", rank)
