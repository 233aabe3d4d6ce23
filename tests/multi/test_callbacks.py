"""Callbacks of the managed loop: called on every rank at the same step with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import ODD, FollowStudent, Guided, Images, conv_net
from torch.nn import functional

from paceline import Callback, Run, Trainer
from paceline.checkpoint.files import load
from paceline.errors import ConfigError, RankFailed, Stopped
from support.runs import events_of

OPTIONS: dict[str, Any] = {
    "model_fn": Guided, "dataset_fn": lambda: Images(ODD), "val_dataset_fn": lambda: Images(20), "lanes": 4,
    "loss_fn": functional.cross_entropy, "metrics": ["accuracy"], "batch_size": 5, "num_epochs": 2, "device": "cpu",
    "threads": 1,
}  # fmt: skip

DROPPING: dict[str, Any] = {**OPTIONS, "model_fn": conv_net}  # BatchNorm and dropout


class Recorder(Callback):
    """Appends what it is called with to a file of its rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _write(self, run: Run, *content: Any) -> None:
        with (self.folder / f"rank-{run.rank}").open("a") as file:
            file.write(json.dumps([*content, run.step_number, run.epoch]) + "\n")

    def on_start(self, run: Run) -> None:
        self._write(run, "start", run.world_size, run.total_steps, run.is_main == (run.rank == 0))

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self._write(run, "step", metrics)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self._write(run, "evaluate", metrics, run.history)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._write(run, "checkpoint", path.name, path.is_dir())

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._write(run, "stop", reason)


def calls(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]


def test_every_rank_is_called_with_the_same_numbers(tmp_path: Path) -> None:
    result = Trainer(**OPTIONS, callbacks=[Recorder(tmp_path)], procs=2, run_dir=tmp_path / "run").start()
    first, second = (calls(tmp_path, rank) for rank in (0, 1))
    assert first == second
    assert [call[0] for call in first] == [
        "start", *["step"] * 5, "evaluate", *["step"] * 5, "evaluate", "checkpoint", "stop",
    ]  # fmt: skip
    assert first[0] == ["start", 2, 10, True, 0, 0]
    rows = [call for call in first if call[0] == "evaluate"]
    assert [row[1] for row in rows] == result.history
    assert rows[-1][2] == result.history
    assert first[-2:] == [["checkpoint", "step-00000010", True, 10, 2], ["stop", None, 10, 2]]
    logged = [(event["loss"], event["lr"]) for event in events_of(tmp_path / "run", "step")]
    assert [(call[1]["loss"], call[1]["lr"]) for call in first if call[0] == "step"] == logged


class AskOnce(Callback):
    """Asks for something on one rank, at one step."""

    needs_step_metrics = False

    def __init__(self, rank: int, step: int, what: str) -> None:
        self.rank, self.step, self.what = rank, step, what

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        assert metrics == {}
        if run.rank == self.rank and run.step_number == self.step:
            run.stop("a good loss") if self.what == "stop" else run.save()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_that_one_rank_asks_for_stops_all_at_the_same_step(tmp_path: Path, rank: int) -> None:
    options = {**OPTIONS, "procs": 2, "run_dir": tmp_path / "run"}
    with pytest.raises(Stopped, match="stopped by a good loss at step 4; checkpoint saved"):
        Trainer(**options, callbacks=[AskOnce(rank, 3, "stop")]).start()
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    assert Trainer(**options, resume="auto").start().step == 10


def test_a_checkpoint_that_one_rank_asks_for_is_saved_by_all(tmp_path: Path) -> None:
    callbacks = [AskOnce(1, 3, "save"), Recorder(tmp_path)]
    Trainer(**OPTIONS, callbacks=callbacks, procs=2, run_dir=tmp_path / "run", checkpoint={"async": False}).start()
    saved = [call for call in calls(tmp_path, 0) if call[0] == "checkpoint"]
    assert [call[1] for call in saved] == ["step-00000004", "step-00000010"]
    assert calls(tmp_path, 0) == calls(tmp_path, 1)


def test_a_run_with_a_callback_resumes_on_other_ranks_to_the_same_bits(tmp_path: Path) -> None:
    whole = Trainer(**OPTIONS, callbacks=[FollowStudent()], procs=1, run_dir=tmp_path / "whole").start()
    options = {**OPTIONS, "run_dir": tmp_path / "parts"}
    with pytest.raises(Stopped):
        Trainer(**options, procs=2, callbacks=[FollowStudent(), AskOnce(0, 6, "stop")]).start()
    resumed = Trainer(**options, procs=4, resume="auto", callbacks=[FollowStudent(), AskOnce(0, 99, "stop")]).start()
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.history == whole.history


class Unshared(Callback):
    """Returns its own list, which changes while a checkpoint is written."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self.steps.append(run.step_number)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}


def test_a_checkpoint_holds_the_state_of_its_step(tmp_path: Path) -> None:
    options = {**OPTIONS, "num_epochs": 6, "checkpoint": {"every_steps": 5, "keep": 9}, "run_dir": tmp_path / "run"}
    Trainer(**options, callbacks=[Unshared], procs=1).start()
    for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*")):
        step = int(path.name.removeprefix("step-"))
        assert load(path).values["counters"]["callbacks"]["Unshared"]["steps"] == list(range(1, step + 1))
    assert "callbacks:\n- test_callbacks:Unshared\n" in (tmp_path / "run" / "config.yaml").read_text()


class Drift(Callback):
    """Changes the weights of one rank, after the last step alone."""

    needs_step_metrics = False

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == run.total_steps and run.rank == 1:
            with torch.no_grad():
                next(run.model.parameters()).add_(1.0)


def test_ranks_that_a_callback_makes_different_are_found_also_at_the_last_step(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ReplicasDiffer"):
        Trainer(**OPTIONS, callbacks=[Drift()], procs=2, max_restarts=0, run_dir=tmp_path / "run").start()


def test_what_is_no_callback_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="<Linear> is not a callback; derive its class from paceline"):
        Trainer(**OPTIONS, callbacks=[torch.nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="<Recorder> needs arguments"):
        Trainer(**OPTIONS, callbacks=[Recorder])
    with pytest.raises(ConfigError, match="callbacks needs a train_fn with the parameter run, or the managed loop"):
        Trainer(model_fn=Guided, dataset_fn=Images, train_fn=lambda *arguments: None, callbacks=[Callback()])


# --- what callbacks leave behind, and their errors -----------------------------------------------------------------


class Evaluating(Callback):
    """Leaves the model in evaluation mode, in which it has no dropout."""

    needs_step_metrics = False

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        run.model.eval()


def test_a_callback_does_not_leave_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    alone = Trainer(**DROPPING, run_dir=tmp_path / "alone").start()
    with_callback = Trainer(**DROPPING, callbacks=[Evaluating()], run_dir=tmp_path / "run").start()
    assert with_callback.weights_sha256 == alone.weights_sha256


class FrozenStatistics(Callback):
    """Keeps one layer in evaluation mode from the start of each attempt."""

    needs_step_metrics = False

    def on_start(self, run: Run) -> None:
        run.model.get_submodule("3").eval()


def test_a_mode_that_on_start_sets_lasts_through_evaluations_and_resumes(tmp_path: Path) -> None:
    keys = {**DROPPING, "callbacks": [FrozenStatistics()], "checkpoint": {"every_steps": 3, "keep": 30, "async": False}}
    whole = Trainer(**keys, run_dir=tmp_path / "whole").start()
    for step in (3, 6):  # before and after an evaluation
        checkpoint = tmp_path / f"whole/checkpoints/step-{step:08d}"
        resumed = Trainer(**keys, resume=checkpoint, run_dir=tmp_path / f"from-{step}", procs=2).start()
        assert resumed.weights_sha256 == whole.weights_sha256
    assert whole.weights_sha256 != Trainer(**DROPPING, run_dir=tmp_path / "free").start().weights_sha256


class Broken(Callback):
    """Raises an error in one method."""

    def __init__(self, method: str) -> None:
        self.method = method

    def _raise(self, method: str) -> None:
        if method == self.method:
            raise KeyError("missing")

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._raise("on_stop")

    def state_dict(self) -> dict[str, Any]:
        self._raise("state_dict")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._raise("load_state_dict")


def test_an_error_in_on_stop_does_not_lose_the_result(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"callback Broken\.on_stop.*\n.*KeyError"):
        Trainer(**OPTIONS, callbacks=[Broken("on_stop")], procs=2, max_restarts=0, run_dir=tmp_path / "run").start()
    whole = Trainer(**OPTIONS, run_dir=tmp_path / "whole").start()
    assert json.loads((tmp_path / "run/result.json").read_text())["weights_sha256"] == whole.weights_sha256
    assert events_of(tmp_path / "run", "run_finished")


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_an_error_of_a_callbacks_state_has_its_name(tmp_path: Path, method: str) -> None:
    Trainer(**OPTIONS, callbacks=[Broken("")], run_dir=tmp_path / "run").start()
    [*_, last] = sorted((tmp_path / "run/checkpoints").iterdir())
    resumed = Trainer(**OPTIONS, callbacks=[Broken(method)], resume=last, run_dir=tmp_path / "other")
    message = rf"the {method}\(\) of callback Broken raised KeyError: 'missing' \(.*\.py:\d+"
    with pytest.raises(ConfigError, match=message):
        resumed.start()


class LateLambda(Callback):
    """Has a state that no checkpoint can hold from the fifth step on."""

    def __init__(self, value: Any) -> None:
        self.value, self.state = value, {"value": 1}

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == 5:
            self.state = {"value": self.value}

    def state_dict(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize("value", [Path, Fraction(1, 2)])
def test_a_state_that_cannot_be_kept_later_is_one_sentence(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(
            **OPTIONS, callbacks=[LateLambda(value)], checkpoint={"every_steps": 3}, run_dir=tmp_path / "run"
        ).start()
    [problem] = caught.value.problems
    assert problem.startswith("the state_dict() of callback LateLambda cannot be in a checkpoint (")
    assert problem.endswith("); use numbers, strings, tensors, and lists and dicts of them")
    assert problem.isprintable()


@dataclass
class Keeping(Callback):
    """Draws a random number with each step; two of them are equal, and their comparison is not a single truth value."""

    folder: Path
    kept: torch.Tensor

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        with (self.folder / "drawn").open("a") as file:
            file.write(f"{torch.rand(()).item()}\n")


def test_equal_callbacks_draw_numbers_of_their_own(tmp_path: Path) -> None:
    callbacks = [Keeping(tmp_path, torch.zeros(2)), Keeping(tmp_path, torch.zeros(2))]
    Trainer(**OPTIONS, callbacks=callbacks, run_dir=tmp_path / "run").start()
    drawn = (tmp_path / "drawn").read_text().splitlines()
    assert len(set(drawn)) == len(drawn)
