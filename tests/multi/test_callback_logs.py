"""What callbacks log, and what they ask for: on which step it is recorded, and that all ranks know it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import Images, conv_net
from faults import events, start
from torch.nn import functional

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
