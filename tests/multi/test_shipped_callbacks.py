"""The callbacks that we ship, in runs: one hash on 1, 2 and 4 ranks and through resume, and what they log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import Images, Jitter, Taught, conv_net
from faults import events, saved_steps, start
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional

from paceline import Callback, GradualUnfreeze, ImageLogger, LearningRateMonitor, MeanTeacher, Run, Trainer
from paceline.errors import ConfigError, RankFailed

FORMS: dict[str, dict[str, Any]] = {
    "teacher": {"model_fn": Taught, "callbacks": [MeanTeacher(decay=0.8)], "ema": None, "precision": "fp32"},
    "unfreezing": {"callbacks": [GradualUnfreeze("1", "0", every_epochs=1)], "clip_norm": 0.5},
    "both, and random numbers": {
        "model_fn": Taught, "precision": "fp32", "shard_optimizer": True,
        "callbacks": [MeanTeacher(decay=0.8), GradualUnfreeze("student.1", "student.0", every_steps=5), Jitter()],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_one_hash_on_any_number_of_ranks_and_through_a_resize(form: str) -> None:
    keys = FORMS[form]
    whole = start(**keys, checkpoint={"every_steps": 3, "keep": 20, "async": False})
    for procs in (2, 4):
        other = start(**keys, procs=procs, run_dir=f"run-{procs}")
        assert other.weights_sha256 == whole.weights_sha256
        assert other.optimizer_sha256 == whole.optimizer_sha256
        assert other.history == whole.history
    for step, procs in ((6, 2), (9, 4), (15, 2)):
        assert step in saved_steps()
        source = f"run/checkpoints/step-{step:08d}"
        resumed = start(**keys, procs=procs, run_dir=f"from-{step}", resume=source)
        assert resumed.weights_sha256 == whole.weights_sha256
        assert resumed.optimizer_sha256 == whole.optimizer_sha256


def own_loop(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int, run: Run) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x), y))
            run.step(optimizer)


@pytest.mark.parametrize("model", [conv_net, Taught])
def test_an_own_loop_takes_the_same_callbacks(model: Any) -> None:
    parts = ("1", "0") if model is conv_net else ("student.1", "student.0")
    teacher = [MeanTeacher(decay=0.8)] if model is Taught else []
    keys = {
        "model_fn": model, "dataset_fn": Images, "train_fn": own_loop, "batch_size": 5, "lanes": 4, "num_epochs": 3,
        "threads": 1, "device": "cpu", "callbacks": [*teacher, GradualUnfreeze(*parts, every_epochs=1), Jitter()],
    }  # fmt: skip
    saves = {"every_steps": 1, "keep": 20, "async": False}
    first, second, third = (
        Trainer(**keys, procs=procs, run_dir=f"run-{procs}", checkpoint=saves).start() for procs in (1, 2, 4)
    )
    assert first.weights_sha256 == second.weights_sha256 == third.weights_sha256
    for step in (3, 4, 6):
        source = f"run-1/checkpoints/step-{step:08d}"
        resumed = Trainer(**keys, procs=2, run_dir=f"from-{step}", resume=source).start()
        assert resumed.weights_sha256 == first.weights_sha256


def test_frozen_parameters_stay_as_they_are_and_train_later() -> None:
    """Seven steps an epoch: `1` trains from step 8 on, `0` from step 15 on, the rest from the start."""
    start(
        callbacks=[GradualUnfreeze("1", "0", every_epochs=1)], ema=None, optimizer={"name": "adamw", "weight_decay": 1},
        checkpoint={"every_steps": 1, "keep": 30, "async": False},
    )  # fmt: skip
    weights = [load_file(f"run/checkpoints/step-{step:08d}/weights.safetensors") for step in range(1, 22)]

    def first_change(name: str) -> int:
        return next(n for n in range(1, 21) if not torch.equal(weights[n][name], weights[n - 1][name])) + 1

    assert first_change("5.weight") == 2
    assert (first_change("1.weight"), first_change("1.bias")) == (8, 8)
    assert first_change("0.weight") == 15


# --- what callbacks log -------------------------------------------------------------------------------------


def two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3:].parameters(), "lr": 0.1}]
    )


def test_the_learning_rates_of_all_groups_are_logged_when_they_change() -> None:
    start(
        optimizer={}, optimizer_fn=two_groups, callbacks=[LearningRateMonitor()], ema=None, procs=2,
        schedule={"name": "step", "every_steps": 8, "factor": 0.5},
    )  # fmt: skip
    logged = events("logged")
    assert [event["step"] for event in logged] == [1, 9, 17]
    assert [list(event["values"].values()) for event in logged] == [[0.01, 0.1], [0.005, 0.05], [0.0025, 0.025]]
    board = EventAccumulator("run/tensorboard").Reload()
    assert [scalar.step for scalar in board.Scalars("lr/group-1")] == [1, 9, 17]


def filters(model: torch.nn.Module) -> torch.Tensor:
    assert not model.training
    assert not torch.is_grad_enabled()
    return model[0].weight.sigmoid() + 0.1 * torch.rand(8, 1, 3, 3)


def test_images_are_shown_by_tensorboard_and_the_same_on_any_number_of_ranks() -> None:
    for procs in (1, 2):
        start(callbacks=[ImageLogger(filters, name="filters")], procs=procs, run_dir=f"run-{procs}")
    assert [(event["step"], event["file"]) for event in events("image", "run-2")] == [
        (step, f"images/filters-{step:08d}.png") for step in (7, 14, 21)
    ]
    board = EventAccumulator("run-2/tensorboard").Reload()
    assert [(image.step, image.height, image.width) for image in board.Images("filters")] == [
        (step, 11, 11) for step in (7, 14, 21)
    ]
    first, second = (Path(f"run-{procs}/images/filters-00000021.png").read_bytes() for procs in (1, 2))
    assert first == second


def test_what_is_no_image_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"run.log\(images=…\) has the shape \(2, 3, 3\); an image is \(C, H, W\)"):
        start(callbacks=[ImageLogger(lambda model: torch.zeros(2, 3, 3), every_steps=2)])
    with pytest.raises(ConfigError, match=r"got the shape \(8, 8\); an image is \(C, H, W\)"):
        start(callbacks=[ImageLogger(lambda model: torch.zeros(8, 8), every_steps=2)], run_dir="flat")


class Broken(Callback):
    def on_step(self, run: Run, metrics: Mapping[str, float | None]) -> None:
        raise ZeroDivisionError("no steps left")


def test_an_error_in_a_callback_names_the_callback_and_the_line() -> None:
    with pytest.raises(RankFailed) as failed:
        start(callbacks=[Broken()], max_restarts=0)
    text = str(failed.value)
    assert "failed (callback Broken.on_step, epoch 1, step 1)" in text
    assert "ZeroDivisionError: no steps left" in text
    line = Broken.on_step.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line}" in text


def test_freezing_what_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"run.freeze\('body'\) matches no parameter of the model"):
        start(callbacks=[GradualUnfreeze("body", every_epochs=1)])
