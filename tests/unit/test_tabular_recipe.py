"""The recipe `tabular`: a table becomes numbers and classes, and the model begins by scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline import StandardScaler
from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.errors import DataError

pandas = pytest.importorskip("pandas")


@pytest.fixture
def config() -> Config:
    path = find_config("tabular")
    return build(read_yaml(path), folder=path.parent)


def table(**columns: Any) -> Any:
    return pandas.DataFrame({"height": [3, 1, 2], "slope": [0.5, 0.25, 1.0], **columns})


def test_classes_count_from_0_in_their_order_and_the_rest_are_numbers(config: Config) -> None:
    make = config.function("dataset_fn")
    numbers, classes = make(table(Cover_Type=[7, 2, 7])).tensors
    assert numbers.tolist() == [[3, 0.5], [1, 0.25], [2, 1]]
    assert classes.tolist() == [1, 0, 1]
    assert make(table(kind=["b", "c", "a"]), target="kind").tensors[1].tolist() == [1, 2, 0]


def test_a_table_that_is_missing_or_has_no_classes_is_said(config: Config) -> None:
    make = config.function("dataset_fn")
    with pytest.raises(DataError, match="there is no table; give one: paceline train tabular df="):
        make()
    with pytest.raises(DataError, match="has no column Cover_Type; name the classes' by"):
        make(table())


def test_its_model_scales_first_and_scores_each_class(config: Config) -> None:
    model = config.function("model_fn")(features=2, classes=3, width=8)
    assert isinstance(model[0], StandardScaler)
    assert model(torch.randn(5, 2)).shape == (5, 3)
