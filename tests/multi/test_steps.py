"""Runs with a step of the user's own: their numbers, their state, and what is refused before the first step."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness_cases import Named, OwnLoss, ScaledStep, Views, measure, two_views
from faults import events, options, outcome, saved_steps, start
from torch import nn
from torch.nn import functional

from paceline import Sum, Trainer
from paceline.errors import ConfigError

STEP: dict[str, Any] = {"model_fn": Views, "loss_fn": None, "step_fn": two_views}


@pytest.mark.parametrize(
    "keys", [STEP, {**STEP, "step_fn": ScaledStep(), "evaluate_fn": measure}], ids=["values", "a buffer of its own"]
)
def test_a_step_resumes_on_other_numbers_of_ranks(keys: dict[str, Any]) -> None:
    whole = start(**keys, checkpoint={"every_steps": 4, "keep": 10})
    step = saved_steps()[1]
    resumed = start(**keys, resume=f"run/checkpoints/step-{step:08d}", run_dir="other", procs=2)
    assert resumed.history == whole.history
    assert resumed.weights_sha256 == whole.weights_sha256
    later = [event.get("values") for event in events("step") if event["step"] > step]
    assert [event.get("values") for event in events("step", "other")] == later


def test_values_are_in_events_and_history() -> None:
    result = start(**STEP)
    last = result.history[-1]
    assert {"train_loss", "train_distance", "val_loss", "val_distance", "val_accuracy"} <= last.keys()
    assert result.metrics["val_distance"] == last["val_distance"]
    assert {"distance", "accuracy", "weight", "constant"} == events("step")[-1]["values"].keys()


def test_a_trained_step_evaluates_and_predicts() -> None:
    result = start(**STEP, metrics=[])
    assert result.evaluate(procs=1) == result.metrics
    outputs = result.predict(procs=2)
    assert outputs.shape == (61, 2)
    doubled = start(**STEP, predict_fn=lambda model, batch: 2 * model(batch[0]), run_dir="other").predict(procs=1)
    assert torch.equal(doubled, 2 * outputs)


def test_the_models_own_loss_and_its_logits() -> None:
    keys = {"dataset_fn": lambda: Named(50), "val_dataset_fn": lambda: Named(21), "model_fn": OwnLoss}
    own = start(**keys, loss_fn="model", procs=2)
    by_hand = start(**keys, loss_fn=lambda output, y: functional.cross_entropy(output.logits, y), run_dir="other")
    assert outcome(own) == outcome(by_hand)
    assert own.evaluate(procs=1) == own.metrics
    assert own.predict(procs=1).shape == (21, 2)
    assert "loss_fn: model\n" in Path("run/config.yaml").read_text()


# --- what is refused before the first step -------------------------------------------------------------------------


class Queue:
    """Keeps features of earlier batches in a plain list."""

    def __init__(self) -> None:
        self.kept: deque[torch.Tensor] = deque([torch.zeros(16)], maxlen=4)

    def step(self, model: Any, batch: Any) -> torch.Tensor:
        features = model.encoder(batch[0].flatten(1))
        near = functional.mse_loss(features.mean(0), torch.stack(list(self.kept)).mean(0))
        self.kept.append(features.mean(0).detach())
        return functional.cross_entropy(model.head(features), batch[1]) + near


def clipping(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)
    return functional.cross_entropy(model(batch[0]), batch[1])


def backwards(model: Any, batch: Any) -> torch.Tensor:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


projection = nn.Linear(2, 2)


def projected(model: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(projection(model(batch[0])), batch[1])


REFUSED = {
    "a queue": (Queue().step, "step_fn gives another value when it is called again .* a buffer of the model"),
    "weights": (clipping, r"step_fn changes encoder\.0\.weight, which is trained; do that in a callback's on_step"),
    "backward": (backwards, "step_fn computes gradients, which are disabled in .*backward, return the loss"),
    "weights outside": (projected, "step_fn uses projection, which is outside the model and has trainable weights"),
    "no loss": (lambda model, batch: {"cost": model(batch[0]).sum()}, "step_fn returned a dict with 'cost'; it must"),
    "a tensor": (lambda model, batch: model(batch[0]), "step_fn's val_loss returned a tensor of shape"),
    "a tensor as a value": (
        lambda model, batch: {"loss": model(batch[0]).mean(), "scores": model(batch[0])},
        "step_fn's val_scores returned a tensor of shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_cannot_be_exact_is_refused_in_one_sentence(case: str) -> None:
    step, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        start(**{**STEP, "step_fn": step}, procs=2)
    assert not Path("run/checkpoints").exists() or not saved_steps()


def test_a_step_that_calls_backward_is_refused_without_validation_data() -> None:
    with pytest.raises(ConfigError, match="step_fn calls backward; return the loss, which is weighted and summed"):
        start(**{**STEP, "step_fn": backwards}, val_dataset_fn=None, val_fraction=0, metrics=[])


def test_a_value_that_appears_later_is_refused_with_its_name() -> None:
    def step(model: Any, batch: Any) -> dict[str, Any]:
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, **({"late": 1.0} if len(batch[1]) < 3 else {})}

    with pytest.raises(ConfigError, match=r"returned 'late', .* first step; return the same names .*Sum\(0, 0\)"):
        start(**{**STEP, "step_fn": step})


def test_a_value_may_be_left_out_and_counts_only_where_it_is() -> None:
    def step(model: Any, batch: Any) -> dict[str, Any]:
        loss, ones = functional.cross_entropy(model(batch[0]), batch[1]), batch[1].sum()
        return {"loss": loss, "ones": Sum(2 * ones, ones)}

    result = start(**{**STEP, "step_fn": step})
    assert {row["train_ones"] for row in result.history} == {2.0}


WATCHING = {
    "early_stop": {"early_stop": {"metric": "acc", "mode": "max"}},
    "checkpoint.best": {"checkpoint": {"best": {"metric": "acc", "mode": "max"}}},
    "schedule": {"schedule": {"name": "plateau", "metric": "acc", "mode": "max"}},
}


@pytest.mark.parametrize("key", WATCHING)
def test_a_metric_that_evaluate_fn_does_not_return_is_refused_before_the_first_step(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}\.metric='acc' is not measured; use train_loss, other"):
        start(**STEP, metrics=[], evaluate_fn=lambda model, batch: {"other": 1.0}, **WATCHING[key])
    assert not events("step")


def test_one_of_loss_fn_and_step_fn() -> None:
    with pytest.raises(ConfigError, match="loss_fn and step_fn are both given; keep one of them"):
        Trainer(**{**options(), "loss_fn": functional.cross_entropy, "step_fn": two_views})


def mixed(model: Any, batch: Any) -> Any:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return Sum(loss * len(batch[1]), len(batch[1])) if batch[1].sum() > 1 else loss


@pytest.mark.parametrize("procs", [1, 2, 4])
def test_a_mean_and_a_sum_in_lanes_of_a_run_are_refused_at_any_number_of_ranks(procs: int) -> None:
    with pytest.raises(ConfigError, match="step_fn returned a mean for one batch and a sum with its count for another"):
        start(**{**STEP, "step_fn": mixed}, metrics=[], procs=procs, max_restarts=0, hang_timeout_s=30)
