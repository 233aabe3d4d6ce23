"""The recipe `mnist`: its config, what it reads, its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import datasets
from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml


@pytest.fixture
def config() -> Config:
    path = find_config("mnist")
    return build(read_yaml(path), folder=path.parent)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the recipe wants to have read."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(datasets, "read", lambda **what: asked.append(what))
    return asked


def test_its_model_gives_ten_scores_an_image(config: Config) -> None:
    model = config.function("model_fn")(**config.model_args)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(256, 784), (256,), (10, 256), (10,)]


def test_it_trains_on_the_training_set_and_validates_on_the_test_set(config: Config, asked: list[Any]) -> None:
    config.function("dataset_fn")()
    config.function("val_dataset_fn")()
    assert asked == [{"name": "mnist", "train": True}, {"name": "mnist", "train": False}]


def test_both_sets_come_from_where_dataset_args_say(config: Config, asked: list[Any]) -> None:
    where = {"name": "fashion-mnist", "root": "/data"}
    config.function("dataset_fn")(**where)
    config.function("val_dataset_fn")()
    config.function("dataset_fn")()  # the next run in the same program does not inherit it
    assert asked == [{**where, "train": True}, {**where, "train": False}, {"name": "mnist", "train": True}]
