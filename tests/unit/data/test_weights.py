from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from paceline.config import Config
from paceline.data.sources import SplitSubset
from paceline.data.weights import training_weights
from paceline.errors import DataError
from support.configs import MANAGED, problems

MakeConfig = Callable[..., Config]
SIZE = 6


@pytest.fixture
def table() -> pd.DataFrame:
    return pd.DataFrame({"weight": [0, 1, 2, 3, 4, 5], "other": list("abcdef")})


def of_labels(dataset: Any) -> Any:
    return [float(sample) for sample in dataset]


@pytest.mark.parametrize(
    "given",
    [
        list(range(SIZE)),
        np.arange(SIZE),
        torch.arange(SIZE),
        torch.arange(SIZE, dtype=torch.float32, requires_grad=True),
        pd.Series(range(SIZE), index=range(10, 16)),
        of_labels,
        "weight",
    ],
    ids=["list", "numpy", "torch", "with gradient", "series", "function", "column"],
)
def test_weights_are_a_column_numbers_or_a_function_of_the_data_set(
    make_config: MakeConfig, table: pd.DataFrame, given: Any
) -> None:
    weights = training_weights(make_config(sample_weights=given, df=table), range(SIZE))
    assert weights.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("given", ["weight", of_labels, list(range(SIZE))], ids=["column", "function", "list"])
def test_a_split_takes_the_weights_of_its_samples(make_config: MakeConfig, table: pd.DataFrame, given: Any) -> None:
    training = SplitSubset(range(SIZE), 3, range(4))
    weights = training_weights(make_config(sample_weights=given, df=table), training)
    assert weights.tolist() == [training[index] for index in range(4)]


def test_a_column_of_a_file_is_read(make_config: MakeConfig, table: pd.DataFrame, tmp_path: Path) -> None:
    table.to_csv(tmp_path / "table.csv")
    config = make_config(sample_weights="weight", df=tmp_path / "table.csv")
    assert training_weights(config, range(SIZE)).sum() == 15
    with pytest.raises(DataError, match="sample_weights='wieght' is not a column of df; set a column of df"):
        training_weights(make_config(sample_weights="wieght", df=tmp_path / "table.csv"), range(SIZE))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([1.0, -2.0], "sample_weights has -2 for sample 1; weights must be finite and not negative"),
        ([1.0, float("nan")], "sample_weights has nan for sample 1; weights must be finite and not negative"),
        (torch.tensor([float("inf"), 1.0]), "sample_weights has inf for sample 0; weights must be finite"),
        ([0, 0], "sample_weights has no positive weight; add some"),
        (np.ones((2, 2)), "sample_weights is a ndarray without one number for each sample"),
        (3.0, "sample_weights is a float without one number for each sample; set a column of df, one number"),
        (["a", "b"], "sample_weights=['a', 'b'] must be numbers, one for each sample"),
        ("weight", "sample_weights='weight' names a column, but there is no df"),
        ("nowhere:weights", "sample_weights='nowhere:weights' names a module that does not exist"),
    ],
    ids=str,
)
def test_unusable_weights_are_reported_before_a_process_starts(given: Any, problem: str) -> None:
    [found] = problems({**MANAGED, "sample_weights": given})
    assert found.startswith(problem)


def test_a_missing_column_is_reported_before_a_process_starts(table: pd.DataFrame) -> None:
    [found] = problems({**MANAGED, "df": table, "sample_weights": "wieght"})
    assert found.startswith("sample_weights='wieght' is not a column of df; set a column of df")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda dataset: [1.0] * 5, "sample_weights has 5 numbers for 6 samples; give one per sample"),
        (lambda dataset: None, "sample_weights is a NoneType without one number for each sample"),
        (lambda dataset: [0, 0, 0, -1, 0, 0], "sample_weights has -1 for sample 3"),
        (lambda dataset: [1e308] * 6, "sample_weights of the training samples sum to inf"),
    ],
    ids=["length", "none", "negative", "overflow"],
)
def test_unusable_results_of_a_function_are_refused(make_config: MakeConfig, given: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        training_weights(make_config(sample_weights=given), range(SIZE))


def test_weight_only_in_the_validation_data_is_refused(make_config: MakeConfig) -> None:
    training = SplitSubset(range(SIZE), 3, range(4))
    used = {training[index] for index in range(4)}
    given = [float(index not in used) for index in range(SIZE)]
    with pytest.raises(
        DataError, match=r"sample_weights of the training samples sum to 0\.0; use positive, finite weights"
    ):
        training_weights(make_config(sample_weights=given), training)


def test_weights_are_not_written_into_the_config_file(make_config: MakeConfig) -> None:
    assert "sample_weights: <array>" in make_config(sample_weights=[1, 2]).to_yaml()
    assert "sample_weights: <ndarray>" in make_config(sample_weights=np.ones(3)).to_yaml()
    assert f"sample_weights: {__name__}:of_labels" in make_config(sample_weights=of_labels).to_yaml()
