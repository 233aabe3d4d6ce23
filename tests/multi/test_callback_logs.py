"""What callbacks log, and what they ask for: on which step it is recorded, and that all ranks know it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import Images, conv_net
from faults import events, outcome, start
from torch.nn import functional

import paceline
from paceline import Callback, Run, Trainer
from paceline.errors import Stopped


class LogEverywhere(Callback):
    """Logs the step under the name of each method that is called."""

    def on_start(self, run: Run) -> None:
        run.log(start=run.step_number)

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        run.log(step_of_run=run.step_number)

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        run.log(evaluate=run.step_number)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        run.log(checkpoint=run.step_number)

    def on_stop(self, run: Run, reason: str | None) -> None:
        run.log(stop=run.step_number)


def logged(name: str, run_dir: str = "run") -> list[int]:
    """The steps at which a name was logged, each of which must be its value."""
    found = [(event["step"], event["values"][name]) for event in events("logged", run_dir) if name in event["values"]]
    assert all(step == value for step, value in found)
    return [step for step, _ in found]


def own_loop(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Run) -> str | None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x), y))
            run.step(optimizer)
    return run.finish_requested


OWN: dict[str, Any] = {
    "model_fn": conv_net, "dataset_fn": Images, "train_fn": own_loop, "batch_size": 5, "lanes": 4, "num_epochs": 2,
    "threads": 1, "device": "cpu", "run_dir": "run", "procs": 2,
}  # fmt: skip


@pytest.mark.parametrize(("train", "per_epoch"), [(start, 7), (lambda **keys: Trainer(**{**OWN, **keys}).start(), 4)])
def test_what_a_callback_logs_has_the_step_at_which_it_was_called(train: Any, per_epoch: int) -> None:
    train(callbacks=[LogEverywhere()], procs=2, num_epochs=2, checkpoint={"every_steps": 3, "async": False})
    last = 2 * per_epoch
    assert logged("start") == [0]
    assert logged("step_of_run") == list(range(1, last + 1))
    assert logged("evaluate") == [per_epoch, last]
    assert logged("stop") == [last]
    assert logged("checkpoint")[-1] == last


# --- what all ranks know ------------------------------------------------------------------------------------


class Witness(Callback):
    """Acts on rank 1 after step 3, and writes what each rank sees of it afterwards."""

    needs_step_metrics = False

    def __init__(self, what: str) -> None:
        self.what = what

    def _write(self, run: Run, name: str) -> None:
        with (run.folder / f"seen-{run.rank}").open("a") as file:
            file.write(f"{name} {run.step_number} {run.stop_requested} {run.finish_requested}\n")

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self._write(run, "step")
        if run.rank == 1 and run.step_number == 3:
            if self.what == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                getattr(run, self.what)("enough of it")
            self._write(run, "asked")

    def on_evaluate(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        self._write(run, "evaluate")

    def on_stop(self, run: Run, reason: str | None) -> None:
        self._write(run, f"stop {reason}")


def seen(rank: int) -> list[str]:
    return [line for line in Path(f"run/seen-{rank}").read_text().splitlines() if not line.startswith("asked")]


@pytest.mark.parametrize(("what", "text"), [("stop", "enough of it"), ("signal", "SIGTERM")])
def test_all_ranks_see_why_the_run_stops_and_none_before_the_others(what: str, text: str) -> None:
    with pytest.raises(Stopped, match=f"stopped by {text} at step 4"):
        start(callbacks=[Witness(what)], procs=2)
    steps = [f"step {step} None None" for step in range(1, 5)]
    assert seen(0) == seen(1) == [*steps, f"stop {text} 4 {text} None"]
    assert "asked 3 None None" in Path("run/seen-1").read_text()


def test_all_ranks_of_an_own_loop_see_why_the_run_is_finished() -> None:
    result = Trainer(**OWN, callbacks=[Witness("finish")]).start()
    assert result.value == "enough of it"
    assert seen(0) == seen(1)
    assert seen(0)[-1] == "stop None 4 None enough of it"
    assert events("run_finished")[0]["reason"] == "enough of it"


def test_functions_of_the_managed_loop_know_the_run() -> None:
    def step(model: Any, batch: Any) -> dict[str, Any]:
        return {"loss": functional.cross_entropy(model(batch[0]), batch[1]), "at": float(number())}

    def evaluate(model: Any, batch: Any) -> dict[str, float]:
        return {"at": float(number())}

    def number() -> int:
        return paceline.current_run().step_number

    functions = {"step_fn": step, "evaluate_fn": evaluate, "loss_fn": None, "metrics": []}
    result = start(**functions, procs=2, num_epochs=2, log={"every_steps": 1})
    assert [row["at"] for row in result.history] == [7, 14]
    assert [event["values"]["at"] for event in events("step")] == list(range(14))
    with pytest.raises(paceline.errors.ConfigError, match="works only while a rank trains"):
        number()


# --- what a checkpoint keeps --------------------------------------------------------------------------------


class FreezeAndStop(Callback):
    """Freezes a part of the model after step 3, and stops a run on one rank two steps later."""

    needs_step_metrics = False

    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        if run.step_number == 3:
            run.freeze("0")
        if run.step_number == 5 and run.world_size == 1:
            run.stop("a test")


def test_parameters_that_a_callback_has_frozen_stay_frozen_in_a_resumed_run() -> None:
    whole = start(callbacks=[FreezeAndStop()], procs=2, run_dir="whole")
    with pytest.raises(Stopped):
        start(callbacks=[FreezeAndStop()], procs=1)
    assert outcome(start(callbacks=[FreezeAndStop()], procs=2, resume="auto")) == outcome(whole)
