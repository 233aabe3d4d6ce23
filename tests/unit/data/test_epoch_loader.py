"""The loader of the user's own loop, for data sets with a length."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.data.epoch_loader import EpochSampler, epoch_loader
from paceline.data.epoch_order import shuffled
from paceline.data.order import indices_at
from paceline.data.sources import SplitSubset
from paceline.errors import DataError
from support.datasets import MapDataset
from support.worlds import world_of


def epoch_samplers(
    size: int, batch_size: int, world_size: int, *, shuffle: bool = True, seed: int = 3
) -> list[EpochSampler]:
    return [
        EpochSampler(
            size=size,
            batch_size=batch_size,
            world=world_of(rank, world_size),
            order=shuffled(seed, size) if shuffle else None,
            what="the training data",
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("size", "batch_size", "world_size"), [(24, 4, 2), (25, 4, 3), (7, 1, 3), (4, 8, 4), (5, 2, 1)]
)
def test_each_epoch_has_every_sample_on_one_rank_in_the_same_number_of_batches(
    size: int, batch_size: int, world_size: int, shuffle: bool
) -> None:
    samplers = epoch_samplers(size, batch_size, world_size, shuffle=shuffle)
    for _epoch in range(3):
        ranks = [[batch if shuffle else sampler.share()[batch].tolist() for batch in sampler] for sampler in samplers]
        assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(size))
        assert {len(rank) for rank in ranks} == {len(samplers[0])}
        assert all(1 <= len(batch) <= max(batch_size, 2) for rank in ranks for batch in rank)


def test_each_pass_is_the_next_epoch_in_the_order_of_the_managed_loop() -> None:
    [sampler] = epoch_samplers(20, 5, 1)
    for epoch in range(3):
        order = indices_at(seed=3, epoch=epoch, size=20, positions=range(20)).tolist()
        assert [index for batch in sampler for index in batch] == order


def test_without_shuffling_every_pass_is_in_the_order_of_the_data() -> None:
    [sampler] = epoch_samplers(10, 4, 1, shuffle=False)
    assert [index for batch in sampler for index in batch] == list(range(10))
    assert list(sampler) == list(sampler)


def test_set_epoch_chooses_the_order_as_with_torchs_sampler() -> None:
    [sampler] = epoch_samplers(20, 5, 1)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second


def test_fewer_samples_than_ranks_names_the_data() -> None:
    with pytest.raises(DataError, match="the training data has 3 samples, fewer than the 4 ranks"):
        epoch_samplers(3, 1, 4)


def test_the_loader_reports_each_batch_of_each_epoch() -> None:
    reported: list[tuple[int, int, int]] = []
    loader = epoch_loader(
        range(12),
        batch_size=2,
        seed=0,
        workers=0,
        world=world_of(1, 2),
        order=shuffled(0, 12),
        what="the training data",
        on_batch=lambda *place: reported.append(place),
    )
    assert len(loader) == 3
    first = [batch.tolist() for batch in loader]
    second = [batch.tolist() for batch in loader]
    assert reported == [(epoch, batch, 3) for epoch in (0, 1) for batch in range(3)]
    assert first != second
    loader.sampler.set_epoch(0)  # as loops written for DistributedSampler do
    assert [batch.tolist() for batch in loader] == first


def test_a_loop_that_is_left_early_continues_with_the_next_epoch() -> None:
    [left_early, whole] = [
        epoch_loader(
            range(12),
            batch_size=2,
            seed=0,
            workers=0,
            world=world_of(0, 1),
            order=shuffled(0, 12),
            what="the training data",
            on_batch=lambda *place: None,
        )
        for _ in range(2)
    ]
    next(iter(left_early))
    list(whole)
    assert [batch.tolist() for batch in left_early] == [batch.tolist() for batch in whole]


def validation_loader(rank: int, dataset: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"batch_size": 4, "seed": 0, "workers": 0, "what": "", "on_batch": lambda *place: None}
    return epoch_loader(dataset, **{**defaults, **options}, world=world_of(rank, 3), order=None)


class Named(MapDataset):
    classes = ("cat", "dog")


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(25.0)),
        Named(25, lambda index: (torch.tensor(float(index)),)),
        SplitSubset(TensorDataset(torch.arange(30.0)), 0, range(25)),
    ],
    ids=["rows", "map", "split"],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_set_of_a_validation_loader_is_the_share_of_its_rank(dataset: Any, workers: int) -> None:
    everything = []
    for rank in range(3):
        loader = validation_loader(rank, dataset, workers=workers)
        batches = [batch.tolist() for (batch,) in loader]
        share = [float(sample) for (sample,) in loader.dataset]
        assert [number for batch in batches for number in batch] == share
        assert len(loader.dataset) == len(share) == 25 // 3 + (rank == 2)
        assert loader.dataset[-1][0] == share[-1]
        everything += share
    assert sorted(everything) == sorted(float(dataset[index][0]) for index in range(25))


def test_attributes_of_a_share_are_those_of_the_data_set() -> None:
    share = validation_loader(1, Named(7, float)).dataset
    assert share.classes == ("cat", "dog")
    assert pickle.loads(pickle.dumps(validation_loader(1, range(7)).dataset))[0] == share[0]
    with pytest.raises(IndexError):
        share[3]
