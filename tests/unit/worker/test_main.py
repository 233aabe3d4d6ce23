"""worker.py: what needs no process group."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.engine.buffers import Buffers
from paceline.errors import ConfigError
from paceline.run.layout import RunFolder
from paceline.worker.main import check_space, surprises

WORLD: Any = SimpleNamespace(decide=lambda choose: choose())


def stepper(*, has_stepped: bool) -> Any:
    """1,000 weights, of which AdamW keeps two moments each."""
    model = torch.nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    if has_stepped:
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
    return SimpleNamespace(
        replica=SimpleNamespace(module=model, forward_state=Buffers(model)),
        optimizer=optimizer,
        ema=None,
        sharding=None,
        parameters=list(model.parameters()),
    )


@pytest.mark.parametrize("has_stepped", [False, True])
def test_room_for_two_checkpoints_is_asked_for_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_stepped: bool
) -> None:
    needed = 2 * 3 * 4000
    free = {"bytes": needed - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free["bytes"]))
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path} has 0 MB free, two checkpoints need 0 MB; make room"):
        check_space(RunFolder(tmp_path), stepper(has_stepped=has_stepped), WORLD)
    free["bytes"] = needed + 100  # the optimizer's own count of steps is a few bytes more
    check_space(RunFolder(tmp_path), stepper(has_stepped=has_stepped), WORLD)


def test_what_is_hardly_meant_is_told(make_config: Any) -> None:
    [told] = surprises(make_config(max_steps=1000), 5)
    assert told == "max_steps=1000 is not reached: num_epochs=1 ends the run after 5 steps; raise num_epochs"
    [told] = surprises(make_config(ema=0.999), 100)
    assert told.startswith("ema=0.999 is slow for 100 steps: 90% of the average will be the weights at the beginning")
    assert told.endswith("use ema: 0.9")
    assert surprises(make_config(ema=0.99999), 50_000)[0].endswith("use ema: 0.9998")
    for usual in ({"max_steps": 5}, {"ema": 0.9}, {"ema": 0.999}):
        assert surprises(make_config(**usual), 5 if "max_steps" in usual else 10_000) == []
    assert surprises(make_config(max_steps=1000, ema=0.999), None) == []
    assert surprises(make_config(ema=0.999), 20) == []  # a trial
