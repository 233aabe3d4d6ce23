"""The callbacks that we ship, each with a run that has no processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import (
    BestCheckpoint,
    EarlyStopping,
    GradualUnfreeze,
    ImageLogger,
    LearningRateMonitor,
    MeanTeacher,
    Run,
)
from paceline.errors import ConfigError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)


def run_of(model: nn.Module | None = None, **facts: Any) -> Run:
    options = {"rank": 0, "world_size": 1, "device": torch.device("cpu"), "folder": Path(), "total_steps": None}
    return Run(**options, model=model or Pair(), **facts)


# --- early stopping and the best checkpoint -----------------------------------------------------------------


def finished_after(callback: EarlyStopping, metric: str, values: list[float | None]) -> int | None:
    """The evaluation after which the run is finished."""
    run = run_of()
    for number, value in enumerate(values, start=1):
        callback.on_evaluate(run, {metric: value})
        if run.asked_to_finish is not None:
            return number
    return None


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"patience": 2}, [3, 2, 1, 0.5], None),
        ({"patience": 2}, [3, 2, 2, 2, 1], 4),
        ({"patience": 2}, [3, 2, 4, 1, 2, 2], 6),
        ({"patience": 1, "min_delta": 0.5}, [3, 2, 1.6], 3),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1], 4),
        ({"patience": 2}, [None, math.nan], 2),
        ({"patience": 3}, [math.inf, 5.0, math.nan, 4.0], None),
    ],
)
def test_a_run_is_finished_after_evaluations_without_improvement(
    options: dict[str, Any], values: list[float | None], expected: int | None
) -> None:
    assert finished_after(EarlyStopping("m_loss", **options), "m_loss", values) == expected


def test_early_stopping_continues_to_count_after_a_resume() -> None:
    first, second = EarlyStopping(patience=3), EarlyStopping(patience=3)
    assert finished_after(first, "val_loss", [1, 2, 2]) is None
    second.load_state_dict(first.state_dict())
    assert finished_after(second, "val_loss", [2]) == 1


def test_a_metric_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"early_stop.metric='f1' is not measured; use train_loss, val_loss"):
        EarlyStopping("f1", "max").on_evaluate(run_of(), {"epoch": 1, "step": 3, "train_loss": 1.0, "val_loss": 2.0})


def test_the_best_evaluation_is_saved_and_remembered() -> None:
    best, saved = BestCheckpoint("m", "max"), []
    run = run_of()
    for value in (1.0, 3.0, 2.0, math.nan, None, 3.0, 4.0):
        best.on_evaluate(run, {"m": value})
        saved.append(run.save_requested)
        run.save_requested = False
    assert saved == [True, True, False, False, False, False, True]
    again = BestCheckpoint("m", "max")
    again.load_state_dict(best.state_dict())
    again.on_evaluate(run, {"m": 4.0})
    assert not run.save_requested


def test_the_best_of_a_checkpoint_without_a_state_is_in_its_history() -> None:
    run, best = run_of(history=[{"m": 1.0}, {}, {"m": None}]), BestCheckpoint("m", "min")
    best.on_start(run)
    best.on_evaluate(run, {"m": 1.5})
    assert not run.save_requested


# --- a teacher ----------------------------------------------------------------------------------------------


def test_a_teacher_begins_as_a_copy_and_follows() -> None:
    run, callback = run_of(model := Pair()), MeanTeacher(decay=0.75)
    callback.on_start(run)
    assert torch.equal(model.teacher[0].weight, model.student[0].weight)
    before = model.teacher[0].weight.clone()
    with torch.no_grad():
        model.student[0].weight.add_(1.0)
        model.student[1].running_mean.add_(2.0)
    callback.on_step(run, {})
    assert torch.equal(model.teacher[0].weight, torch.lerp(before, model.student[0].weight, 0.25))
    assert model.teacher[1].running_mean.tolist() == [2.0, 2.0]


def test_a_resumed_teacher_keeps_its_weights() -> None:
    model = Pair()
    before = model.teacher[0].weight.clone()
    MeanTeacher().on_start(run_of(model, step_number=5))
    assert torch.equal(model.teacher[0].weight, before)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model: model.__delattr__("teacher"), "the model has no module 'teacher'; it has student"),
        (lambda model: model.teacher.requires_grad_(True), "teacher is also trained by the optimizer"),
        (lambda model: setattr(model, "teacher", nn.Linear(3, 3)), "teacher and student have different weights"),
    ],
)
def test_a_teacher_that_cannot_follow_is_one_sentence(change: Any, problem: str) -> None:
    change(model := Pair())
    with pytest.raises(ConfigError, match=problem):
        MeanTeacher().on_start(run_of(model))


# --- freezing -----------------------------------------------------------------------------------------------


def test_parameters_are_frozen_by_their_names_and_those_of_modules() -> None:
    run = run_of()
    run.freeze("student.0", "student.1.bias")
    assert run.frozen == {"student.0.weight", "student.0.bias", "student.1.bias"}
    run.unfreeze("student")
    assert run.frozen == set()
    with pytest.raises(ConfigError, match=r"run.freeze\('stud'\) matches no parameter of the model; its modules"):
        run.freeze("stud")


@pytest.mark.parametrize(
    ("options", "facts"),
    [({"every_epochs": 2}, [{"epochs_done": n} for n in (0, 1, 2, 3, 4, 9)]),
     ({"every_steps": 10}, [{"step_number": n} for n in (0, 9, 10, 19, 20, 90)])],
)  # fmt: skip
def test_modules_are_unfrozen_one_after_the_other_also_in_a_resumed_run(
    options: dict[str, int], facts: list[dict[str, int]]
) -> None:
    run, callback = run_of(), GradualUnfreeze("student.1", "student.0", **options)
    callback.on_start(run)
    frozen = []
    for fact in facts:
        resumed = run_of(**fact)
        GradualUnfreeze("student.1", "student.0", **options).on_start(resumed)
        for name, value in fact.items():
            setattr(run, name, value)
        callback.on_step(run, {})
        assert run.frozen == resumed.frozen
        frozen.append(len(run.frozen))
    assert frozen == [4, 4, 2, 2, 0, 0]


@pytest.mark.parametrize("options", [{}, {"every_steps": 1, "every_epochs": 1}])
def test_unfreezing_needs_one_interval(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="one of every_epochs and every_steps"):
        GradualUnfreeze("a", **options)


@pytest.mark.parametrize("callback", [EarlyStopping, BestCheckpoint])
def test_a_metric_that_is_no_loss_needs_a_mode(callback: Any) -> None:
    with pytest.raises(ConfigError, match="metric='accuracy' needs a mode"):
        callback("accuracy")
    with pytest.raises(ConfigError, match="has mode='maximum', which is unknown; set mode="):
        callback("accuracy", "maximum")
    with pytest.raises(ConfigError, match="metric=3 is not a name; use a string"):
        callback(3)
    callback("val_loss")
    callback("accuracy", "max")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: EarlyStopping(patience=0), "early_stop: patience=0 is not a positive integer; use one, such as 5"),
        (lambda: EarlyStopping(patience=-1), "early_stop: patience=-1 is not a positive integer"),
        (lambda: EarlyStopping(patience="3"), "early_stop: patience='3' is not a positive integer"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(min_delta=-0.1), "early_stop: min_delta=-0.1 is not a number of at least 0"),
        (lambda: MeanTeacher(decay="0.9"), "MeanTeacher: decay='0.9' is not a number between 0 and 1"),  # type: ignore[arg-type]
        (lambda: MeanTeacher(decay=1.5), "MeanTeacher: decay=1.5 is not a number between 0 and 1"),
        (lambda: GradualUnfreeze("a", every_steps=0), "GradualUnfreeze: every_steps=0 is not a positive integer"),
        (lambda: GradualUnfreeze("a", every_epochs=-1), "GradualUnfreeze: every_epochs=-1 is not a positive integer"),
        (lambda: GradualUnfreeze(["a"], every_steps=1), r"GradualUnfreeze: module 0=\['a'\] is not a name"),  # type: ignore[arg-type]
        (lambda: LearningRateMonitor(every_steps=-2), "LearningRateMonitor: every_steps=-2 is not a positive integer"),
        (lambda: LearningRateMonitor(every_steps=0), "LearningRateMonitor: every_steps=0 is not a positive integer"),
        (lambda: ImageLogger(3), "ImageLogger: images=3 is not a function"),  # type: ignore[arg-type]
        (lambda: ImageLogger(nn.Identity(), every_steps=0), "ImageLogger: every_steps=0 is not a positive integer"),
    ],
)
def test_a_wrong_argument_is_an_error_where_the_callback_is_made(make: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_images_must_be_a_tensor() -> None:
    callback = ImageLogger(lambda model: [torch.zeros(3, 4, 4)])  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"ImageLogger\(name='images'\) got a list of images; an image is"):
        callback.on_evaluate(run_of(), {})


def test_a_best_metric_that_an_evaluation_does_not_have_is_an_error_in_the_managed_loop() -> None:
    best = BestCheckpoint("acc", "max")
    with pytest.raises(ConfigError, match=r"checkpoint\.best\.metric='acc' is not measured; use train_loss, a"):
        best.on_evaluate(run_of(), {"epoch": 1, "train_loss": 1.0, "a": 2.0})
    best.on_evaluate(run_of(is_own_loop=True), {"epoch": 1, "train_loss": 1.0})
