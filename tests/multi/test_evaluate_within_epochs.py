"""`evaluate`: evaluations within epochs and in some epochs only, and what depends on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from faults import events, outcome, saved_steps, start
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline import Callback, Run
from paceline.errors import ConfigError

WITHIN: dict[str, Any] = {"evaluate": {"every_steps": 3}, "schedule": "constant"}  # an epoch has seven steps
STEPS = [3, 6, 7, 9, 12, 14, 15, 18, 21]


class Rows(Callback):
    """Writes the rows that it gets."""

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.is_main:
            with (run.folder / "rows.jsonl").open("a") as file:
                file.write(json.dumps(metrics) + "\n")

    @staticmethod
    def of(folder: str = "run") -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(folder, "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start(schedule="constant", run_dir=str(tmp_path_factory.mktemp("plain") / "run"))


def test_evaluations_within_epochs_change_no_weights_and_are_shown_everywhere(plain: Any) -> None:
    result = start(**WITHIN, callbacks=[Rows()], procs=2)
    assert result.weights_sha256 == plain.weights_sha256
    assert result.history == plain.history
    assert [event["step"] for event in events("evaluation")] == [step for step in STEPS if step % 7]
    assert [row["step"] for row in Rows.of()] == STEPS
    assert all({"epoch", "train_loss", "val_loss", "accuracy"} <= row.keys() for row in Rows.of())
    board = EventAccumulator("run/tensorboard").Reload()
    assert [scalar.step for scalar in board.Scalars("val_loss")] == STEPS


def test_epochs_without_an_evaluation_have_the_training_loss_alone(plain: Any) -> None:
    result = start(evaluate={"every_epochs": 2}, schedule="constant", callbacks=[Rows()])
    assert result.weights_sha256 == plain.weights_sha256
    assert [set(row) for row in result.history] == [
        {"epoch", "step", "train_loss"}, *[{"epoch", "step", "train_loss", "val_loss", "accuracy"}] * 2,
    ]  # fmt: skip
    assert Rows.of() == result.history[1:]
    assert result.metrics == {name: plain.metrics[name] for name in ("val_loss", "accuracy")}


def test_the_batch_size_of_evaluations_is_their_own(plain: Any) -> None:
    result = start(evaluate={"batch_size": 61}, schedule="constant")
    assert result.weights_sha256 == plain.weights_sha256
    assert result.metrics["accuracy"] == plain.metrics["accuracy"]


def test_the_best_checkpoint_may_be_of_an_evaluation_within_an_epoch() -> None:
    lr = {"name": "sgd", "lr": 1.0}  # at which the loss goes up and down
    start(evaluate={"every_steps": 1}, optimizer=lr, callbacks=[Rows()], checkpoint={"keep": 1, "best": {}})
    best = min(Rows.of(), key=lambda row: row["val_loss"])["step"]
    assert best % 7  # else this test has gone blind
    assert saved_steps() == sorted({best, 21})
    manifest = json.loads(Path(f"run/checkpoints/step-{best:08d}/manifest.json").read_text())
    assert manifest["metrics"].keys() == {"train_loss", "val_loss", "accuracy"}


@pytest.mark.parametrize("step", [8, 9, 10])
def test_a_run_resumes_between_evaluations(step: int) -> None:
    keys = {**WITHIN, "schedule": {"name": "plateau", "patience": 1, "factor": 0.5, "min_delta": 0.3}}
    whole = start(**keys, checkpoint={"every_steps": 1, "keep": 30, "async": False})
    resumed = start(**keys, procs=2, run_dir="other", resume=f"run/checkpoints/step-{step:08d}")
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.history == whole.history
    fields = ("step", "train_loss", "val_loss", "accuracy")
    assert [[event[name] for name in fields] for event in events("evaluation", "other")] == [
        [event[name] for name in fields] for event in events("evaluation") if event["step"] > step
    ]


class StopInEvaluation(Callback):
    """Asks for a stop, which the ranks agree on in the step that ends with an evaluation."""

    needs_step_metrics = False

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == 8:
            run.stop("a test")


def test_an_evaluation_that_a_stop_prevents_follows_when_the_run_resumes() -> None:
    from paceline.errors import Stopped

    whole = start(**WITHIN, run_dir="whole")
    with pytest.raises(Stopped):
        start(**WITHIN, callbacks=[StopInEvaluation()])
    assert [event["step"] for event in events("evaluation")] == [3, 6]
    resumed = start(**WITHIN, resume="auto", procs=2)
    assert outcome(resumed) == outcome(whole)
    assert [event["step"] for event in events("evaluation")] == [step for step in STEPS if step % 7]


def test_evaluations_need_validation_data() -> None:
    with pytest.raises(ConfigError, match=r"evaluate.every_steps=3 needs validation data; set val_dataset_fn"):
        start(**WITHIN, val_dataset_fn=None, val_fraction=0)


# --- runs that end within an epoch --------------------------------------------------------------------------


class Count(Callback):
    """Counts the evaluations, and writes the number of each into a file."""

    def __init__(self) -> None:
        self.number = 0

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self.number += 1
        if run.is_main:
            with (run.folder / "counts").open("a") as file:
                file.write(f"{run.step_number}: {self.number}\n")

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def counts(folder: str) -> list[str]:
    return Path(folder, "counts").read_text().splitlines()


@pytest.mark.parametrize(
    ("cut_at", "evaluate", "extra"),
    [
        (10, {}, ["10: 2"]),  # a longer run does not evaluate there
        (9, {"every_steps": 3}, []),  # a longer run does
        (7, {"every_epochs": 2}, ["7: 1"]),
    ],
)
def test_an_extended_run_has_the_evaluations_of_an_uninterrupted_one(
    cut_at: int, evaluate: dict[str, int], extra: list[str]
) -> None:
    keys = {
        "schedule": {"name": "plateau", "patience": 1, "factor": 0.5, "min_delta": 0.3}, "evaluate": evaluate,
        "early_stop": {"patience": 2, "min_delta": 0.3}, "checkpoint": {"best": {}}, "num_epochs": 7,
    }  # fmt: skip
    whole = start(**keys, callbacks=[Count()], run_dir="whole")
    assert whole.step < 49  # it was ended early, else this test has gone blind
    start(**keys, callbacks=[Count()], max_steps=cut_at)
    longer = start(**keys, callbacks=[Count()], resume="auto", procs=2)
    assert (longer.weights_sha256, longer.step) == (whole.weights_sha256, whole.step)
    assert [row["step"] for row in longer.history] == [row["step"] for row in whole.history]
    found = counts("run")
    assert [line for line in found if line not in extra] == counts("whole")
    assert len(found) == len(counts("whole")) + len(extra)


class FinishInEvaluation(Callback):
    """Asks for the end of the run in the evaluation after step 9, on one rank."""

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == 9 and run.rank == run.world_size - 1:
            run.finish("enough")


def test_a_run_that_an_evaluation_within_an_epoch_ends_has_its_row() -> None:
    result = start(**WITHIN, callbacks=[FinishInEvaluation(), Rows()], procs=2)
    assert [row["step"] for row in result.history] == [7, 9]
    assert result.history[-1] == Rows.of()[-1]
    assert [row["step"] for row in Rows.of()] == [3, 6, 7, 9]  # evaluated once
    assert result.metrics["accuracy"] == result.history[-1]["accuracy"]
    assert events("run_finished")[0]["reason"] == "enough"
    source = "run/checkpoints/step-00000009"
    longer, whole = start(**WITHIN, run_dir="longer", resume=source), start(**WITHIN, run_dir="whole")
    assert outcome(longer)["history"] == outcome(whole)["history"]
    assert longer.weights_sha256 == whole.weights_sha256
