"""Reads the data sets that are tables, Covertype and SST-2, from the files in which they are distributed."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.hub.folder import DatasetFolder

if TYPE_CHECKING:
    from pandas import DataFrame

FEATURES = (
    "Elevation", "Aspect", "Slope", "Horizontal_Distance_To_Hydrology", "Vertical_Distance_To_Hydrology",
    "Horizontal_Distance_To_Roadways", "Hillshade_9am", "Hillshade_Noon", "Hillshade_3pm",
    "Horizontal_Distance_To_Fire_Points", *(f"Wilderness_Area{number}" for number in range(1, 5)),
    *(f"Soil_Type{number}" for number in range(1, 41)),
)  # fmt: skip
TARGET = "Cover_Type"  # from 1 to 7


def table(name: str, train: bool = True, root: str | os.PathLike[str] | None = None) -> DataFrame:
    """Return a data set as a DataFrame: `covtype`, which has no test split, or `sst2`, whose test split is its dev.tsv.

    The files are in `root`, by default $PACELINE_HOME/datasets/NAME.
    """
    source = DatasetFolder.of(name, root)
    if source.dataset.layout not in ("covtype", "sst2"):
        raise ConfigError(f"{name} is not a table; the tables are covtype and sst2")
    if source.dataset.layout == "sst2":
        return _read_sst2(source, "train.tsv" if train else "dev.tsv")
    if not train:
        raise ConfigError("covtype has no test split; use a part of its rows for validation (val_fraction)")
    return _read_covtype(source)


def _read_covtype(source: DatasetFolder) -> DataFrame:
    import pandas

    [file] = source.dataset.files
    [content] = file.contents
    path = source.find(file.name, *(form.path for form in content.forms))
    with source.unpacking(path, file), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        data = stream.read()
    sizes = [form.size for form in content.forms]
    if len(data) not in sizes:
        raise source.damaged(path, f"contains {len(data):,} bytes, not {' or '.join(f'{size:,}' for size in sizes)}")
    columns = [*FEATURES, TARGET]
    has_header = data.startswith(FEATURES[0].encode())
    try:
        rows: DataFrame = pandas.read_csv(
            io.BytesIO(data), header=0 if has_header else None, names=None if has_header else columns, dtype="int32"
        )
        rows = rows[columns]
    except (ValueError, KeyError) as error:  # KeyError: a header with other names
        raise source.damaged(path, f"is not the table of Covertype ({' '.join(str(error).split())})") from None
    return rows


def _read_sst2(source: DatasetFolder, name: str) -> DataFrame:
    import pandas

    [file] = source.dataset.files
    path = source.find(name, file.name)
    if path.name == name:
        data = path.read_bytes()
    else:
        with source.unpacking(path, file), zipfile.ZipFile(path) as archive:
            data = archive.read(f"{Path(file.name).stem}/{name}")
    try:
        rows: DataFrame = pandas.read_csv(
            io.BytesIO(data), sep="\t", quoting=csv.QUOTE_NONE, dtype={"sentence": "str", "label": "int64"},
            na_filter=False,
        )  # fmt: skip
    except ValueError as error:
        raise source.damaged(path, f"is not a table of sentences ({' '.join(str(error).split())})") from None
    if list(rows.columns) != ["sentence", "label"] or not rows["label"].isin((0, 1)).all():
        raise source.damaged(path, "does not have the columns sentence and label, with labels 0 and 1")
    return rows
