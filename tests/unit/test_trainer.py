from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import ConfigError
from support.configs import MANAGED, problems


def test_every_mistake_is_reported_together(tmp_path: Path) -> None:
    found = problems(
        {
            "bath_size": 4,
            "num_epochs": "three",
            "val_fraction": 1.0,
            "log": {"evry_steps": 5},
            "model_fn": "paceline_no_such_module:get_model",
            "train_fn": lambda model: None,
            "optimizer": {"name": "sdg"},
            "metrics": ["accurcy"],
            "df": "missing.csv",
            "device": "cpu",
            "backend": "nccl",
        },
        tmp_path,
    )
    beginnings = [
        "val_fraction=1.0 input should be less than 1",
        "num_epochs='three' input should be a valid integer",
        "log.evry_steps is not a known key; did you mean log.every_steps?",
        "bath_size is not a known key; did you mean batch_size?",
        "dataset_fn is missing;",
        "backend=nccl needs a GPU, but device=cpu;",
        "model_fn='paceline_no_such_module:get_model' names a module that does not exist",
        "train_fn=",
        "metrics, optimizer belong to the managed loop;",
        "optimizer.name='sdg' is not an optimizer of torch.optim; did you mean sgd?",
        "metrics='accurcy' is not known;",
        "df='missing.csv' does not exist;",
    ]
    assert [problem[: len(start)] for problem, start in zip(found, beginnings, strict=True)] == beginnings


def test_a_trainer_reports_the_mistakes_of_config_and_engine_together() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.Trainer(**MANAGED, procs=2, ddp=False, optimizer="sdg")
    assert caught.value.problems == [
        "procs=2 needs DDP; remove ddp=False, or use procs=1",
        "optimizer.name='sdg' is not an optimizer of torch.optim; did you mean sgd?",
    ]
