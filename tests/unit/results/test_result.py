from __future__ import annotations

import json
import math
import threading
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.engine.digest import sha256_of
from paceline.results.result import Result, result_of
from paceline.run import outcome
from paceline.run.layout import RunFolder
from paceline.run.lifecycle import clear_last_attempt
from paceline.worker.result import write_result
from support.models import Tied

FACTS: dict[str, Any] = {
    "metrics": {"val_loss": 0.5},
    "history": [{"epoch": 1, "step": 7, "train_loss": 0.75}],
    "optimizer_sha256": None,
    "step": 7,
    "epoch": 2,
    "world_size": 2,
    "lanes": 4,
}
# The other fields of a result; `write_result` computes some of them itself.
FACTS = {f.name: 0 for f in fields(Result) if f.default is MISSING and f.name != "run_dir"} | FACTS
WORKED_OUT = {"weights_sha256", "ema_sha256", "versions"}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def collected(folder: RunFolder, train_fn: Any = None, model_fn: Any = make_model) -> Result:
    """The result in a run folder, as `start()` returns it."""
    config = Config(model_fn=model_fn, train_fn=train_fn)
    return result_of(outcome.collect(folder), config, Path())


def written(tmp_path: Path, model: nn.Module, value: Any) -> Result:
    folder = RunFolder(tmp_path)
    write_result(folder, model, None, value, **FACTS)
    return collected(folder, print)


def test_the_result_has_what_rank_0_wrote(tmp_path: Path) -> None:
    model = make_model()
    returned = written(tmp_path, model, {"accuracy": 0.9})
    assert returned.run_dir == tmp_path
    assert returned.value == {"accuracy": 0.9}
    given = {key: value for key, value in FACTS.items() if key not in WORKED_OUT}
    assert {key: getattr(returned, key) for key in given} == given
    assert returned.weights_sha256 == sha256_of(model.state_dict())
    assert returned.versions["torch"] == torch.__version__


def test_the_model_has_its_weights_and_buffers(tmp_path: Path) -> None:
    model = make_model()
    model(torch.randn(8, 3))  # updates the statistics of BatchNorm
    loaded = written(tmp_path, model, None).load_model()
    assert loaded is not model
    assert sha256_of(loaded.state_dict()) == sha256_of(model.state_dict())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    folder = RunFolder(tmp_path)
    write_result(folder, model, None, None, **FACTS)
    loaded = collected(folder, None, Tied).load_model()
    assert sha256_of(loaded.state_dict()) == sha256_of(model.state_dict())


def test_without_a_return_value_the_value_is_none(tmp_path: Path) -> None:
    assert written(tmp_path, make_model(), None).value is None


def test_values_of_user_classes_are_returned(tmp_path: Path) -> None:
    class Score:
        right = 9

    assert written(tmp_path, make_model(), Score()).value.right == 9


PLAIN = [None, True, 3, -0.5, math.inf, "größe", [], {}, {"a": [1, {"b": None}], "c": "x"}]
LOOP: list[Any] = []
LOOP.append(LOOP)
OTHERS = [(1, 2), [(1,)], {1: "a"}, {"a": np.float64(0.5)}, [np.int64(3)], b"x", 10**5000, LOOP]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_stored_as_json(tmp_path: Path, value: Any) -> None:
    folder = RunFolder(tmp_path)
    outcome.write_value(folder, value)
    assert [path.name for path in tmp_path.iterdir()] == ["value.json"]
    assert json.loads(folder.value.read_text()) == value
    assert outcome.collect(folder).load_value() == value


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_values_that_json_would_change_keep_their_types(tmp_path: Path, value: Any) -> None:
    folder = RunFolder(tmp_path)
    outcome.write_value(folder, value)
    assert [path.name for path in tmp_path.iterdir()] == ["value.pkl"]
    returned = outcome.collect(folder).load_value()
    assert type(returned) is type(value)
    assert cloudpickle.dumps(returned) == cloudpickle.dumps(value)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickled_value_is_loaded_only_on_access(tmp_path: Path) -> None:
    returned = written(tmp_path, make_model(), Touch(tmp_path / "executed"))
    assert not (tmp_path / "executed").exists()
    _ = returned.value
    assert (tmp_path / "executed").exists()


def test_a_managed_run_has_no_value(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_result(folder, make_model(), None, Touch(tmp_path / "executed"), **FACTS)
    assert collected(folder, None).value is None
    assert not (tmp_path / "executed").exists()


def test_a_value_from_before_the_start_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.value, folder.pickled_value):
        path.write_bytes(b"")
    clear_last_attempt(folder)
    assert outcome.collect(folder).value is None
    assert list(tmp_path.iterdir()) == []


class Exacting(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_a_value_that_cannot_be_unpickled_is_none_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the return value of train_fn cannot be unpickled, so result\.value is None"):
        assert written(tmp_path, make_model(), Exacting(1, 2)).value is None


def test_a_value_that_cannot_be_pickled_is_none_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the return value of train_fn cannot be pickled, so result\.value is None"):
        returned = written(tmp_path, make_model(), threading.Lock())
    assert returned.value is None
    assert returned.step == 7


def test_metrics_that_are_nan_or_infinite_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_result(folder, make_model(), None, None, **{**FACTS, "metrics": {"val_loss": math.nan}})
    assert math.isnan(collected(folder, None).metrics["val_loss"])


def test_no_partly_written_file_remains(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_result(folder, make_model(), None, 3, **FACTS)
    assert set(tmp_path.iterdir()) == {folder.weights, folder.value, folder.result}
