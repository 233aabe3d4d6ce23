"""The checks of a rank before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.checkpoint.state import CheckpointState, capture
from paceline.errors import ConfigError
from paceline.run.layout import RunFolder
from paceline.worker.main import check_space

WORLD: Any = SimpleNamespace(decide=lambda choose: choose())


def trained(*, has_stepped: bool) -> tuple[CheckpointState, list[torch.nn.Parameter]]:
    """The state of 1,000 weights, of which AdamW keeps two moments each, and the weights."""
    model = torch.nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if has_stepped:
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
    return capture(model, optimizer, None, {}), list(model.parameters())


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_run_needs_space_for_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_stepped: bool
) -> None:
    context: Any = SimpleNamespace(folder=RunFolder(tmp_path), world=WORLD)
    needed = 2 * 3 * 4000
    free = {"bytes": needed - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    with pytest.raises(
        ConfigError, match=f"run_dir={tmp_path} has 0 MB free, but two checkpoints need 0 MB; free some space"
    ):
        check_space(context, *trained(has_stepped=has_stepped))
    free["bytes"] = needed + 100  # the optimizer's own count of steps is a few bytes more
    check_space(context, *trained(has_stepped=has_stepped))
