"""The events of real runs: as docs/events.md lists them, and the same numbers in a report."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from exactness_cases import Images, conv_net
from faults import Disturbed, events, send_self, start, stop_step

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
def test_the_rank_that_holds_the_others_back_is_told_with_its_phase(slow: dict, rank: int, phase: str) -> None:
    start(**slow, procs=2, lanes=2, num_epochs=8, val_dataset_fn=None, val_fraction=0)
    [late] = events("straggler")
    assert (late["rank"], late["phase"]) == (rank, phase)
    assert late["behind_ms"] > 50
    steps = events("step")
    for step in steps:  # the phases are all there is
        for of_rank, total in enumerate(step["step_ms"]):
            parts = sum(times[of_rank] for times in step["phase_ms"].values())
            assert parts == pytest.approx(total, rel=0.01, abs=0.05)
    usual = steps[len(steps) // 2]["phase_ms"]
    assert usual[phase][rank] > 50 > usual[phase][1 - rank]
    assert usual["reduction"][1 - rank] > 50 > usual["reduction"][rank]
