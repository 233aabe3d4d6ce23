"""Samplers and loaders of data/loader.py without workers; a World is only a rank and a size here."""

from __future__ import annotations

import random
from collections import defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from paceline.data import batches
from paceline.data.epoch_loader import EpochSampler, epoch_loader
from paceline.data.evaluation import EvalBatch, evaluation_loader
from paceline.data.feed import to_device
from paceline.data.lanes import Lane, LaneSampler
from paceline.data.loader import KeyedDataset, collate_of, keyed_loader
from paceline.data.order import indices_at
from paceline.data.sources import SplitSubset
from paceline.errors import DataError
from paceline.world import World

SHAPES = [(24, 2, 4), (25, 3, 4), (3, 2, 4), (1, 1, 4), (101, 5, 4), (7, 1, 4)]  # (size, batch_size, lanes)


def make_world(rank: int, size: int) -> World:
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"), backend="gloo")


def sample_lanes(
    size: int, batch_size: int, lanes: int, steps: range, *, world_size: int = 1, seed: int = 5
) -> list[list[Lane]]:
    """The lanes of each rank."""
    return [
        list(
            LaneSampler(
                seed=seed,
                size=size,
                batch_size=batch_size,
                lanes=lanes,
                steps=steps,
                rank_lanes=batches.lanes_of(rank, world_size, lanes),
            )
        )
        for rank in range(world_size)
    ]


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Augmentation from every global generator that people use."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


# --- LaneSampler --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
def test_lanes_hold_the_samples_that_order_and_batches_say(size: int, batch_size: int, lanes: int) -> None:
    per_epoch = batches.steps_per_epoch(size, batch_size, lanes)
    [sampled] = sample_lanes(size, batch_size, lanes, range(3 * per_epoch))
    expected = []
    for step in range(3 * per_epoch):
        epoch, step_in_epoch = divmod(step, per_epoch)
        taken = batches.step_positions(step_in_epoch, size, batch_size, lanes)
        for lane in range(lanes):
            positions = batches.lane_positions(step_in_epoch, lane, size, batch_size, lanes)
            if positions:
                indices = indices_at(seed=5, epoch=epoch, size=size, positions=positions).tolist()
                expected.append(Lane(step, lane, len(positions), len(taken), indices))
    assert sampled == expected


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_lane_is_the_same_on_any_rank(size: int, batch_size: int, lanes: int, world_size: int) -> None:
    steps = range(2 * batches.steps_per_epoch(size, batch_size, lanes))
    [alone] = sample_lanes(size, batch_size, lanes, steps)
    ranks = sample_lanes(size, batch_size, lanes, steps, world_size=world_size)
    counted = [lane for rank in ranks for lane in rank if lane.samples]
    assert sorted(counted, key=lambda lane: (lane.step, lane.lane)) == alone


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_sample_comes_once_an_epoch_over_all_ranks(
    size: int, batch_size: int, lanes: int, world_size: int
) -> None:
    per_epoch = batches.steps_per_epoch(size, batch_size, lanes)
    epochs: dict[int, list[int]] = defaultdict(list)
    for rank in sample_lanes(size, batch_size, lanes, range(3 * per_epoch), world_size=world_size):
        for lane in rank:
            if lane.samples:
                epochs[lane.step // per_epoch] += lane.indices
    assert {epoch: sorted(indices) for epoch, indices in epochs.items()} == {n: list(range(size)) for n in range(3)}


@pytest.mark.parametrize("first", [0, 1, 4, 5, 6, 11, 14, 15])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_begins_in_the_middle_sees_what_the_whole_run_would(first: int, world_size: int) -> None:
    shape = (50, 5, 2)  # five steps an epoch
    whole = sample_lanes(*shape, range(15), world_size=world_size)
    late = sample_lanes(*shape, range(first, 15), world_size=world_size)
    assert late == [[lane for lane in rank if lane.step >= first] for rank in whole]


def test_a_run_may_end_within_an_epoch() -> None:
    [sampled] = sample_lanes(50, 5, 2, range(7))
    assert [lane.step for lane in sampled] == [step for step in range(7) for _ in range(2)]


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_rides_in_every_step(size: int, batch_size: int, lanes: int, world_size: int) -> None:
    steps = range(2 * batches.steps_per_epoch(size, batch_size, lanes))
    for rank in sample_lanes(size, batch_size, lanes, steps, world_size=world_size):
        assert sorted({lane.step for lane in rank}) == list(steps)
        assert all(lane.indices for lane in rank)


def test_a_rank_without_samples_in_a_short_step_borrows_those_of_lane_0_with_no_weight() -> None:
    ranks = sample_lanes(6, 1, 4, range(2), world_size=4)  # the second step has two samples for four lanes
    last = [rank[-1] for rank in ranks]
    assert [(lane.step, lane.lane, lane.samples, lane.step_samples) for lane in last] == [
        (1, 0, 1, 2),
        (1, 1, 1, 2),
        (1, 2, 0, 2),
        (1, 3, 0, 2),
    ]
    assert last[2].indices == last[3].indices == last[0].indices
    assert last[1].indices != last[0].indices


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        [sampled] = sample_lanes(40, 5, 2, range(epoch * 4, epoch * 4 + 4), seed=seed)
        return tuple(index for lane in sampled for index in lane.indices)

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


# --- lanes with data ----------------------------------------------------------------------------------------


def loaded(world_size: int, dataset: Any, seed: int = 5) -> dict[tuple[int, int], Any]:
    """The data of each lane of two epochs, by (step, lane)."""
    found = {}
    for rank in range(world_size):
        sampler = LaneSampler(
            seed=seed,
            size=len(dataset),
            batch_size=3,
            lanes=4,
            steps=range(4),
            rank_lanes=batches.lanes_of(rank, world_size, 4),
        )
        for lane in keyed_loader(dataset, sampler, seed=seed, workers=0, world=make_world(rank, world_size)):
            if lane.samples:
                found[lane.step, lane.lane] = [part.tolist() for part in lane.data]
    return found


def test_augmentation_does_not_know_on_which_rank_it_runs() -> None:
    torch.manual_seed(1)
    alone = loaded(1, Noise(21))
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    assert loaded(4, Noise(21)) == alone


def test_augmentation_differs_between_lanes_steps_and_seeds() -> None:
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
def test_a_data_set_collates_its_own_way_also_when_it_is_split(wrap: Any) -> None:
    loader = evaluation_loader(wrap(WithCollate(4)), batch_size=4, seed=0, workers=0, world=make_world(0, 1))
    [batch] = loader
    assert sorted(batch.data.split("+")) == ["0", "1", "2", "3"]


def test_a_data_set_of_which_a_user_took_a_part_collates_its_own_way() -> None:
    class Own(Subset[Any]):
        collate_fn = staticmethod(len)

    whole = WithCollate(4)
    assert collate_of(SplitSubset(Subset(Subset(whole, [0, 1]), [1]), 0, range(1))) == whole.collate_fn
    assert collate_of(Own(whole, [0, 1])) is len


def test_a_data_set_with_an_attribute_called_base_collates_its_own_way() -> None:
    dataset = WithCollate(4)
    dataset.base = Numbers(4)  # type: ignore[attr-defined]
    [batch] = evaluation_loader(dataset, batch_size=4, seed=0, workers=0, world=make_world(0, 1))
    assert batch.data == "0+1+2+3"


# --- evaluation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("size", "batch_size"), [(20, 4), (21, 4), (3, 4), (1, 1), (17, 1)])
def test_evaluation_takes_every_sample_once_in_the_same_batches_at_any_world_size(
    size: int, batch_size: int, world_size: int
) -> None:
    ranks = [
        [
            dealt.data.tolist()
            for dealt in evaluation_loader(
                Numbers(size), batch_size=batch_size, seed=0, workers=0, world=make_world(rank, world_size)
            )
        ]
        for rank in range(world_size)
    ]
    together = [batch for rank in ranks for batch in rank]
    assert sorted(together) == [list(range(n, min(n + batch_size, size))) for n in range(0, size, batch_size)]
    counts = [len(rank) for rank in ranks]
    assert max(counts) - min(counts) <= 1


# --- the user's own loop ------------------------------------------------------------------------------------


def epoch_samplers(
    size: int, batch_size: int, world_size: int, *, shuffle: bool = True, seed: int = 3
) -> list[EpochSampler]:
    return [
        EpochSampler(
            seed=seed,
            size=size,
            batch_size=batch_size,
            world=make_world(rank, world_size),
            shuffle=shuffle,
            what="the training data",
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("size", "batch_size", "world_size"), [(24, 4, 2), (25, 4, 3), (7, 1, 3), (4, 8, 4), (5, 2, 1)]
)
def test_each_epoch_gives_every_sample_to_one_rank_in_equally_many_batches(
    size: int, batch_size: int, world_size: int, shuffle: bool
) -> None:
    samplers = epoch_samplers(size, batch_size, world_size, shuffle=shuffle)
    for _epoch in range(3):
        ranks = [list(sampler) for sampler in samplers]
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


def test_the_loader_tells_how_far_it_is_epoch_by_epoch() -> None:
    told: list[tuple[int, int, int]] = []
    loader = epoch_loader(
        Numbers(12),
        batch_size=2,
        seed=0,
        workers=0,
        world=make_world(1, 2),
        shuffle=True,
        what="the training data",
        on_batch=lambda *place: told.append(place),
    )
    assert len(loader) == 3
    first = [batch.tolist() for batch in loader]
    second = [batch.tolist() for batch in loader]
    assert told == [(epoch, batch, 3) for epoch in (0, 1) for batch in range(3)]
    assert first != second
    loader.sampler.set_epoch(0)  # as loops written for DistributedSampler do
    assert [batch.tolist() for batch in loader] == first


def test_a_loop_that_is_left_early_goes_on_with_the_next_epoch() -> None:
    [broken_off, whole] = [
        epoch_loader(
            Numbers(12),
            batch_size=2,
            seed=0,
            workers=0,
            world=make_world(0, 1),
            shuffle=True,
            what="the training data",
            on_batch=lambda *place: None,
        )
        for _ in range(2)
    ]
    next(iter(broken_off))
    list(whole)
    assert [batch.tolist() for batch in broken_off] == [batch.tolist() for batch in whole]


# --- to_device ----------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


def test_every_tensor_of_a_batch_moves_and_everything_else_stays() -> None:
    tensor = torch.zeros(2)
    batch = {"a": tensor, "b": [tensor, "text"], "c": (tensor, 3), "d": Point(tensor, None)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == "text"
    assert moved["c"][0].is_meta
    assert moved["c"][1] == 3
    assert moved["d"].x.is_meta
    assert moved["d"].y is None
    assert [type(value) for value in moved.values()] == [torch.Tensor, list, tuple, Point]
    assert not tensor.is_meta


def test_a_finished_batch_must_have_a_row_for_each_sample() -> None:
    class Short(Dataset[Any]):
        def __getitems__(self, indices: list[int]) -> Any:
            return torch.zeros(len(indices) - 1, 2), torch.zeros(len(indices) - 1)

    keyed = KeyedDataset(Short(), seed=0)
    with pytest.raises(
        DataError, match="__getitems__ returned 2 rows for 3 samples; it must return one row per sample"
    ):
        keyed.load(EvalBatch(0, [4, 7, 9]))
