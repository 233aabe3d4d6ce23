"""Tables, the user's data sets, and their split into training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.config import Config
from paceline.data.order import Indices, indices_at
from paceline.errors import ConfigError, DataError, MissingExtra
from paceline.user_code import described, with_place

SPLIT_EPOCH = -1  # the order of this "epoch" decides which samples are for validation; training counts from 0
TABLE_LIMIT = 1 << 22  # samples; up to this size a subset stores its indices (32 MB) instead of computing them


class SplitSubset(Dataset[Any]):
    """A range of positions in the seeded split of a data set."""

    def __init__(self, base: Any, seed: int, positions: range) -> None:
        self.base = base
        self.seed = seed
        self.positions = positions
        self._table = self._look_up(np.arange(len(positions))) if len(positions) <= TABLE_LIMIT else None

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.base[self.base_indices([index % len(self)])[0]]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return fetch(self.base, self.base_indices(indices))

    def base_indices(self, indices: Sequence[int]) -> list[int]:
        """The indices of the same samples in the whole data set."""
        return self.base_index_array(np.asarray(indices)).tolist()  # type: ignore[no-any-return]

    def base_index_array(self, indices: Indices) -> Indices:
        """`base_indices` of an array, as an array."""
        return self._look_up(indices) if self._table is None else self._table[indices]

    def _look_up(self, indices: Indices) -> Indices:
        size = len(self.base)
        return indices_at(seed=self.seed, epoch=SPLIT_EPOCH, size=size, positions=indices + self.positions.start)


def fetch(dataset: Any, indices: Sequence[int]) -> Any:
    """The samples at `indices`, by `__getitems__` if the data set has it."""
    try:
        if getattr(dataset, "__getitems__", None):
            return dataset.__getitems__(indices)
        return [dataset[index] for index in indices]
    except StopIteration as error:  # it would end the loop over batches without an error
        raise DataError("the data set raised StopIteration for a sample; it must return one for every index") from error


def original_indices(dataset: Any, indices: Sequence[int]) -> list[int]:
    """The indices of samples in the data set that dataset_fn returned."""
    return dataset.base_indices(indices) if isinstance(dataset, SplitSubset) else list(indices)


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be read from its beginning, as torch's IterableDataset."""
    # The __getitem__ of an IterableDataset only raises.
    is_indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__iter__") and not is_indexed


def size_of(dataset: Any) -> int | None:
    """The number of samples; None for an iterable data set."""
    return None if is_stream(dataset) else len(dataset)


def make_datasets(config: Config) -> tuple[Any, Any | None]:
    """The training data and, if any, the validation data, created by the user's functions."""
    make = config.function("dataset_fn")
    source = with_place("dataset_fn", make)
    dataset = _checked(make(*_table(config.df), **config.dataset_args), source, may_stream=True)
    if config.val_dataset_fn is not None:
        make_validation = config.function("val_dataset_fn")
        return dataset, _checked(make_validation(*_table(config.val_df)), with_place("val_dataset_fn", make_validation))
    if config.val_df is not None:
        return dataset, _checked(make(*_table(config.val_df), **config.dataset_args), source)
    size = size_of(dataset)
    if size is None:  # an iterable data set cannot be split by index
        return dataset, None
    held_out = round(size * config.val_fraction)
    if config.val_fraction > 0 and size > 1:
        held_out = min(max(held_out, 1), size - 1)
    if not held_out or size == 1:
        return dataset, None
    training = SplitSubset(dataset, config.seed, range(size - held_out))
    return training, SplitSubset(dataset, config.seed, range(size - held_out, size))


def columns_of(table: Any) -> list[str]:
    """The names of a table's columns; none if there is no table."""
    if isinstance(table, Path) and table.suffix.lower() != ".parquet":
        import pandas as pd

        table = pd.read_csv(table, nrows=0)
    return [str(name) for frame in _table(table) for name in getattr(frame, "columns", ())]


def text_columns(table: Any) -> list[str]:
    """The names of a table's columns that hold text, or anything else that is not a number or a time."""
    columns = getattr(table_of(table), "dtypes", {}).items()
    return [str(name) for name, kind in columns if str(kind) in ("object", "str", "string", "category")]


def table_of(table: Any) -> Any:
    """The DataFrame, read if it is a file; None if there is none."""
    return next(iter(_table(table)), None)


def _table(table: Any) -> tuple[Any, ...]:
    """The DataFrame as the arguments of a data set function: none, or one."""
    if table is None:
        return ()
    if not isinstance(table, Path):
        return (table,)
    import pandas as pd

    if table.suffix.lower() == ".parquet":
        try:
            return (pd.read_parquet(table),)
        except ImportError:
            raise MissingExtra("pyarrow", "parquet", f"reading {table.name}") from None
    return (pd.read_csv(table),)


def _checked(dataset: Any, source: str, *, may_stream: bool = False) -> Any:
    returned = f"{source} returned {described(dataset)}"
    if dataset is None:
        raise ConfigError(f"{returned}; it must return a data set")
    if isinstance(dataset, tuple) and dataset and all(isinstance(each, torch.Tensor) for each in dataset):
        raise ConfigError(f"{returned} of tensors; return a data set of them: TensorDataset(x, y)")
    if isinstance(dataset, tuple) and dataset and all(isinstance(each, Dataset) for each in dataset):
        raise ConfigError(
            f"{returned} of data sets; return the one for training, and give val_dataset_fn for validation data"
        )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"{returned}; return its data set: Paceline makes the batches (batch_size, collate_fn, workers)"
        )
    if is_stream(dataset):
        if hasattr(dataset, "__next__"):
            raise ConfigError(
                f"{returned}, which is its own iterator and can be read only once; return an object whose __iter__ "
                "returns a new iterator, such as a torch IterableDataset"
            )
        if not may_stream:
            raise ConfigError(
                f"{returned} for validation, which needs a map-style data set: one with __len__ and __getitem__"
            )
        return dataset
    if missing := [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]:
        fix = "return a map-style or an iterable data set" if len(missing) > 1 else f"define {missing[0]}"
        raise ConfigError(f"{returned}, which has no {' and '.join(missing)}; {fix}")
    if len(dataset) == 0:
        raise ConfigError(f"{source} returned an empty data set; return at least one sample")
    return dataset
