"""Every text that an answer tells the user to write is typed, in each place, and must be accepted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import override
from paceline.config.answers import key_of, rows_of, settings, template
from paceline.config.other_names import TABLE, VALUES, Row
from paceline.config.written import EVERYWHERE, OPEN, leaves, written
from paceline.config.yaml import parse
from paceline.trainer import build_config
from support.configs import MANAGED

USUAL = {  # what is given under the names of a row, by its key or the name; else a 2
    "backend": "gloo", "betas": [0.9, 0.99], "checkpoint.best.metric": "accuracy", "early_stop.metric": "accuracy",
    "ema": 0.999, "exact": False, "find_unused_parameters": True, "loss_fn": "mse_loss", "log.trackers": "wandb",
    "name": "mylab", "optimizer.name": "sgd", "optimizer.betas": 0.9, "optimizer.eps": 1e-8, "device": "gpu",
    "precision": "bf16", "rdzv_endpoint": "n1:29400", "master_addr": "n1", "main_process_ip": "n1", "resume": "auto",
    "run_dir": "out", "global_batch_size": 64, "schedule.factor": 0.5, "schedule.name": "cosine", "val_fraction": 0.2,
}  # fmt: skip
KINDS = {"fraction": 0.1, "table": "x.csv", "text": "f1", "decimal": 2.5, "count": 100, "list": [0, 1]}
GIVEN: dict[str, list[Any]] = {  # further values of other libraries
    "devices": [[0], [0, 1], "0,1", "2", 2], "gpus": [0, 1], "report_to": [["wandb", "tensorboard"], "csv", []],
    "run_name": ["my run", "a/b"], "loss": ["mse", "bce", "CrossEntropyLoss", "mse_loss"], "val_split": [100, 1, 0.1],
    "num_train_epochs": [2.5, 0.5, 3.0], "save_steps": [0, 500], "logging_steps": [0, 500],
    "optim": ["paged_adamw_8bit", "lion_8bit", "sgd"], "monitor": ["val_acc", "val_loss"], "ddp_backend": ["mpi"],
    "metric_for_best_model": ["eval_accuracy"], "per_device_train_batch_size": ["auto"], "total_batch_size": [8],
}  # fmt: skip
OPEN_VALUES = {  # what the user writes in place of an ellipsis; else a 2
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
    in_python, in_config, on_command_line = (written(tree, [place]) for place in EVERYWHERE)
    build(eval(f"dict({in_python})"), None)
    build(parse(f"{{{in_config}}}"), tmp_path)
    typed: dict[str, Any] = {}
    override(typed, shlex.split(on_command_line))
    build(typed, tmp_path)
