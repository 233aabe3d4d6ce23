"""Configs that are valid as they are, to which tests add keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import read_yaml
from paceline.errors import ConfigError
from paceline.trainer import build_config


def model(**options: Any) -> None: ...
def dataset(*tables: Any, **options: Any) -> None: ...
def loss(output: Any, target: Any) -> None: ...
def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None: ...


MANAGED = {"model_fn": model, "dataset_fn": dataset, "loss_fn": loss}
OWN = {"model_fn": model, "dataset_fn": dataset, "train_fn": train}


def problems(raw: dict[Any, Any], folder: Path | None = None) -> list[str]:
    """The mistakes that are reported to the user, with those that only the engine can find."""
    with pytest.raises(ConfigError) as caught:
        build_config(raw, folder)
    return caught.value.problems


def yaml(text: str, tmp_path: Path) -> dict[str, Any]:
    """The values in a YAML file with this text."""
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)
