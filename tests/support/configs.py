"""Configs that are valid as they are, to which tests add keys, and the settings and the mistakes of configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import Config, Settings, read_yaml
from paceline.errors import ConfigError
from paceline.trainer import build_config


def model(**options: Any) -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def dataset(*tables: Any, **options: Any) -> list[int]:
    return list(range(10))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train(model: Any, train_loader: Any, val_loader: Any, device: Any, num_epochs: int) -> None: ...


MANAGED = {"model_fn": model, "dataset_fn": dataset, "loss_fn": loss}
OWN = {"model_fn": model, "dataset_fn": dataset, "train_fn": train}


def settings_of(config: Config, **decided: object) -> Settings:
    """What a config means for a single rank on the CPU."""
    precision = "fp32" if config.precision == "auto" else config.precision
    usual = {"lanes": config.lanes or 1, "precision": precision, "channels_last": config.channels_last is True}
    return Settings.of(config, **{**usual, **decided})


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
