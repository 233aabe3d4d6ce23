"""Which samples the lanes of a run have."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from paceline.data import batches
from paceline.data.lanes import Lane, LaneSampler, RankLanes
from paceline.data.order import indices_at

SHAPES = [(24, 2, 4), (25, 3, 4), (3, 2, 4), (1, 1, 4), (101, 5, 4), (7, 1, 4)]  # (size, batch_size, lanes)


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
                steps=steps,
                rank_lanes=RankLanes(lanes, world_size, rank),
            )
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
def test_lanes_have_the_samples_that_order_and_batches_determine(size: int, batch_size: int, lanes: int) -> None:
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
def test_every_sample_is_used_once_per_epoch_over_all_ranks(
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
def test_a_resumed_run_has_the_lanes_of_the_whole_run(first: int, world_size: int) -> None:
    shape = (50, 5, 2)  # five steps an epoch
    whole = sample_lanes(*shape, range(15), world_size=world_size)
    late = sample_lanes(*shape, range(first, 15), world_size=world_size)
    assert late == [[lane for lane in rank if lane.step >= first] for rank in whole]


def test_a_run_may_end_within_an_epoch() -> None:
    [sampled] = sample_lanes(50, 5, 2, range(7))
    assert [lane.step for lane in sampled] == [step for step in range(7) for _ in range(2)]


@pytest.mark.parametrize(("size", "batch_size", "lanes"), SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_a_lane_in_every_step(size: int, batch_size: int, lanes: int, world_size: int) -> None:
    steps = range(2 * batches.steps_per_epoch(size, batch_size, lanes))
    for rank in sample_lanes(size, batch_size, lanes, steps, world_size=world_size):
        assert sorted({lane.step for lane in rank}) == list(steps)
        assert all(lane.indices for lane in rank)


def test_a_rank_without_samples_in_a_short_step_borrows_those_of_lane_0_with_weight_zero() -> None:
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


def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        [sampled] = sample_lanes(40, 5, 2, range(epoch * 4, epoch * 4 + 4), seed=seed)
        return tuple(index for lane in sampled for index in lane.indices)

    assert len({order(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_rows_of_all_ranks_are_put_in_the_order_of_the_lanes() -> None:
    """Rank 0 of three has lanes 0 to 2, rank 1 lanes 3 and 4, rank 2 lanes 5 and 6."""
    rows = torch.tensor([0, 1, 2, 3, 4, -1, 5, 6, -1])
    assert RankLanes(7, 3, 1).in_order(rows).tolist() == list(range(7))
    assert RankLanes(7, 3, 1).in_order(rows.expand(2, 9), dim=1).tolist() == [list(range(7))] * 2
    assert [RankLanes(7, 3, 2).place_of(lane) for lane in (5, 6)] == [0, 1]


@pytest.mark.parametrize("size", [100, 57, 43])
def test_ranks_with_other_numbers_of_lanes_have_the_same_number_of_batches_if_padded(size: int) -> None:
    steps = range(batches.steps_per_epoch(size, 4, 8))
    of_ranks = [
        list(
            LaneSampler(seed=1, size=size, batch_size=4, steps=steps, rank_lanes=RankLanes(8, 3, rank), is_padded=True)
        )
        for rank in range(3)
    ]
    assert len({len(lanes) for lanes in of_ranks}) == 1
    used = sorted(index for lanes in of_ranks for lane in lanes if lane.samples for index in lane.indices)
    assert used == list(range(size))
