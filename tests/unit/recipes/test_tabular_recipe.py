"""The recipe `tabular`: a table becomes numbers and classes, and the model begins by scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from paceline import StandardScaler
from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.engine.replica import run_model
from paceline.errors import DataError

pandas = pytest.importorskip("pandas")


@pytest.fixture
def config() -> Config:
    path = find_config("tabular")
    return build(read_yaml(path), folder=path.parent)


def table(**columns: Any) -> Any:
    return pandas.DataFrame({"height": [3, 1, 2], "slope": [0.5, 0.25, 1.0], **columns})


@pytest.mark.parametrize(
    ("column", "classes", "places"),
    [
        ([7, 2, 7], [1, 2, 7], [2, 1, 2]),
        ([7.0, 2.0, 1.0], [1, 2, 7], [2, 1, 0]),
        (["elm", "oak", "elm"], ["ash", "elm", "oak"], [1, 2, 1]),
        ([True, False, True], [False, True], [1, 0, 1]),
        (pandas.Categorical(["oak", "elm", "oak"]), ["oak", "ash", "elm"], [0, 2, 0]),
    ],
)
def test_a_class_is_its_place_in_the_list_whichever_a_table_has(
    config: Config, column: Any, classes: list[Any], places: list[int]
) -> None:
    numbers, found = config.function("dataset_fn")(table(kind=column), target="kind", classes=classes).tensors
    assert numbers.tolist() == [[3, 0.5], [1, 0.25], [2, 1]]
    assert found.tolist() == places
    assert found.dtype == torch.int64


def test_columns_go_by_their_names(config: Config) -> None:
    columns = table(Cover_Type=[7, 2, 1])
    make = config.function("dataset_fn")
    ours, theirs = (make(each, **config.dataset_args).tensors[0] for each in (columns, columns[columns.columns[::-1]]))
    assert torch.equal(ours, theirs)


def test_covertypes_classes_are_part_of_the_config(config: Config) -> None:
    made = config.function("dataset_fn")(table(Cover_Type=[7, 2, 1]), **config.dataset_args)
    assert made.tensors[1].tolist() == [6, 1, 0]


@pytest.mark.parametrize(("column", "strange"), [([7, 8, 9], "8"), (["7", "7", "7"], "7"), ([1, None, 2], "nan")])
def test_a_class_that_the_list_has_not_is_said(config: Config, column: list[Any], strange: str) -> None:
    with pytest.raises(DataError) as caught:
        config.function("dataset_fn")(table(Cover_Type=column), **config.dataset_args)
    assert str(caught.value).startswith(
        f"Cover_Type={strange} is not one of dataset_args.classes=[1, 2, 3, 4, 5, 6, 7]"
    )
    assert "name all classes" in str(caught.value)


def test_a_missing_table_is_said(config: Config) -> None:
    with pytest.raises(DataError, match="there is no table; give one: paceline train tabular df="):
        config.function("dataset_fn")()


def test_a_table_without_classes_is_good_for_predictions(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    rows = config.function("dataset_fn")(table(), **config.dataset_args)
    assert "the table has no column Cover_Type (dataset_args.target)" in capsys.readouterr().out
    model = config.function("model_fn")(features=2, classes=3, width=8)
    output, target = run_model(model, default_collate([rows[place] for place in range(len(rows))]))
    assert output.shape == (3, 3)
    assert target is None


def test_its_model_scales_first_and_scores_each_class(config: Config) -> None:
    model = config.function("model_fn")(features=2, classes=3, width=8)
    assert isinstance(model[0], StandardScaler)
    assert model(torch.randn(5, 2)).shape == (5, 3)
