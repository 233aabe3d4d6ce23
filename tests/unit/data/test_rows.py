"""Which data sets are rows of tensors, and that gathered rows are what collating their samples gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from paceline.data.rows import RowDataset, Rows, as_row_dataset, rows_of
from paceline.data.sources import SplitSubset
from paceline.errors import DataError
from support.worlds import world_of

HERE = world_of()
SIZE = 12
PIXELS = torch.randn(SIZE, 3, 2, 2, generator=torch.Generator().manual_seed(0))
PIXELS[3, 0, 0, 0], PIXELS[4, 0, 0, 0] = torch.nan, -0.0
CLASSES = torch.arange(SIZE) % 5
SCALARS = torch.rand(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Offering(Dataset[Any]):
    """A data set whose `as_tensors` returns the given value."""

    def __init__(self, offered: Any, size: int = SIZE) -> None:
        self.offered, self.size = offered, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.offered, dict):
            return {name: tensor[index] for name, tensor in self.offered.items()}
        return tuple(tensor[index] for tensor in self.offered)

    def as_tensors(self) -> Any:
        return self.offered


class Named(TensorDataset):
    """Adds nothing to what its samples are."""


class OwnItem(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class OwnItems(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class OwnCollate(TensorDataset):
    def collate_fn(self, samples: Any) -> Any:
        return default_collate(samples)


class OfferingAnyway(OwnItem):
    def as_tensors(self) -> Any:
        return tuple(2 * tensor for tensor in self.tensors)


def rows(dataset: Any, part: float = 0.5) -> Rows | None:
    return rows_of(dataset, part, HERE)


def bits_of(batch: Any) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    tensors = batch.values() if isinstance(batch, dict) else batch
    return [(tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()) for tensor in tensors]


# --- who has rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorDataset, Named])
def test_a_tensor_dataset_is_rows_without_a_copy(kind: type[TensorDataset]) -> None:
    found = rows(kind(PIXELS, CLASSES))
    assert found is not None
    assert [tensor.data_ptr() for tensor in found.tensors] == [PIXELS.data_ptr(), CLASSES.data_ptr()]


@pytest.mark.parametrize("kind", [OwnItem, OwnItems, OwnCollate])
def test_a_data_set_with_its_own_items_or_collate_fn_is_not_rows(kind: type[TensorDataset]) -> None:
    assert rows(kind(PIXELS, CLASSES)) is None
    assert rows(SplitSubset(kind(PIXELS, CLASSES), 0, range(4))) is None


def test_a_collate_fn_of_the_instance_counts() -> None:
    dataset = TensorDataset(PIXELS)
    dataset.collate_fn = default_collate  # type: ignore[attr-defined]
    assert rows(dataset) is None


def test_other_data_sets_are_not_rows() -> None:
    assert rows([(PIXELS[0], 1)]) is None
    assert rows(np.zeros(3)) is None


def test_as_tensors_overrides_the_items() -> None:
    found = rows(OfferingAnyway(PIXELS, CLASSES))
    assert found is not None
    assert torch.equal(found.tensors[1], 2 * CLASSES)


@pytest.mark.parametrize("wrap", [tuple, list, lambda tensors: dict(zip("xy", tensors, strict=True))])
def test_as_tensors_may_return_a_tuple_a_list_or_a_dict(wrap: Any) -> None:
    found = rows(Offering(wrap((PIXELS, CLASSES))))
    assert found is not None
    tensors = found.tensors.values() if isinstance(found.tensors, dict) else found.tensors
    assert [tensor.data_ptr() for tensor in tensors] == [PIXELS.data_ptr(), CLASSES.data_ptr()]


@pytest.mark.parametrize(
    ("offered", "shape"),
    [
        ((PIXELS, CLASSES[:-1]), "(11,)"),
        ({"x": PIXELS, "y": CLASSES[:1]}, "(1,)"),
        ((PIXELS, torch.tensor(3)), "()"),
        ((PIXELS, CLASSES.numpy()), "ndarray"),
    ],
)
def test_tensors_without_one_row_per_sample_are_refused(offered: Any, shape: str) -> None:
    with pytest.raises(DataError) as caught:
        rows(Offering(offered))
    assert str(caught.value) == (
        f"as_tensors() of Offering returned {shape} for 12 samples; each tensor must have one row per sample"
    )


def test_zero_leaves_the_data_to_the_loader() -> None:
    assert rows(TensorDataset(PIXELS), 0.0) is None
    assert rows(TensorDataset(PIXELS), 0.01) is not None  # on a CPU nothing is copied, so everything fits


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[3], [4, 3, 11, 3], list(range(SIZE))])
@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(PIXELS, CLASSES, SCALARS),
        Offering((PIXELS.transpose(2, 3), CLASSES)),
        Offering({"x": PIXELS, "labels": CLASSES}),
    ],
    ids=["tuple", "strided", "dict"],
)
def test_gathered_rows_are_the_collated_samples_to_the_last_bit(dataset: Any, indices: list[int]) -> None:
    found = rows(dataset)
    assert found is not None
    gathered, collated = found.gather(torch.tensor(indices)), default_collate([dataset[index] for index in indices])
    assert bits_of(gathered) == bits_of(collated)
    if isinstance(collated, dict):
        assert list(gathered) == list(collated)


def test_indices_of_a_subset_are_converted_to_those_of_the_whole() -> None:
    whole = TensorDataset(CLASSES.new_tensor(range(SIZE)))
    part = SplitSubset(whole, 7, range(4, 9))
    found = rows(part)
    assert found is not None
    indices = np.array([4, 0, 2])
    places = found.index_converter(part)(indices)
    assert places.dtype == torch.int64
    assert places.tolist() == part.base_indices([4, 0, 2]) != [4, 0, 2]
    assert found.gather(places)[0].tolist() == [part[index][0].item() for index in indices]


def test_indices_of_the_whole_are_not_changed() -> None:
    found = rows(TensorDataset(PIXELS))
    assert found is not None
    assert found.index_converter(TensorDataset(PIXELS))(np.array([5, 1])).tolist() == [5, 1]


# --- in the user's own loop -------------------------------------------------------------------------------------------


class Named(TensorDataset):
    """A data set with further attributes."""

    classes = ("cat", "dog")


def test_a_loader_of_gathered_batches_equals_torchs_loader() -> None:
    whole = Named(torch.randn(23, 3, generator=torch.Generator().manual_seed(1)), torch.arange(23))
    for dataset in (whole, SplitSubset(whole, 3, range(5, 20))):
        quick = as_row_dataset(dataset)
        assert isinstance(quick, RowDataset)
        order = [[4, 0, 2], [1], [14, 3]]
        ours = DataLoader(quick, batch_sampler=order, collate_fn=lambda batch: batch)
        for mine, theirs in zip(ours, DataLoader(dataset, batch_sampler=order), strict=True):
            assert type(mine) is type(theirs) is list
            assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
        assert len(quick) == len(dataset)
        assert torch.equal(quick[3][0], dataset[3][0])


def test_a_row_dataset_has_the_attributes_of_the_users_data_set() -> None:
    quick = as_row_dataset(Named(torch.zeros(4, 2), torch.zeros(4)))
    assert quick.classes == ("cat", "dog")
    with pytest.raises(AttributeError, match="colours"):
        quick.colours  # noqa: B018


def test_a_data_set_that_makes_its_samples_is_returned_as_it_is() -> None:
    class Own(TensorDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index)[0] * 2

    own = Own(torch.ones(3, 1))
    assert as_row_dataset(own) is own


def test_a_stream_is_never_rows_and_gradients_do_not_reach_the_data() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(PIXELS[0], CLASSES[0])])

        def as_tensors(self) -> Any:
            return PIXELS, CLASSES

    assert rows_of(Stream(), 0.5, HERE) is None
    rows = rows_of(TensorDataset(PIXELS.clone().requires_grad_()), 0.5, HERE)
    assert rows is not None
    assert not rows.gather(torch.tensor([0, 1]))[0].requires_grad


@pytest.mark.parametrize("offered", [None, (), 3])
def test_as_tensors_without_tensors_is_refused(offered: Any) -> None:
    with pytest.raises(DataError, match="as_tensors of Offering must be a method that returns a tuple or a dict"):
        rows_of(Offering(offered), 0.5, HERE)


def test_tensors_on_other_devices_are_not_gathered_on_the_cpu() -> None:
    elsewhere = TensorDataset(torch.zeros(4, 2, device="meta"), torch.zeros(4))
    assert as_row_dataset(elsewhere) is elsewhere
