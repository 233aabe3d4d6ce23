"""Writes predictions as a table: chooses its columns, and writes a CSV or Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    import torch

    from paceline.run.outcome import Predictions

Columns = dict[str, Any]  # arrays of equal length, by name
REGRESSION_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss",
)  # fmt: skip


def check_file(path: Path) -> None:
    """Raise ConfigError if no table can be written to this path; called before the predictions are computed."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"--out {path} must end in .csv or .parquet")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--out {path} is in a folder that does not exist; create it first")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "parquet", f"writing {path.name}")


def columns_of(
    predictions: Predictions, loss_fn: Callable[..., Any] | None, classes: Sequence[Any] | None = None
) -> Columns:
    """The columns of a table of predictions.

    A single output per sample is `prediction`. Several outputs are scores of classes, with the best class as
    `prediction` and its name as `class`; with a regression loss they are `prediction_0` and so on.
    """
    indices, outputs = predictions
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    if outputs.ndim == 1:
        return {"index": indices, "prediction": outputs.numpy()}
    if outputs.ndim != 2:
        shape = " × ".join(map(str, outputs.shape[1:]))
        raise ConfigError(
            f"the model returns {shape} numbers per sample, which do not fit in a table; use paceline.load(…).predict()"
        )
    is_regression = getattr(loss_fn, "__name__", type(loss_fn).__name__) in REGRESSION_LOSSES
    name = "prediction" if is_regression else "score"
    columns = {"index": indices} | {f"{name}_{place}": column.numpy() for place, column in enumerate(outputs.T)}
    return columns if is_regression else columns | _best_class(outputs, classes)


def _best_class(scores: torch.Tensor, classes: Sequence[Any] | None) -> Columns:
    """The index of the highest score, and the name of its class if there is one name for each score."""
    best = scores.argmax(1).numpy()
    if not isinstance(classes, (list, tuple)) or len(classes) != scores.shape[1]:
        return {"prediction": best}
    return {"prediction": best, "class": np.array(classes)[best]}


def write(path: Path, columns: Columns) -> None:
    """Write a table atomically: readers see the old file or the new one."""
    import pandas as pd

    table = pd.DataFrame(columns)
    partial = path.with_name(f".{path.name}")
    if path.suffix.lower() == ".csv":
        table.to_csv(partial, index=False)
    else:
        table.to_parquet(partial, index=False)
    partial.replace(path)
