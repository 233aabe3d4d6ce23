"""The recipe `mnist`: its config, its data and its model."""

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
def reads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all calls of `datasets.read`."""
    reads: list[dict[str, Any]] = []
    monkeypatch.setattr(datasets, "read", lambda **arguments: reads.append(arguments))
    return reads


def test_the_model_returns_ten_logits_for_each_image(config: Config) -> None:
    model = config.function("model_fn")(**config.model_args)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(256, 784), (256,), (10, 256), (10,)]


def test_training_uses_the_training_set_and_validation_the_test_set(config: Config, reads: list[Any]) -> None:
    config.function("dataset_fn")()
    config.function("val_dataset_fn")()
    assert reads == [{"name": "mnist", "train": True}, {"name": "mnist", "train": False}]


def test_both_sets_are_read_with_dataset_args(config: Config, reads: list[Any]) -> None:
    options = {"name": "fashion-mnist", "root": "/data"}
    config.function("dataset_fn")(**options)
    config.function("val_dataset_fn")()
    config.function("dataset_fn")()  # the next run in the same process does not use these options
    assert reads == [{**options, "train": True}, {**options, "train": False}, {"name": "mnist", "train": True}]
