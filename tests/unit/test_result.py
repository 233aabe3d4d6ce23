from __future__ import annotations

import math
import threading
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import result
from paceline.digest import sha256_of
from paceline.result import Result
from paceline.run_folder import RunFolder

FACTS: dict[str, Any] = {
    "metrics": {"val_loss": 0.5},
    "history": [{"epoch": 1, "train_loss": 0.75}],
    "step": 7,
    "epoch": 2,
    "world_size": 2,
    "lanes": 4,
}
# What else a result must have; `write` works some of it out by itself.
FACTS = {f.name: 0 for f in fields(Result) if f.default is MISSING and f.name != "run_dir"} | FACTS
WORKED_OUT = {"weights_sha256", "ema_sha256", "versions"}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def written(tmp_path: Path, model: nn.Module, value: Any) -> Result:
    folder = RunFolder(tmp_path)
    result.write(folder, model, None, value, **FACTS)
    return result.collect(folder).to_result(SimpleNamespace(make_model=make_model))


def test_what_rank_0_leaves_is_what_start_returns(tmp_path: Path) -> None:
    model = make_model()
    returned = written(tmp_path, model, {"accuracy": 0.9})
    assert returned.run_dir == tmp_path
    assert returned.value == {"accuracy": 0.9}
    given = {key: value for key, value in FACTS.items() if key not in WORKED_OUT}
    assert {key: getattr(returned, key) for key in given} == given
    assert returned.weights_sha256 == sha256_of(model.state_dict())
    assert returned.versions["torch"] == torch.__version__


def test_the_model_comes_back_with_its_weights_and_buffers(tmp_path: Path) -> None:
    model = make_model()
    model(torch.randn(8, 3))  # moves BatchNorm's statistics
    loaded = written(tmp_path, model, None).load_model()
    assert loaded is not model
    assert sha256_of(loaded.state_dict()) == sha256_of(model.state_dict())


def test_tied_weights_come_back_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight

    model = Tied()
    folder = RunFolder(tmp_path)
    result.write(folder, model, None, None, **FACTS)
    loaded = result.collect(folder).to_result(SimpleNamespace(make_model=Tied)).load_model()
    assert sha256_of(loaded.state_dict()) == sha256_of(model.state_dict())


def test_without_a_value_there_is_none(tmp_path: Path) -> None:
    assert written(tmp_path, make_model(), None).value is None


def test_values_of_the_users_own_classes_come_back(tmp_path: Path) -> None:
    class Score:
        right = 9

    assert written(tmp_path, make_model(), Score()).value.right == 9


class Exacting(Exception):
    """Pickles, and cannot be made again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_a_value_that_does_not_unpickle_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"what train_fn returned does not unpickle, so result\.value is None"):
        assert written(tmp_path, make_model(), Exacting(1, 2)).value is None


def test_a_value_that_does_not_pickle_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"what train_fn returned does not pickle, so result\.value is None"):
        returned = written(tmp_path, make_model(), threading.Lock())
    assert returned.value is None
    assert returned.step == 7


def test_metrics_that_are_no_number_survive(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    result.write(folder, make_model(), None, None, **{**FACTS, "metrics": {"val_loss": math.nan}})
    assert math.isnan(result.collect(folder).to_result(SimpleNamespace(make_model=make_model)).metrics["val_loss"])


def test_nothing_half_written_stays_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    result.write(folder, make_model(), None, 3, **FACTS)
    assert set(tmp_path.iterdir()) == {folder.weights, folder.value, folder.result}
