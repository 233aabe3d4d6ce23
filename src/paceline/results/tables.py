"""Predictions as a table in a file: which columns it has, and how it is written."""

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

Columns = dict[str, Any]  # names, and arrays of one length
OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")


def check_file(path: Path) -> None:
    """A ConfigError if a table cannot be written there; before any work is done for it."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"--out {path} must end in .csv or .parquet")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--out {path} is in a folder that does not exist; make it first")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "parquet", f"writing {path.name}")


def columns_of(
    predictions: Predictions, loss_fn: Callable[..., Any] | None, classes: Sequence[Any] | None = None
) -> Columns:
    """One number a sample is `prediction`; several are scores of classes, unless the loss compares numbers.

    Where the classes have names, there is also a column `class`.
    """
    indices, outputs = predictions
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        outputs = outputs[:, 0]
    if outputs.ndim == 1:
        return {"index": indices, "prediction": outputs.numpy()}
    if outputs.ndim != 2:
        shape = " × ".join(map(str, outputs.shape[1:]))
        raise ConfigError(
            f"the model gives {shape} numbers for a sample, which make no table; use paceline.load(…).predict()"
        )
    named = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    of_numbers = named in OF_NUMBERS
    name = "prediction" if of_numbers else "score"
    columns = {"index": indices} | {f"{name}_{place}": column.numpy() for place, column in enumerate(outputs.T)}
    return columns if of_numbers else columns | _best_of(outputs, classes)


def _best_of(scores: torch.Tensor, classes: Sequence[Any] | None) -> Columns:
    """The class with the highest score: its place, and its name if there is one for each score."""
    places = scores.argmax(1).numpy()
    if not isinstance(classes, (list, tuple)) or len(classes) != scores.shape[1]:
        return {"prediction": places}
    return {"prediction": places, "class": np.array(classes)[places]}


def write(path: Path, columns: Columns) -> None:
    """Write a table that is seen whole or not at all."""
    import pandas as pd

    table = pd.DataFrame(columns)
    partial = path.with_name(f".{path.name}")
    if path.suffix.lower() == ".csv":
        table.to_csv(partial, index=False)
    else:
        table.to_parquet(partial, index=False)
    partial.replace(path)
