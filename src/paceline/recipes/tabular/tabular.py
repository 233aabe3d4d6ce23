"""A table of numbers with a class in each row: scaled by statistics of the training rows, then three linear layers.

The defaults are for Covertype (J. A. Blackard, 1998): 581,012 patches of forest, 54 columns, seven kinds of trees. Any
CSV or Parquet file with numbers and a column of classes can be used:

    paceline data get covtype
    paceline train tabular --procs 2
    paceline train tabular df=mine.parquet dataset_args.target=kind dataset_args.classes=[ash,elm,oak] \\
        model_args.features=12 model_args.classes=3
"""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import StandardScaler, datasets, errors


def get_dataset(df=None, target="Cover_Type", classes=(), root=None):
    """Return all columns except the target as numbers, and the classes; without a table, those of Covertype.

    Columns are sorted by name, so that their order in a table does not matter. A class is its index in `classes`,
    even if a table does not contain all of them.
    """
    if df is None and target != "Cover_Type":
        raise errors.DataError("no table is given; set df=FILE")
    df = datasets.table("covtype", root=root) if df is None else df
    columns = sorted((column for column in df.columns if column != target), key=str)
    numbers = torch.tensor(df[columns].to_numpy("float32"))
    if target not in df:
        print(
            f"the table has no column {target} (dataset_args.target): it can be used for predictions only",
            flush=True,
        )
        return UnlabelledRows(numbers)
    return TensorDataset(numbers, torch.tensor(indices_of(df[target], list(classes))))


def indices_of(column, classes):
    """Return the index of each row's class in the list of classes."""
    indices = column.map({name: index for index, name in enumerate(classes)})
    if indices.isna().any():
        unknown = column[indices.isna()].iloc[0]
        raise errors.DataError(
            f"{column.name}={unknown} is not one of dataset_args.classes={classes}; list all classes "
            "in the order of their indices: dataset_args.classes=[ash,elm,oak] model_args.classes=3"
        )
    return indices.to_numpy("int64")


class UnlabelledRows(Dataset):
    """Rows without a class, for predictions."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"input": self.numbers[index]}  # the argument's name in nn.Sequential.forward


def get_model(features=54, classes=7, width=256):
    return nn.Sequential(
        StandardScaler(features),
        nn.Linear(features, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip
