"""Runs that end before their last step and are complete: by `early_stop`, and by a callback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import Images, conv_net
from faults import events, outcome, saved_steps, start
from torch.nn import functional

from paceline import Callback, Run, Trainer
from paceline.errors import ConfigError

EARLY: dict[str, Any] = {
    "num_epochs": 12, "schedule": "constant", "early_stop": {"patience": 2, "min_delta": 0.5},
    "checkpoint": {"every_steps": 1, "keep": 100, "async": False},
}  # fmt: skip


class FinishAt(Callback):
    """Asks for the end of the run after a step, as one rank or as all of them."""

    needs_step_metrics = False

    def __init__(self, step: int, rank: int | None = None) -> None:
        self.step, self.rank = step, rank

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == self.step and self.rank in (None, run.rank):
            run.finish("enough")


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(**EARLY, run_dir=str(tmp_path_factory.mktemp("early") / "run"))


def test_a_run_that_no_longer_improves_ends_complete_and_says_why(early: Any) -> None:
    assert 1 < len(early.history) < 12
    assert early.step == early.history[-1]["step"]
    assert early.metrics["val_loss"] == early.history[-1]["val_loss"]
    [finished] = events("run_finished", early.run_dir)
    best = min(row["val_loss"] for row in early.history[:-2])
    assert finished["reason"] == f"val_loss has not improved in 2 evaluations; the best value is {best:.6g}"
    assert events("run_stopped", early.run_dir) == []


@pytest.mark.parametrize(("procs", "back"), [(2, 1), (4, 9)])
def test_a_resized_run_ends_early_at_the_same_step(early: Any, procs: int, back: int) -> None:
    step = early.step - back
    source = early.run_dir / f"checkpoints/step-{step:08d}"
    resumed = start(**EARLY, resume=str(source), procs=procs)
    assert resumed.weights_sha256 == early.weights_sha256
    assert resumed.history == early.history


@pytest.mark.parametrize("has_result", [True, False])
def test_a_run_that_has_ended_early_is_not_trained_on(has_result: bool) -> None:
    """Also if it was killed after its last checkpoint and before its result was written."""
    early = start(**EARLY)
    if not has_result:
        Path("run/result.json").unlink()
    again = start(**EARLY, resume="auto", procs=2)
    assert outcome(again) == outcome(early)
    assert events("run_finished")[-1]["reason"] == events("run_finished")[0]["reason"]


def test_a_new_run_may_continue_where_another_has_ended_early() -> None:
    early = start(**EARLY)
    longer = start(
        **{**EARLY, "early_stop": {"patience": 4, "min_delta": 0.5}}, run_dir="longer",
        resume=f"run/checkpoints/step-{saved_steps()[-1]:08d}",
    )  # fmt: skip
    assert len(longer.history) == len(early.history) + 2


@pytest.mark.parametrize("callback", [FinishAt(9), FinishAt(9, rank=1)], ids=["all ranks", "one rank"])
def test_a_callback_ends_the_run_in_the_middle_of_an_epoch(callback: Callback) -> None:
    result = start(callbacks=[callback], procs=2)
    assert result.step == 10  # the ranks agree on it in the next step
    assert [row["step"] for row in result.history] == [7, 10]
    assert result.metrics["accuracy"] == result.history[-1]["accuracy"]
    assert saved_steps()[-1] == 10
    [finished] = events("run_finished")
    assert finished["reason"] == "enough"
    assert json.loads(Path("run/result.json").read_text())["step"] == 10


def test_a_callback_that_ends_the_run_at_its_last_step_changes_nothing() -> None:
    result = start(callbacks=[FinishAt(20)])
    assert result.step == 21
    assert "reason" not in events("run_finished")[0]


def test_early_stopping_needs_something_to_watch() -> None:
    with pytest.raises(ConfigError, match="early_stop needs validation data"):
        start(early_stop={}, val_dataset_fn=None, val_fraction=0)
    with pytest.raises(ConfigError, match=r"early_stop.metric='f1' is not measured; use val_loss, train_loss"):
        start(early_stop={"metric": "f1"}, metrics=[])
    assert start(early_stop={"metric": "train_loss"}, val_dataset_fn=None, val_fraction=0, run_dir="b").step == 21


# --- the user's own loop ------------------------------------------------------------------------------------


def own_loop(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Run) -> list[int]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.track(optimizer=optimizer)
    for epoch in run.epochs(num_epochs):
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x), y))
            run.step(optimizer)
        if epoch % 2 == 0:
            run.log(score=1 / (1 + epoch))
    return [row["step"] for row in run.history]


OWN: dict[str, Any] = {
    "model_fn": conv_net, "dataset_fn": Images, "train_fn": own_loop, "batch_size": 5, "lanes": 4, "num_epochs": 9,
    "threads": 1, "device": "cpu",
}  # fmt: skip


def test_an_own_loop_has_no_further_epochs_when_its_metric_no_longer_improves() -> None:
    keys = {**OWN, "early_stop": {"metric": "score", "mode": "min", "patience": 2, "min_delta": 0.4}}
    results = [Trainer(**keys, procs=procs, run_dir=f"run-{procs}").start() for procs in (1, 2)]
    assert [result.value for result in results] == [[4, 8, 12, 16, 20, 24, 28]] * 2  # 1, 1/3, 1/5, 1/7
    assert results[0].weights_sha256 == results[1].weights_sha256
    again = Trainer(**keys, procs=2, run_dir="run-1", resume="auto").start()
    assert (again.value, again.weights_sha256) == (results[0].value, results[0].weights_sha256)
    assert events("run_finished", "run-1")[-1]["reason"].startswith("score has not improved in 2 evaluations")


def test_the_loaders_of_an_own_loop_end_where_a_callback_ends_the_run() -> None:
    result = Trainer(**OWN, procs=2, run_dir="run", callbacks=[FinishAt(9)]).start()
    assert result.value == [4, 8, 10]
    assert result.step == 10
    assert result.history[-1]["score"] == 1 / 3
