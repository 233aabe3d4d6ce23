"""Every text that an answer tells the user to write is typed, in each place, and must be accepted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.callbacks import LearningRateMonitor
from paceline.config import override
from paceline.config.answers import key_of, rows_of, settings, template
from paceline.config.other_names import TABLE, VALUES, Row
from paceline.config.written import COMMAND_LINE, FILE, OPEN, PYTHON, leaves, written
from paceline.config.yaml import parse
from paceline.trainer import build_config
from support.configs import MANAGED, problems

USUAL = {  # what is given under the names of a row, by its key or the name; else a 2
    "backend": "gloo", "betas": [0.9, 0.99], "checkpoint.best.metric": "accuracy", "early_stop.metric": "accuracy",
    "ema": 0.999, "exact": False, "find_unused_parameters": True, "loss_fn": "mse_loss", "log.trackers": "wandb",
    "name": "mylab", "optimizer.name": "sgd", "optimizer.betas": 0.9, "optimizer.eps": 1e-8, "device": "gpu",
    "precision": "bf16", "rdzv_endpoint": "n1:29400", "master_addr": "n1", "main_process_ip": "n1", "resume": "auto",
    "run_dir": "out", "global_batch_size": 64, "schedule.factor": 0.5, "schedule.name": "cosine", "val_fraction": 0.2,
}  # fmt: skip
KINDS = {
    "fraction": 0.1,
    "table": "x.csv",
    "text": "f1",
    "decimal": 2.5,
    "count": 100,
    "list": [0, 1],
    "section": {"width": 3, "depth": 2},
}
GIVEN: dict[str, list[Any]] = {  # further values of other libraries
    "devices": [[0], [0, 1], "0,1", "2", 2], "gpus": [0, 1], "report_to": [["wandb", "tensorboard"], "csv", []],
    "run_name": ["my run", "a/b"], "loss": ["mse", "bce", "CrossEntropyLoss", "mse_loss"], "val_split": [100, 1, 0.1],
    "num_train_epochs": [2.5, 0.5, 3.0], "save_steps": [0, 500], "logging_steps": [0, 500],
    "optim": ["paged_adamw_8bit", "lion_8bit", "sgd"], "monitor": ["val_acc", "val_loss"], "ddp_backend": ["mpi"],
    "metric_for_best_model": ["eval_accuracy"], "per_device_train_batch_size": ["auto"], "total_batch_size": [8],
}  # fmt: skip
OPEN_VALUES = {  # what the user writes in place of an ellipsis; else a 2
    "early_stop.metric": "val_loss", "model_args": {"width": 3}, "schedule.final": 0.1,
    "callbacks": "paceline:LearningRateMonitor", "log.trackers": "wandb", "val_fraction": 0.2,
    "checkpoint.best.metric": "val_loss",
    "metrics": {"f1": "support.named:loss_fn"}, "metrics.f1": "support.named:loss_fn",
    "sample_weights": "support.named:sample_weights",
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Each name with a usual value, and with each value that has an answer of its own."""
    for row in (row for rows in TABLE.values() for row in rows):
        for name in row.names:
            usual = USUAL.get(name, USUAL.get(key_of(row.write), 2))
            for value in (usual, *(KINDS.get(kind, parse(kind)) for kind in row.values)):
                yield pytest.param(row, value, id=f"{name}={value}")
    for name, given in GIVEN.items():
        for value in given:
            yield pytest.param(rows_of(name)[0], value, id=f"{name}={value}")
    for key, values in VALUES.items():
        for value in values:
            yield pytest.param(Row(values=values), KINDS.get(value, parse(value)), id=f"{key}={value}")


def completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Settings with values in place of ellipses."""
    raw: dict[str, Any] = {}
    for path, value in leaves(tree):
        key, target = ".".join(path), raw
        for section in path[:-1]:
            target = target.setdefault(section, {})
        usable = f"support.named:{key}" if key.endswith("_fn") else 2
        target[path[-1]] = OPEN_VALUES.get(key, usable) if value in (OPEN, [OPEN]) else value
    return raw


def unknown_trackers(names: list[str]) -> list[str]:
    """Stands for the check that also finds trackers that are not installed."""
    return [name for name in names if name not in ("wandb", "mlflow")]


def build(raw: dict[str, Any], folder: Path | None) -> None:
    """Build a config with these keys besides those that it needs."""
    needed = {key: value for key, value in MANAGED.items() if key != "loss_fn" or "step_fn" not in raw}
    config = build_config({**needed, **raw}, folder)
    assert config.model_fields_set > raw.keys()


@pytest.mark.parametrize(("row", "value"), list(cases()))
def test_the_words_to_write_are_accepted_in_each_place(
    row: Row, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.observe.sinks.registry.problems_with", unknown_trackers)
    Path("x.csv").write_text("a\n1\n", encoding="utf-8")
    write, note = template(row, value)
    assert write or note
    tree = completed(settings(write, value))
    in_python, in_config, on_command_line = (written(tree, place) for place in (PYTHON, FILE, COMMAND_LINE))
    build(eval(f"dict({in_python})"), None)
    build(parse(f"{{{in_config}}}"), tmp_path)
    typed: dict[str, Any] = {}
    override(typed, shlex.split(on_command_line))
    build(typed, tmp_path)


SGD = {"name": "sgd"}


@pytest.mark.parametrize(
    ("rest", "unknown", "words"),
    [
        ({"optimizer": "sgd"}, {"lr": 0.1}, 'optimizer={"name": "sgd", "lr": 0.1}'),
        ({"optimizer": {**SGD, "lr": 0.2}}, {"wd": 0.1}, 'optimizer={"name": "sgd", "lr": 0.2, "weight_decay": 0.1}'),
        ({}, {"optimizer": {**SGD, "learning_rate": 0.1}}, 'optimizer={"name": "sgd", "lr": 0.1}'),
        (
            {},
            {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9},
            'optimizer={"lr": 0.1, "weight_decay": 0.01, "name": "sgd", "momentum": 0.9}',
        ),
        ({}, {"momentum": 0.9, "optim": "rmsprop"}, 'optimizer={"name": "rmsprop", "momentum": 0.9}'),
        (
            {"metrics": ["mse"]},
            {"patience": 3, "monitor": "val_acc"},
            'early_stop={"patience": 3, "metric": "accuracy", "mode": "max"}, metrics=["mse", "accuracy"]',
        ),
        ({"procs": 2}, {"accumulate_grad_batches": 4}, "lanes=8"),
        ({}, {"devices": 2, "accumulate_grad_batches": 4}, "lanes=8"),
        ({}, {"early_stop": 3}, 'early_stop={"patience": 3}'),
        ({}, {"early_stop": "val_loss"}, 'early_stop={"metric": "val_loss"}'),
        ({}, {"evaluate": 5}, 'evaluate={"every_epochs": 5}'),
        ({}, {"checkpoint": False}, 'checkpoint={"every_minutes": None}'),
        ({}, {"checkpoint": "best"}, 'checkpoint={"best": {"metric": "val_loss", "mode": "min"}}'),
        ({}, {"log": "wandb"}, 'log={"trackers": "wandb"}'),
        ({}, {"loss_fn": "mse"}, 'loss_fn="mse_loss"'),
        ({}, {"num_classes": 3}, 'model_args={"num_classes": 3}'),
        ({"model_args": {"width": 2}}, {"num_classes": 3}, 'model_args={"width": 2, "num_classes": 3}'),
        ({}, {"hparams": {"width": 3}}, 'model_args={"width": 3}'),
        ({}, {"T_max": 3}, 'schedule={"name": "cosine"}'),
        ({}, {"schedule": {"max_lr": 3}}, 'optimizer={"lr": 3}'),
        ({"optimizer": "sgd"}, {"schedule": {"max_lr": 3}}, 'optimizer={"name": "sgd", "lr": 3}'),
        ({}, {"scheduler": "reduce_on_plateau"}, 'schedule={"name": "plateau"}'),
        ({}, {"schedule": {"name": "StepLR"}}, 'schedule={"name": "step", "every_epochs": 30, "factor": 0.1}'),
        (
            {},
            {"schedule": {"name": "CosineAnnealingLR", "warmup_steps": 3}},
            'schedule={"warmup_steps": 3, "name": "cosine"}',
        ),
        ({}, {"model": "support.named:model_fn"}, 'model_fn="support.named:model_fn"'),
        ({}, {"early_stopping": {"patience": 3, "monitor": "val_loss"}},
            'early_stop={"patience": 3, "metric": "val_loss"}'),
        ({}, {"scheduler": {"name": "StepLR"}}, 'schedule={"name": "step", "every_epochs": 30, "factor": 0.1}'),
    ],
)  # fmt: skip
def test_the_words_include_what_is_given_and_are_accepted_instead(
    rest: dict[str, Any], unknown: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.observe.sinks.registry.problems_with", unknown_trackers)
    found = problems({**MANAGED, **rest, **unknown})
    assert any(f"; write {words}" in problem for problem in found)
    build({**rest, **eval(f"dict({words})")}, None)


@pytest.mark.parametrize("name", ["EarlyStopping", "LearningRateMonitor"])
def test_a_callback_by_its_name_alone_is_answered_with_its_module(name: str, tmp_path: Path) -> None:
    [problem] = problems({**MANAGED, "callbacks": name}, tmp_path)
    assert problem == f"callbacks.0='{name}' is in paceline; write paceline:{name}"
    build({"callbacks": [f"paceline:{name}"]}, tmp_path)


def test_a_callback_that_is_not_in_a_list_is_answered_with_the_list() -> None:
    [problem] = problems({**MANAGED, "callbacks": LearningRateMonitor()})
    assert problem.endswith(" is not a list; write callbacks=[…]")


@pytest.mark.parametrize(("folder", "words"), [(None, "exact=False"), (Path(), "exact: false")])
def test_a_conflict_is_answered_with_the_words_for_the_place(folder: Path | None, words: str) -> None:
    [problem] = problems({**MANAGED, "sync_batchnorm": True}, folder)
    assert problem.endswith(f"; set {words}")
