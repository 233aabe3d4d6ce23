"""What must be right before Ray is there; tests/cluster has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import Trainer, errors, launch
from paceline.config import build

RAW = {"model_fn": lambda: torch.nn.Linear(1, 1), "dataset_fn": list, "loss_fn": "mse_loss", "launcher": "ray"}


def test_a_missing_ray_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r"launcher=ray needs ray; run: pip install 'paceline\[ray\]'"):
        Trainer(**RAW).start()


def test_nodes_are_up_to_ray() -> None:
    with pytest.raises(errors.ConfigError, match=r"nodes=2 is chosen by Ray with launcher=ray; remove it"):
        build({**RAW, "nodes": 2, "rendezvous": "n1:29400"}, folder=Path())
