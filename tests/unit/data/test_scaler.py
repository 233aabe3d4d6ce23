"""StandardScaler: the statistics of the training data, whatever the form of its samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import StandardScaler
from paceline.data.scaler import fit_scalers
from paceline.data.sources import SplitSubset
from paceline.errors import DataError
from paceline.observe.progress import Progress
from support.datasets import MapDataset, StreamDataset

TABLE = torch.randn(9001, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 5.0, 1.0]) + 1e4
TABLE[:, 2] = 0.1


def fitted(dataset: Any, of: int | str = 0) -> StandardScaler:
    model = nn.Sequential(StandardScaler(3, of), nn.Linear(3, 1))
    fit_scalers(model, dataset, 0, Progress())
    return model[0]  # type: ignore[return-value]


def same(scaler: StandardScaler, rows: torch.Tensor) -> bool:
    exact = rows.double()
    spread = exact.std(0, correction=0)
    spread[2] = 1.0
    return torch.allclose(scaler.mean, exact.mean(0).float()) and torch.allclose(scaler.spread, spread.float())


def test_mean_and_spread_are_those_of_the_samples_over_many_chunks() -> None:
    scaler = fitted(TensorDataset(TABLE, torch.zeros(9001)))
    assert same(scaler, TABLE)
    scaled = scaler(TABLE.double())
    torch.testing.assert_close(
        scaled[:, 1].std(correction=0), torch.tensor(1.0, dtype=torch.float64), rtol=1e-4, atol=0
    )
    assert scaled[:, 2].abs().max() == 0  # a feature that never changes


def test_samples_as_dicts_are_scaled_by_key() -> None:
    dataset = MapDataset(len(TABLE), lambda index: {"numbers": TABLE[index], "labels": 0})
    assert same(fitted(dataset, "numbers"), TABLE)


def test_only_the_given_subset_is_measured() -> None:
    part = SplitSubset(TensorDataset(TABLE, torch.zeros(9001)), seed=3, positions=range(4500))
    scaler = fitted(part)
    assert same(scaler, TABLE[part.base_indices(range(4500))])
    assert not same(scaler, TABLE)


def test_the_statistics_are_saved_with_the_weights() -> None:
    scaler = fitted(TensorDataset(TABLE, torch.zeros(9001)))
    other = StandardScaler(3)
    other.load_state_dict(scaler.state_dict())
    assert torch.equal(other(TABLE), scaler(TABLE))


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match="StandardScaler 0 cannot be fitted on part 'numbers' of the samples"):
        fitted(TensorDataset(TABLE, torch.zeros(9001)), "numbers")
    with pytest.raises(DataError, match="StandardScaler 0 cannot be fitted on part 1"):
        fitted(TensorDataset(TABLE, torch.zeros(9001, 2)), 1)
    with pytest.raises(DataError, match="needs a data set with a length"):
        fitted(StreamDataset(list))


def test_a_feature_that_is_not_finite_is_named() -> None:
    rows = TABLE[:50].clone()
    rows[7, 1] = torch.nan
    with pytest.raises(
        DataError, match=r"StandardScaler 0 cannot be fitted: feature 1 .* of the training data has values that"
    ):
        fitted(TensorDataset(rows, torch.zeros(50)))
