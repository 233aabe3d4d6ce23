"""A table of numbers with a class in each row: scaled by the training rows alone, then three linear layers.

Made for Covertype (J. A. Blackard, 1998): 581,012 patches of forest, 54 columns, seven kinds of trees. Any CSV or
Parquet file with numbers and a column of classes will do:

    paceline train tabular df=covtype.csv --procs 2
    paceline train tabular df=mine.parquet dataset_args.target=kind model_args.features=12 model_args.classes=3
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import StandardScaler, errors


def get_dataset(df=None, target="Cover_Type"):
    """All columns but the target as numbers; classes count from 0, in their order."""
    if df is None:
        raise errors.DataError("there is no table; give one: paceline train tabular df=covtype.csv")
    if target not in df:
        raise errors.DataError(f"the table has no column {target}; name the classes' by dataset_args.target")
    numbers = torch.tensor(df.drop(columns=target).to_numpy("float32"))
    classes = df[target].astype("category").cat.codes.to_numpy("int64")
    return TensorDataset(numbers, torch.tensor(classes))


def get_model(features=54, classes=7, width=256):
    return nn.Sequential(
        StandardScaler(features),
        nn.Linear(features, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip
