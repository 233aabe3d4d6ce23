from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from paceline.errors import ConfigError, MissingExtra
from paceline.results import tables
from paceline.run.outcome import Predictions

INDICES = np.array([7, 2, 5])


def columns(outputs: torch.Tensor, loss_fn: object = nn.functional.cross_entropy) -> dict[str, list[float]]:
    made = tables.columns_of(Predictions(INDICES, outputs), loss_fn)  # type: ignore[arg-type]
    return {name: column.tolist() for name, column in made.items()}


def test_several_outputs_are_scores_and_the_highest_is_the_prediction() -> None:
    outputs = torch.tensor([[0.5, 0.25], [-1.0, 2.0], [3.0, 0.0]])
    assert columns(outputs) == {
        "index": [7, 2, 5],
        "score_0": [0.5, -1.0, 3.0],
        "score_1": [0.25, 2.0, 0.0],
        "prediction": [0, 1, 0],
    }


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(["ham", "spam"], ["ham", "spam", "ham"]), ((1, 2), [1, 2, 1]), (2, None), (["ham"], None), (None, None)],
)
def test_class_names_get_a_column(classes: object, expected: list[object] | None) -> None:
    predicted = Predictions(INDICES, torch.tensor([[0.5, 0.25], [-1.0, 2.0], [3.0, 0.0]]))
    made = tables.columns_of(predicted, nn.functional.cross_entropy, classes)  # type: ignore[arg-type]
    assert made["prediction"].tolist() == [0, 1, 0]
    assert (made["class"].tolist() if "class" in made else None) == expected
    assert "class" not in tables.columns_of(predicted, nn.functional.mse_loss, ["ham", "spam"])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_single_output_is_the_prediction(shape: tuple[int, ...]) -> None:
    assert columns(torch.arange(3.0).reshape(shape)) == {"index": [7, 2, 5], "prediction": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, nn.L1Loss()])
def test_several_outputs_of_a_regression_have_no_best_class(loss_fn: object) -> None:
    assert list(columns(torch.zeros(3, 2), loss_fn)) == ["index", "prediction_0", "prediction_1"]


def test_outputs_that_do_not_fit_a_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model returns 4 × 8 numbers per sample, which do not fit in a table"):
        columns(torch.zeros(3, 4, 8))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_numbers_are_written_with_all_digits(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    outputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    path = tmp_path / f"p.{ending}"
    tables.write(path, tables.columns_of(Predictions(np.arange(50), outputs), None))
    read = pd.read_csv(path) if ending == "csv" else pd.read_parquet(path)
    assert torch.equal(torch.tensor(read[["score_0", "score_1", "score_2"]].to_numpy(), dtype=torch.float32), outputs)
    assert read["index"].tolist() == list(range(50))
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_package_is_named_before_any_work(hide_package: Callable[[str], None]) -> None:
    hide_package("pyarrow")
    tables.check_file(Path("p.csv"))
    with pytest.raises(MissingExtra, match=r"writing p.parquet needs pyarrow; run: pip install 'paceline\[parquet\]'"):
        tables.check_file(Path("p.parquet"))
