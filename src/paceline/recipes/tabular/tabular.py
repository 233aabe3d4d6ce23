"""A table of numbers with a class in each row: scaled by the training rows alone, then three linear layers.

Made for Covertype (J. A. Blackard, 1998): 581,012 patches of forest, 54 columns, seven kinds of trees. Any CSV or
Parquet file with numbers and a column of classes will do:

    paceline train tabular df=covtype.csv --procs 2
    paceline train tabular df=mine.parquet dataset_args.target=kind dataset_args.classes=[ash,elm,oak] \\
        model_args.features=12 model_args.classes=3
"""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from paceline import StandardScaler, errors


def get_dataset(df=None, target="Cover_Type", classes=()):
    """All columns but the target as numbers, in the order of their names: tables need not have one order.

    A class is its place in `classes`, whichever of them a table has.
    """
    if df is None:
        raise errors.DataError("there is no table; give one: paceline train tabular df=covtype.csv")
    columns = sorted((column for column in df.columns if column != target), key=str)
    numbers = torch.tensor(df[columns].to_numpy("float32"))
    if target not in df:
        print(f"the table has no column {target} (dataset_args.target), so it is good for predictions only", flush=True)
        return Unlabelled(numbers)
    return TensorDataset(numbers, torch.tensor(places_of(df[target], list(classes))))


def places_of(column, classes):
    """The place of each row's class in the list of all."""
    places = column.map({name: place for place, name in enumerate(classes)})
    if places.isna().any():
        strange = column[places.isna()].iloc[0]
        raise errors.DataError(
            f"{column.name}={strange} is not one of dataset_args.classes={classes}; name all classes, in the order "
            "in which they are counted: dataset_args.classes=[ash,elm,oak] model_args.classes=3"
        )
    return places.to_numpy("int64")


class Unlabelled(Dataset):
    """Rows whose class nobody knows yet."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"input": self.numbers[index]}  # what Sequential calls its argument


def get_model(features=54, classes=7, width=256):
    return nn.Sequential(
        StandardScaler(features),
        nn.Linear(features, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip
