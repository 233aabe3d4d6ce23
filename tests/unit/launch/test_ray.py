"""The launcher `ray` without Ray; tests/cluster has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline import Trainer, errors
from paceline.config import build

RAW = {"model_fn": lambda: torch.nn.Linear(1, 1), "dataset_fn": list, "loss_fn": "mse_loss", "launcher": "ray"}


def test_a_missing_ray_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "paceline.launch.ray", raising=False)
    with pytest.raises(errors.ConfigError, match=r"launcher=ray needs ray; run: pip install 'paceline\[ray\]'"):
        Trainer(**RAW).start()


def test_nodes_are_refused_because_ray_places_the_processes() -> None:
    with pytest.raises(errors.ConfigError, match=r"nodes=2 is chosen by Ray with launcher=ray; remove it"):
        build({**RAW, "nodes": 2, "rendezvous": "n1:29400"}, folder=Path())
