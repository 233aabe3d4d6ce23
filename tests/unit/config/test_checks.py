from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
import torch

from paceline.config import build
from paceline.config.keys import OWN_LOOP_KEYS
from paceline.errors import ConfigError
from support.configs import MANAGED, OWN, dataset, loss, model, problems


def test_a_model_in_place_of_a_function_is_a_mistake() -> None:
    assert problems({**MANAGED, "model_fn": torch.nn.Linear(2, 1)}) == [
        "model_fn=<Linear> is a model; give a function that returns it, such as model_fn=lambda: model"
    ]


def test_an_invalid_loss_fn_is_not_also_reported_as_missing() -> None:
    assert problems({**MANAGED, "loss_fn": 3}) == [
        'loss_fn=3 is not a function; pass a function, or write "module:name" in a config'
    ]


def test_without_train_fn_and_loss_fn_both_are_named() -> None:
    [problem] = problems({"model_fn": model, "dataset_fn": dataset})
    assert problem.startswith("train_fn, loss_fn and step_fn are all missing; give train_fn")


@pytest.mark.parametrize(
    "extra",
    [
        {"loss_fn": loss},
        {"metrics": ["accuracy"]},
        {"optimizer": {"lr": 0.1}},
        {"optimizer_fn": lambda model: None},
        {"schedule": {"name": "cosine"}},
        {"clip_norm": 1.0},
        {"max_steps": 3},
        {"lanes": 2},
        {"checkpoint": {"keep": 2}},
        {"time_limit": "1h"},
        {"nan": "stop"},
        {"nan_limit": 3},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_keys_of_the_managed_loop_conflict_with_train_fn(extra: dict[str, Any]) -> None:
    [key] = extra
    [problem] = problems({**OWN, **extra})
    if key in OWN_LOOP_KEYS:
        assert problem.startswith(f"{key} needs a train_fn with the parameter run, or the managed loop; write")
    else:
        assert re.fullmatch(
            rf"{key} belongs to the managed loop; do it in train_fn \(.*:\d+\), or remove train_fn", problem
        )


@pytest.mark.parametrize("key", ["clip_norm", "lanes", "time_limit"])
def test_a_train_fn_with_run_has_keys_of_the_managed_loop(key: str) -> None:
    def train(model, train_loader, val_loader, device, num_epochs, run):  # type: ignore[no-untyped-def]
        """The user's own loop."""

    build({**OWN, "train_fn": train, key: 2, "resume": "auto", "loss_fn": "cross_entropy"})
    with pytest.raises(ConfigError, match="schedule belongs to the managed loop"):
        build({**OWN, "train_fn": train, "schedule": "cosine"})
    with pytest.raises(ConfigError, match="sync_batchnorm=true needs the managed loop, or a train_fn without `run`"):
        build({**OWN, "train_fn": train, "sync_batchnorm": True, "exact": False})


def test_train_fn_may_start_from_the_beginning_but_not_from_a_checkpoint() -> None:
    build({**OWN, "resume": "auto"})
    assert problems({**OWN, "resume": "runs/a/checkpoints/step-00000003"}) == [
        "resume=runs/a/checkpoints/step-00000003 names a run to continue, but a train_fn without `run` keeps no "
        "checkpoints; write def train(model, train_loader, val_loader, device, num_epochs, run), or use --resume auto "
        "to start from the beginning"
    ]


def test_keys_that_have_their_default_conflict_with_nothing() -> None:
    """The config.yaml of a run lists all keys, and can be trained again."""
    build({**OWN, "loss_fn": None, "ema": None, "val_dataset_fn": dataset, "val_fraction": 0.1})


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            {"optimizer": {"lr": 0.1}, "optimizer_fn": lambda model: None},
            "optimizer and optimizer_fn are both given; keep one of them",
        ),
        (
            {"val_df": pd.DataFrame(), "val_fraction": 0.5},
            "val_df and val_fraction are both given; keep one of them",
        ),
        (
            {"val_dataset_fn": dataset, "val_fraction": 0.5},
            "val_dataset_fn and val_fraction are both given; keep one of them",
        ),
        ({"device": "cpu", "backend": "nccl"}, "backend=nccl needs a GPU, but device=cpu; use backend: gloo"),
        ({"compression": "bf16"}, "compression=bf16 makes results depend on the number of ranks; set exact=False"),
        (
            {"compression": "powersgd", "exact": False, "find_unused_parameters": True},
            "compression=powersgd cannot be used with find_unused_parameters=true; use bf16 or fp16",
        ),
        ({"sync_batchnorm": True}, "sync_batchnorm=true makes results depend on the number of ranks; set exact=False"),
        (
            {"sync_batchnorm": True, "exact": False, "device": "cpu"},
            "sync_batchnorm=true needs a GPU, but device=cpu; remove one of them",
        ),
    ],
    ids=["optimizer", "val_df", "val_dataset_fn", "backend", "compression", "powersgd", "sync_batchnorm", "statistics"],
)
def test_keys_that_exclude_each_other_are_a_mistake(raw: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **raw}) == [problem]


@pytest.mark.parametrize("extra", [{"max_restarts": 2}, {"hang_timeout_s": 5}, {"procs": "1:2"}])
def test_keys_of_the_launcher_are_valid_for_both_loops(extra: dict[str, Any]) -> None:
    [key] = extra
    assert getattr(build({**OWN, **extra}), key) == extra[key]


def test_the_best_checkpoint_needs_a_metric_that_is_measured() -> None:
    best = {"checkpoint": {"best": {"metric": "acuracy", "mode": "max"}}}
    assert problems({**MANAGED, **best, "metrics": ["accuracy", "mse"]}) == [
        "checkpoint.best.metric='acuracy' is not measured; use val_loss, train_loss, accuracy, mse"
    ]
    for metric in ("val_loss", "train_loss", "accuracy", "mine"):
        metrics = {"accuracy": loss, "mine": loss}
        config = build({**MANAGED, "metrics": metrics, "checkpoint": {"best": {"metric": metric, "mode": "max"}}})
        assert config.checkpoint.best is not None
        assert config.checkpoint.best.metric == metric


def test_invalid_metrics_are_the_only_mistake_reported() -> None:
    found = problems({**MANAGED, "metrics": 3, "checkpoint": {"best": {"metric": "accuracy", "mode": "max"}}})
    assert {problem.partition(" ")[0] for problem in found} == {"metrics=3"}


def test_several_processes_need_ddp() -> None:
    assert problems({**MANAGED, "procs": "2:4", "ddp": False}) == [
        "procs=2:4 needs DDP; remove ddp=False, or use procs=1"
    ]
    assert build({**MANAGED, "procs": "1:4", "ddp": False}).procs_range == (1, 4)


@pytest.mark.parametrize("name", ["step", "epoch", "event", "val_loss", "train_loss"])
def test_a_metric_with_a_reserved_name_is_a_mistake(name: str) -> None:
    assert problems({**MANAGED, "metrics": {name: lambda output, target: 0.0}}) == [
        f"metrics.{name} has a name that is reserved in events and results; choose another name"
    ]


def yielding(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> Any:
    yield from train_loader


async def waiting(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None:
    pass


def test_a_train_fn_that_does_not_run_when_called_is_a_mistake() -> None:
    [first], [second] = problems({**OWN, "train_fn": yielding}), problems({**OWN, "train_fn": waiting})
    assert first.endswith("yielding is a generator, so calling it trains nothing; use a plain function")
    assert second.endswith("waiting is async, so calling it trains nothing; use a plain function")


def test_a_loss_of_the_models_own_is_not_looked_up_and_is_written_as_it_is() -> None:
    config = build({**MANAGED, "loss_fn": "model"})
    assert config.loss_fn == "model"
    assert "\nloss_fn: model\n" in config.to_yaml()


@pytest.mark.parametrize("keys", [{"loss_fn": "model"}, {"loss_fn": None, "step_fn": lambda model, batch: 0.0}])
def test_samples_are_ranked_only_by_a_loss_of_outputs(keys: dict[str, Any]) -> None:
    [problem] = problems({**MANAGED, **keys, "curriculum": {"by": "loss"}, "num_epochs": 2})
    assert problem.startswith("curriculum.by=loss needs a loss_fn(output, target); give that,")


def test_a_function_for_evaluation_may_be_given_with_a_loop_of_ones_own_but_no_step() -> None:
    def function(model: Any, batch: Any) -> None: ...

    build({**OWN, "evaluate_fn": function, "predict_fn": function})
    [problem] = problems({**OWN, "step_fn": function})
    assert problem.startswith("step_fn belongs to the managed loop; do it in train_fn")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sample_weights": [1.0]}, "sample_weights and order_fn are both given; keep one of them"),
        ({"curriculum": {"by": "loss"}, "num_epochs": 2}, "order_fn and curriculum are both given; keep one of them"),
        (
            {"val_fraction": 0.2},
            "val_fraction=0.2 would take samples out of the data set that order_fn orders; set val_fraction=0, or "
            "give val_df or val_dataset_fn",
        ),
    ],
    ids=["weights", "curriculum", "split"],
)
def test_an_order_of_the_users_own_excludes_others_and_a_split(keys: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, "order_fn": lambda epoch, size: range(size), "val_fraction": 0, **keys}) == [problem]


def test_weights_exclude_a_curriculum() -> None:
    keys = {"sample_weights": [1.0], "curriculum": {"by": "loss"}, "num_epochs": 2}
    assert problems({**MANAGED, **keys}) == ["sample_weights and curriculum are both given; keep one of them"]


def test_the_global_batch_size_derives_the_lanes() -> None:
    assert build({**MANAGED, "global_batch_size": 96, "batch_size": 8}).lanes == 12
    assert build({**MANAGED, "global_batch_size": 96, "batch_size": 8, "lanes": 12}).lanes == 12  # as in a run folder
    assert build({**MANAGED, "batch_size": 8}).lanes is None


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"global_batch_size": 100, "batch_size": 8},
            "global_batch_size=100 is not a multiple of batch_size=8; use 96 or 104, or another batch_size",
        ),
        (
            {"global_batch_size": 8, "batch_size": 32},
            "global_batch_size=8 is not a multiple of batch_size=32; use 32, or another batch_size",
        ),
        (
            {"global_batch_size": 96, "batch_size": 8, "lanes": 4},
            "global_batch_size=96 and batch_size=8 give lanes=12, but lanes=4 is given; leave one of the three out",
        ),
    ],
    ids=["remainder", "too small", "lanes"],
)
def test_a_global_batch_size_that_lanes_cannot_fill_is_a_mistake(keys: dict[str, Any], problem: str) -> None:
    assert problems({**MANAGED, **keys}) == [problem]


def test_the_best_checkpoint_by_a_metric_that_is_no_loss_needs_a_mode() -> None:
    [problem] = problems({**MANAGED, "metrics": ["accuracy"], "checkpoint": {"best": {"metric": "accuracy"}}})
    assert problem.endswith("write {metric: accuracy, mode: max} or {metric: accuracy, mode: min}")
    build({**MANAGED, "checkpoint": {"best": {"metric": "train_loss"}}})
