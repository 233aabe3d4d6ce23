"""Keyed loaders without workers, and how samples are collated."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from paceline.data.evaluation import EvalBatch, evaluation_loader
from paceline.data.lanes import Lane, LaneSampler, RankLanes
from paceline.data.loader import KeyedDataset, collate_of, keyed_loader
from paceline.data.sources import SplitSubset
from paceline.errors import DataError
from support.datasets import MapDataset
from support.worlds import world_of


class Numbers(MapDataset):
    def __init__(self, size: int) -> None:
        super().__init__(size, lambda index: index)


class Noise(Numbers):
    """Samples with a random number from each global generator."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def loaded(world_size: int, dataset: Any, seed: int = 5) -> dict[tuple[int, int], Any]:
    """The data of each lane of two epochs, by (step, lane)."""
    found = {}
    for rank in range(world_size):
        sampler = LaneSampler(
            seed=seed,
            size=len(dataset),
            batch_size=3,
            steps=range(4),
            rank_lanes=RankLanes(4, world_size, rank),
        )
        for lane in keyed_loader(dataset, sampler, seed=seed, workers=0, world=world_of(rank, world_size)):
            if lane.samples:
                found[lane.step, lane.lane] = [part.tolist() for part in lane.data]
    return found


def test_random_samples_do_not_depend_on_the_rank() -> None:
    torch.manual_seed(1)
    alone = loaded(1, Noise(21))
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    assert loaded(4, Noise(21)) == alone


def test_random_samples_differ_between_lanes_steps_and_seeds() -> None:
    draws = [lane[column][0] for seed in (0, 1) for lane in loaded(1, Noise(21), seed).values() for column in (1, 2, 3)]
    assert len(set(draws)) == len(draws)


def test_a_lane_is_fetched_and_collated_with_its_samples() -> None:
    keyed = KeyedDataset(Numbers(10), seed=0)
    lane = Lane(step=3, lane=1, samples=2, step_samples=8, indices=[4, 7])
    gathered = keyed.collate_batch(keyed.__getitems__(lane))
    assert gathered.data.tolist() == [4, 7]
    assert (gathered.step, gathered.lane, gathered.samples, gathered.step_samples) == (3, 1, 2, 8)


class WithCollate(Numbers):
    def collate_fn(self, samples: list[int]) -> str:
        return "+".join(map(str, samples))


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: SplitSubset(data, 0, range(4))], ids=["whole", "part"]
)
def test_the_collate_fn_of_a_data_set_is_used_also_for_its_split(wrap: Any) -> None:
    loader = evaluation_loader(wrap(WithCollate(4)), batch_size=4, seed=0, workers=0, world=world_of(0, 1))
    [batch] = loader
    assert sorted(batch.data.split("+")) == ["0", "1", "2", "3"]


def test_the_collate_fn_of_a_data_set_is_used_for_torchs_subsets() -> None:
    class Own(Subset[Any]):
        collate_fn = staticmethod(len)

    whole = WithCollate(4)
    assert collate_of(SplitSubset(Subset(Subset(whole, [0, 1]), [1]), 0, range(1))) == whole.collate_fn
    assert collate_of(Own(whole, [0, 1])) is len


def test_the_collate_fn_of_a_data_set_with_an_attribute_called_base_is_used() -> None:
    dataset = WithCollate(4)
    dataset.base = Numbers(4)  # type: ignore[attr-defined]
    [batch] = evaluation_loader(dataset, batch_size=4, seed=0, workers=0, world=world_of(0, 1))
    assert batch.data == "0+1+2+3"


def test_a_batch_from_getitems_must_have_one_row_per_sample() -> None:
    class Short(Dataset[Any]):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.zeros(len(indices) - 1, 2), torch.zeros(len(indices) - 1)

    keyed = KeyedDataset(Short(), seed=0)
    with pytest.raises(
        DataError, match="__getitems__ returned 2 rows for 3 samples; it must return one row per sample"
    ):
        keyed.load(EvalBatch(0, [4, 7, 9]))


def test_the_configs_collate_fn_precedes_that_of_the_data_set() -> None:
    [batch] = evaluation_loader(WithCollate(4), batch_size=4, seed=0, workers=0, world=world_of(0, 1), collate=sum)
    assert batch.data == 6


def test_a_collate_fn_may_return_the_list_of_samples() -> None:
    images = [torch.zeros(size, 2) for size in (3, 5)]
    keyed = KeyedDataset(images, seed=0, collate=lambda samples: samples)
    assert [len(image) for image in keyed.load(EvalBatch(0, [1, 0])).data] == [5, 3]
