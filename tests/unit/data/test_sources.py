from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline.config import Config, build
from paceline.data import sources
from paceline.data.order import indices_at
from paceline.data.sources import SplitSubset, columns_of, fetch, make_datasets, size_of, table_of
from paceline.errors import ConfigError, DataError, MissingExtra

MakeConfig = Callable[..., Config]


class Letters:
    """A map-style data set of the user's that counts how it is read."""

    def __init__(self, text: str = "abcdefghij") -> None:
        self.text = text
        self.reads = 0

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> str:
        self.reads += 1
        return self.text[index]


class LettersAtOnce(Letters):
    def __getitems__(self, indices: Sequence[int]) -> list[str]:
        self.reads += 1
        return [self.text[index] for index in indices]


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[str]:
        return iter("abcdefghij")


class OneReading(Stream):
    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return "a"


class FromTable:
    def __init__(self, df: pd.DataFrame, column: str = "x") -> None:
        self.values = df[column].tolist()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def items(dataset: Any) -> list[Any]:
    return [dataset[index] for index in range(len(dataset))]


# --- the split ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 1), (0.25, 2), (0.5, 5), (0.9, 9), (0.99, 9), (0.001, 1)])
def test_the_split_gives_every_sample_to_exactly_one_side(
    fraction: float, held_out: int, make_config: MakeConfig
) -> None:
    training, validation = make_datasets(make_config(dataset_fn=Letters, val_fraction=fraction))
    assert len(validation) == held_out
    assert sorted(items(training) + items(validation)) == list("abcdefghij")


def test_the_split_is_the_seeded_order_before_the_first_epoch(make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=Letters, val_fraction=0.3, seed=4))
    order = indices_at(seed=4, epoch=-1, size=10, positions=range(10))
    assert items(training) + items(validation) == ["abcdefghij"[index] for index in order]


def test_the_split_depends_on_the_seed_alone(make_config: MakeConfig) -> None:
    def held_out(seed: int) -> list[str]:
        return items(make_datasets(make_config(dataset_fn=Letters, val_fraction=0.5, seed=seed))[1])

    assert held_out(1) == held_out(1)
    assert len({tuple(held_out(seed)) for seed in range(5)}) == 5


def test_without_a_fraction_there_is_no_validation_and_the_data_is_untouched(make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=Letters, val_fraction=0))
    assert type(training) is Letters
    assert validation is None


def test_a_single_sample_is_for_training(make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=lambda: Letters("a")))
    assert (items(training), validation) == (["a"], None)


def test_a_single_sample_is_for_training_at_any_fraction(make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=lambda: Letters("a"), val_fraction=0.9))
    assert (items(training), validation) == (["a"], None)


@pytest.mark.parametrize("make", [Stream, lambda: {"a", "b"}], ids=["torch", "any"])
def test_nothing_is_held_out_of_an_iterable_data_set(make: Callable[[], Any], make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=make))
    assert (type(training), size_of(training), validation) == (type(make()), None, None)
    _, validation = make_datasets(make_config(dataset_fn=make, val_dataset_fn=Letters))
    assert items(validation) == list("abcdefghij")


@pytest.mark.parametrize("limit", [0, 1000], ids=["worked out", "kept"])
def test_a_subset_is_the_same_whether_its_indices_are_stored_or_computed(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TABLE_LIMIT", limit)
    part = SplitSubset(Letters(), 3, range(4, 9))
    order = indices_at(seed=3, epoch=-1, size=10, positions=range(4, 9))
    expected = ["abcdefghij"[index] for index in order]
    assert items(part) == expected
    assert part.__getitems__([3, 0, 3]) == [expected[3], expected[0], expected[3]]
    assert part[-1] == expected[-1]


@pytest.mark.parametrize("index", [5, -6, 100])
def test_an_index_beyond_a_subset_is_an_error(index: int) -> None:
    part = SplitSubset(Letters(), 3, range(4, 9))
    with pytest.raises(IndexError):
        part[index]


def test_stop_iteration_from_a_data_set_is_an_error_and_not_the_end_of_the_data() -> None:
    class Dry:
        def __getitem__(self, index: int) -> Any:
            return next(iter([]))

    with pytest.raises(DataError, match="the data set raised StopIteration for a sample"):
        fetch(Dry(), [3])


def test_samples_are_fetched_by_getitems_where_the_data_set_has_it() -> None:
    together, one_by_one = LettersAtOnce(), Letters()
    assert fetch(together, [2, 0, 1]) == fetch(one_by_one, [2, 0, 1]) == ["c", "a", "b"]
    assert (together.reads, one_by_one.reads) == (1, 3)
    part = SplitSubset(together, 0, range(10))
    assert sorted(part.__getitems__(range(10))) == list("abcdefghij")
    assert together.reads == 2


# --- tables and data set functions---------------------------------------------------------------------------


def test_dataset_fn_gets_its_arguments(make_config: MakeConfig) -> None:
    config = make_config(dataset_fn=Letters, dataset_args={"text": "xyz"}, val_fraction=0)
    assert items(make_datasets(config)[0]) == ["x", "y", "z"]


def test_a_table_in_memory_is_given_to_dataset_fn(make_config: MakeConfig) -> None:
    table = pd.DataFrame({"x": [1, 2], "y": [3, 4]})
    config = make_config(dataset_fn=FromTable, df=table, dataset_args={"column": "y"}, val_fraction=0)
    assert items(make_datasets(config)[0]) == [3, 4]


@pytest.mark.parametrize("name", ["points.csv", "points.csv.gz"])
def test_a_table_on_disk_is_read(name: str, tmp_path: Path, make_config: MakeConfig) -> None:
    pd.DataFrame({"x": [5, 6]}).to_csv(tmp_path / name, index=False)
    config = make_config(dataset_fn=FromTable, df=str(tmp_path / name), val_fraction=0)
    assert items(make_datasets(config)[0]) == [5, 6]


def test_val_df_is_passed_to_the_same_dataset_fn(make_config: MakeConfig) -> None:
    table, held_out = pd.DataFrame({"y": [1, 2, 3]}), pd.DataFrame({"y": [4]})
    config = make_config(dataset_fn=FromTable, df=table, val_df=held_out, dataset_args={"column": "y"})
    training, validation = make_datasets(config)
    assert (items(training), items(validation)) == ([1, 2, 3], [4])


def test_val_dataset_fn_makes_the_validation_data(make_config: MakeConfig) -> None:
    training, validation = make_datasets(make_config(dataset_fn=Letters, val_dataset_fn=lambda: Letters("xy")))
    assert (items(training), items(validation)) == (list("abcdefghij"), ["x", "y"])


def test_val_dataset_fn_gets_val_df(make_config: MakeConfig) -> None:
    config = make_config(dataset_fn=Letters, val_dataset_fn=FromTable, val_df=pd.DataFrame({"x": [7]}))
    assert items(make_datasets(config)[1]) == [7]


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


HERE = re.escape(__file__)
UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "generator": (
        {"dataset_fn": lambda: (letter for letter in "abc")},
        "dataset_fn PLACE returned a generator, which is its own iterator and can be read only once; return",
    ),
    "none": ({"dataset_fn": lambda: None}, "dataset_fn PLACE returned None; it must return a data set"),
    "no length": (
        {"dataset_fn": WithoutLength},
        "dataset_fn PLACE returned a WithoutLength, which has no __len__; defi",
    ),
    "a number": ({"dataset_fn": lambda: 3}, "dataset_fn PLACE returned a int, which has no __len__ and __getitem__; "),
    "tensors": (
        {"dataset_fn": lambda: (torch.ones(3, 2), torch.ones(3))},
        "dataset_fn PLACE returned a tuple of tensors; return a data set of them: TensorDataset(x, y)",
    ),
    "two data sets": (
        {"dataset_fn": lambda: (TensorDataset(torch.ones(3)), TensorDataset(torch.ones(2)))},
        "dataset_fn PLACE returned a tuple of data sets; return the one for training, and give val_dataset_fn",
    ),
    "loader": (
        {"dataset_fn": lambda: DataLoader(Letters())},
        "dataset_fn PLACE returned a DataLoader; return its data set: Paceline makes the batches",
    ),
    "read once": ({"dataset_fn": OneReading}, "dataset_fn PLACE returned a OneReading, which is its own iterator"),
    "iterable validation": (
        {"dataset_fn": Letters, "val_dataset_fn": Stream},
        "val_dataset_fn PLACE returned a Stream for validation, which needs a map-style data set",
    ),
    "iterable validation of a table": (
        {"dataset_fn": lambda df=None: Letters() if df is None else Stream(), "val_df": pd.DataFrame({"x": [1]})},
        "dataset_fn PLACE returned a Stream for validation, which needs a map-style data set",
    ),
    "empty": ({"dataset_fn": lambda: []}, "dataset_fn PLACE returned an empty data set"),
    "empty validation": (
        {"dataset_fn": Letters, "val_dataset_fn": lambda: []},
        "val_dataset_fn PLACE returned an empty data set",
    ),
}


@pytest.mark.parametrize("case", UNSUITABLE)
def test_data_that_cannot_be_trained_on_names_the_function_and_its_place(case: str, make_config: MakeConfig) -> None:
    keys, problem = UNSUITABLE[case]
    with pytest.raises(ConfigError, match="^" + re.escape(problem).replace("PLACE", rf"\({HERE}:\d+\)")):
        make_datasets(make_config(**keys))


# --- optional packages --------------------------------------------------------------------------------------


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "points.parquet").write_bytes(b"PAR1")
    config = make_config(dataset_fn=FromTable, df=tmp_path / "points.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(MissingExtra, match=r"reading points\.parquet needs pyarrow; .*'paceline\[parquet\]'"):
        make_datasets(config)


def test_a_parquet_file_is_the_table_that_was_written(make_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = pd.DataFrame({"x": [1.5, -2.0], "kind": ["b", "a"], "n": [1, 2]}, index=[7, 3])
    table.to_parquet(tmp_path / "points.parquet")
    config = make_config(df=tmp_path / "points.parquet")
    pd.testing.assert_frame_equal(table_of(config.df), table)
    assert columns_of(config.df) == ["x", "kind", "n"]


def test_a_parquet_file_with_a_capital_ending_is_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "POINTS.PARQUET").write_text("x\n1\n")
    monkeypatch.setattr(pd, "read_parquet", lambda path: pd.DataFrame({"x": [42]}))
    functions = {"model_fn": Letters, "dataset_fn": FromTable, "loss_fn": "mse_loss"}
    config = build({**functions, "df": "POINTS.PARQUET", "val_fraction": 0}, folder=tmp_path)
    assert items(make_datasets(config)[0]) == [42]
