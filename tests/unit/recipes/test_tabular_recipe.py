"""The recipe `tabular`: a table as numbers and classes, and a model that scales its inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from paceline import StandardScaler
from paceline.cli.arguments import find_config
from paceline.config import Config, build, read_yaml
from paceline.engine.replica import run_model
from paceline.errors import DataError
from paceline.hub.tables import FEATURES

pandas = pytest.importorskip("pandas")


@pytest.fixture
def config() -> Config:
    path = find_config("tabular")
    return build(read_yaml(path), folder=path.parent)


def table(**columns: Any) -> Any:
    return pandas.DataFrame({"height": [3, 1, 2], "slope": [0.5, 0.25, 1.0], **columns})


@pytest.mark.parametrize(
    ("column", "classes", "indices"),
    [
        ([7, 2, 7], [1, 2, 7], [2, 1, 2]),
        ([7.0, 2.0, 1.0], [1, 2, 7], [2, 1, 0]),
        (["elm", "oak", "elm"], ["ash", "elm", "oak"], [1, 2, 1]),
        ([True, False, True], [False, True], [1, 0, 1]),
        (pandas.Categorical(["oak", "elm", "oak"]), ["oak", "ash", "elm"], [0, 2, 0]),
    ],
)
def test_a_class_is_its_index_in_the_list_of_all_classes(
    config: Config, column: Any, classes: list[Any], indices: list[int]
) -> None:
    numbers, found = config.function("dataset_fn")(table(kind=column), target="kind", classes=classes).tensors
    assert numbers.tolist() == [[3, 0.5], [1, 0.25], [2, 1]]
    assert found.tolist() == indices
    assert found.dtype == torch.int64


def test_the_order_of_columns_does_not_matter(config: Config) -> None:
    columns = table(Cover_Type=[7, 2, 1])
    make = config.function("dataset_fn")
    first, second = (make(df, **config.dataset_args).tensors[0] for df in (columns, columns[columns.columns[::-1]]))
    assert torch.equal(first, second)


def test_the_config_lists_the_classes_of_covertype(config: Config) -> None:
    dataset = config.function("dataset_fn")(table(Cover_Type=[7, 2, 1]), **config.dataset_args)
    assert dataset.tensors[1].tolist() == [6, 1, 0]


@pytest.mark.parametrize(("column", "unknown"), [([7, 8, 9], "8"), (["7", "7", "7"], "7"), ([1, None, 2], "nan")])
def test_a_class_that_is_not_in_the_list_is_refused(config: Config, column: list[Any], unknown: str) -> None:
    with pytest.raises(DataError) as caught:
        config.function("dataset_fn")(table(Cover_Type=column), **config.dataset_args)
    assert str(caught.value).startswith(
        f"Cover_Type={unknown} is not one of dataset_args.classes=[1, 2, 3, 4, 5, 6, 7]"
    )
    assert "list all classes" in str(caught.value)


def test_without_a_table_covertype_is_read(config: Config, tmp_path: Path, monkeypatch) -> None:
    make = config.function("dataset_fn")
    with pytest.raises(DataError, match=r"covtype\.data\.gz does not exist; run: paceline data get covtype"):
        make(root=tmp_path)
    rows = pandas.DataFrame([[*range(54), 7], [*range(54), 1]], columns=[*FEATURES, "Cover_Type"])
    monkeypatch.setattr("paceline.datasets.table", lambda name, root: rows)
    assert make(**config.dataset_args).tensors[1].tolist() == [6, 0]


def test_a_missing_table_is_reported(config: Config) -> None:
    with pytest.raises(DataError, match="no table is given; set df=FILE"):
        config.function("dataset_fn")(target="kind")


def test_a_table_without_classes_is_for_predictions(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    rows = config.function("dataset_fn")(table(), **config.dataset_args)
    assert "the table has no column Cover_Type (dataset_args.target)" in capsys.readouterr().out
    model = config.function("model_fn")(features=2, classes=3, width=8)
    output, target = run_model(model, default_collate([rows[index] for index in range(len(rows))]))
    assert output.shape == (3, 3)
    assert target is None


def test_the_model_scales_its_inputs_and_returns_a_logit_for_each_class(config: Config) -> None:
    model = config.function("model_fn")(features=2, classes=3, width=8)
    assert isinstance(model[0], StandardScaler)
    assert model(torch.randn(5, 2)).shape == (5, 3)
