from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import batches
from paceline.errors import ConfigError, DataError

SIZES, BATCH_SIZES, LANES = st.integers(1, 400), st.integers(1, 17), st.integers(1, 12)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# --- the managed loop ---------------------------------------------------------------------------------------


@given(size=SIZES, batch_size=BATCH_SIZES, lanes=LANES)
@settings(max_examples=100, deadline=None)
def test_steps_have_every_position_once_per_epoch_in_order(size: int, batch_size: int, lanes: int) -> None:
    steps = batches.steps_per_epoch(size, batch_size, lanes)
    taken = [batches.step_positions(step, size, batch_size, lanes) for step in range(steps)]
    assert [position for step in taken for position in step] == list(range(size))
    lengths, whole = [len(step) for step in taken], batch_size * lanes
    if batch_size > 2 and steps > 1 and size % whole == 1:  # the last has borrowed one
        assert lengths == [whole] * (steps - 2) + [whole - 1, 2]
    else:
        assert lengths == [whole] * (steps - 1) + [size - whole * (steps - 1)]


@given(size=SIZES, batch_size=BATCH_SIZES, lanes=LANES)
@settings(max_examples=100, deadline=None)
def test_lanes_cover_their_step_in_one_piece_and_evenly(size: int, batch_size: int, lanes: int) -> None:
    for step in range(batches.steps_per_epoch(size, batch_size, lanes)):
        parts = [batches.lane_positions(step, lane, size, batch_size, lanes) for lane in range(lanes)]
        covered = [position for part in parts for position in part]
        assert covered == list(batches.step_positions(step, size, batch_size, lanes))
        lengths = [len(part) for part in parts]
        used = [length for length in lengths if length]
        assert used == lengths[: len(used)]  # empty lanes are last
        assert max(used) - min(used) <= 1
        assert max(lengths) <= batch_size
        assert lengths[0] == max(lengths) >= 1  # lane 0, whose BatchNorm statistics are kept, is never empty


@given(size=SIZES, batch_size=BATCH_SIZES, lanes=LANES)
@settings(max_examples=100, deadline=None)
def test_a_lane_has_a_single_sample_only_where_nothing_else_is_possible(size: int, batch_size: int, lanes: int) -> None:
    for step in range(batches.steps_per_epoch(size, batch_size, lanes)):
        lengths = [len(batches.lane_positions(step, lane, size, batch_size, lanes)) for lane in range(lanes)]
        if batch_size > 2 and size > 1:
            assert 1 not in lengths


@given(size=SIZES, batch_size=BATCH_SIZES, lanes=LANES)
@settings(max_examples=60, deadline=None)
def test_every_position_is_in_one_lane_of_one_rank_at_any_world_size(size: int, batch_size: int, lanes: int) -> None:
    steps = batches.steps_per_epoch(size, batch_size, lanes)
    for world_size in divisors(lanes):
        of_ranks = [batches.lanes_of(rank, world_size, lanes) for rank in range(world_size)]
        assert {len(rank_lanes) for rank_lanes in of_ranks} == {lanes // world_size}
        taken = [
            position
            for step in range(steps)
            for rank_lanes in of_ranks
            for lane in rank_lanes
            for position in batches.lane_positions(step, lane, size, batch_size, lanes)
        ]
        assert taken == list(range(size))


@pytest.mark.parametrize(
    ("lanes", "world_size", "sizes"),
    [(8, 3, [3, 3, 2]), (7, 2, [4, 3]), (6, 4, [2, 2, 1, 1]), (4, 4, [1] * 4), (5, 1, [5])],
)
def test_the_first_ranks_have_one_lane_more_where_lanes_do_not_divide(
    lanes: int, world_size: int, sizes: list[int]
) -> None:
    of_ranks = [batches.lanes_of(rank, world_size, lanes) for rank in range(world_size)]
    assert [len(mine) for mine in of_ranks] == sizes
    assert [lane for mine in of_ranks for lane in mine] == list(range(lanes))


def test_every_rank_needs_a_lane() -> None:
    with pytest.raises(ConfigError) as caught:
        batches.lanes_of(0, 8, 4)
    assert str(caught.value) == (
        "lanes=4 cannot be split over 8 ranks, which need a lane each; use at most --procs 4, or more lanes"
    )


# --- the user's own loop ------------------------------------------------------------------------------------


@given(data=st.data(), batch_size=BATCH_SIZES, world_size=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_own_loop_has_every_sample_once_in_the_same_number_of_batches(
    data: st.DataObject, batch_size: int, world_size: int
) -> None:
    size = data.draw(st.integers(world_size, 400))
    count = batches.batches_per_rank(size, batch_size, world_size)
    spans = [
        batches.batch_positions(batch, rank, size, count, world_size)
        for batch in range(count)
        for rank in range(world_size)
    ]
    assert [position for span in spans for position in span] == list(range(size))
    assert all(1 <= len(span) <= max(batch_size, 2) for span in spans)


@pytest.mark.parametrize(("size", "batch_size", "world_size", "count"), [(12, 4, 3, 1), (13, 4, 3, 2), (9, 1, 3, 3)])
def test_own_loop_has_no_more_batches_than_necessary(size: int, batch_size: int, world_size: int, count: int) -> None:
    assert batches.batches_per_rank(size, batch_size, world_size) == count


def test_batches_of_one_hold_two_only_where_the_ranks_do_not_divide_the_samples() -> None:
    count = batches.batches_per_rank(7, 1, 3)
    lengths = [len(batches.batch_positions(b, r, 7, count, 3)) for b in range(count) for r in range(3)]
    assert sorted(lengths) == [1, 1, 1, 1, 1, 2]


def test_fewer_samples_than_ranks_is_an_error_that_names_the_data_and_both_numbers() -> None:
    with pytest.raises(DataError, match="the validation data has 3 samples, fewer than the 4 ranks"):
        batches.batches_per_rank(3, 8, 4, what="the validation data")
