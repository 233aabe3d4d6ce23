"""Steps of the managed loop over iterable data sets, in a world of one rank."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from paceline import shard
from paceline.data.lanes import Lane
from paceline.data.stream_steps import StreamSteps
from paceline.errors import DataError
from paceline.observe.progress import Progress
from support.datasets import StreamDataset
from support.worlds import fake_world

from .streams import ALONE, Numbers, unsharded


class ByHand:
    """Lanes whose lengths are chosen, without torch's base class."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        index, count = shard()
        assert count == len(self.lengths)
        yield from (100 * index + number for number in range(self.lengths[index]))


def steps_of(dataset: Any, **options: Any) -> StreamSteps:
    defaults: dict[str, Any] = {
        "seed": 3, "batch_size": 4, "lanes": 3, "workers": 0, "epochs": 1, "max_steps": None, "step": 0,
        "stream_position": (0, 0), "world": ALONE, "progress": Progress(), "warn": lambda text: pytest.fail(text),
    }  # fmt: skip
    return StreamSteps(dataset, **{**defaults, **options})


def plain(steps: Any) -> list[Any]:
    """Steps as values that can be compared."""

    def listed(data: Any) -> Any:
        return data.tolist() if isinstance(data, torch.Tensor) else [column.tolist() for column in data]

    def about(lane: Lane) -> tuple[Any, ...]:
        return lane.lane, lane.samples, lane.step_samples, lane.indices, listed(lane.data)

    return [
        (step.step, step.epoch, step.ends_epoch, step.ends_run, step.stream_position, *map(about, step.lanes))
        for step in steps
    ]


def samples_of(steps: Any) -> list[list[list[int]]]:
    """The first column of each lane of each step."""
    return [[(lane.data[0] if isinstance(lane.data, list) else lane.data).tolist() for lane in t.lanes] for t in steps]


def test_every_sample_is_used_once_and_the_last_step_is_marked() -> None:
    steps = list(steps_of(Numbers(30), epochs=2))
    assert [(t.step, t.epoch, t.ends_epoch, t.ends_run) for t in steps] == [
        (0, 0, False, False), (1, 0, False, False), (2, 0, True, False),
        (3, 1, False, False), (4, 1, False, False), (5, 1, True, True),
    ]  # fmt: skip
    for epoch in (steps[:3], steps[3:]):
        assert sorted(n for step in samples_of(epoch) for lane in step for n in lane) == list(range(30))
        assert sum(step.lanes[0].step_samples for step in epoch) == 30
    assert [lane.data[1].unique().tolist() for lane in steps[4].lanes] == [[1], [1], [1]]  # set_epoch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dataset", [Numbers(31, shuffles=True), ByHand(5, 17, 9)], ids=["shuffled", "uneven"])
def test_workers_change_nothing(dataset: Any, workers: int) -> None:
    alone = plain(steps_of(dataset, epochs=3))
    assert plain(steps_of(dataset, epochs=3, workers=workers)) == alone


def test_more_workers_than_lanes_are_not_started() -> None:
    steps = iter(steps_of(Numbers(), lanes=1, workers=2))
    next(steps)
    assert len(multiprocessing.active_children()) == 1


def test_lanes_that_end_early_are_empty_and_do_not_count() -> None:
    steps = list(steps_of(ByHand(5, 11, 3)))
    assert [[(lane.lane, lane.samples) for lane in step.lanes] for step in steps] == [
        [(0, 3), (1, 4), (2, 3)],  # of 5 samples 3 and 2, not 4 and 1
        [(0, 2), (1, 4)],
        [(1, 3)],
    ]
    assert [step.lanes[0].step_samples for step in steps] == [10, 6, 3]
    assert [lane.indices for lane in steps[1].lanes] == [[3, 4], [4, 5, 6, 7]]


def test_a_rank_without_samples_repeats_its_last_batch_with_weight_zero() -> None:
    """Rank 1 of 2, with lane 1 of 2; the numbers of rank 0 are made up."""
    step = itertools.count(1)
    world = fake_world(rank=1, size=2, exchanged=lambda *mine: [4, next(step) == 3, 0, 0, 0, *mine[5:]])
    steps = list(steps_of(ByHand(99, 6), lanes=2, world=world))
    assert [(step.lanes[0].lane, step.lanes[0].samples, step.lanes[0].step_samples) for step in steps] == [
        (1, 4, 8), (1, 2, 6), (1, 0, 4),
    ]  # fmt: skip
    assert steps[2].lanes[0].data.tolist() == steps[1].lanes[0].data.tolist() == [104, 105]
    assert steps[2].lanes[0].indices == [4, 5]
    assert [step.ends_epoch for step in steps] == [False, False, True]


@pytest.mark.parametrize("size", [4, 5, 8, 9, 10, 13])
def test_no_lane_ends_with_a_single_sample(size: int) -> None:
    sizes = [step.lanes[0].samples for step in steps_of(Numbers(size), lanes=1)]
    assert sum(sizes) == size
    assert all(2 <= n <= 4 for n in sizes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 7])
def test_a_resumed_run_trains_on_the_samples_that_it_had_not_seen(at: int, workers: int) -> None:
    dataset, reported = Numbers(50, shuffles=True), []
    whole = list(steps_of(dataset, epochs=2))
    assert len(whole) == 10
    position = whole[at - 1].stream_position
    progress = Progress(phase="training")
    rest = steps_of(
        dataset,
        epochs=2,
        step=at,
        stream_position=position,
        warn=reported.append,
        workers=workers,
        progress=progress,
    )
    assert plain(rest) == plain(whole[at:])
    assert progress.phase == "training"
    steps = at % 5
    assert [f"{steps} steps of epoch {at // 5 + 1}, up to {4 * steps} samples" in text for text in reported] == [True]


def test_a_run_resumed_at_an_epochs_start_reads_nothing_of_the_epoch_before() -> None:
    epochs = []

    class Watched(Numbers):
        def __iter__(self) -> Iterator[Any]:
            epochs.append(self.epoch)
            return super().__iter__()

    whole = list(steps_of(Numbers(50), epochs=2))
    assert plain(steps_of(Watched(50), epochs=2, step=5, stream_position=whole[4].stream_position)) == plain(whole[5:])
    assert epochs == [1, 1, 1]


def test_a_lane_that_had_ended_before_still_has_its_last_batch() -> None:
    whole = list(steps_of(ByHand(3, 20, 3)))
    rest = list(steps_of(ByHand(3, 20, 3), step=3, stream_position=whole[2].stream_position, warn=lambda text: None))
    assert plain(rest) == plain(whole[3:])


def test_max_steps_ends_the_run_in_an_epoch_and_a_larger_value_resumes_there() -> None:
    whole = list(steps_of(Numbers(50), epochs=2))
    short = list(steps_of(Numbers(50), epochs=2, max_steps=3))
    assert [(step.ends_epoch, step.ends_run) for step in short] == [(False, False), (False, False), (True, True)]
    assert short[-1].stream_position == (0, 0)
    rest = steps_of(Numbers(50), epochs=2, step=3, stream_position=short[-1].stream_position, warn=lambda text: None)
    assert plain(rest) == plain(whole[3:])


def test_data_sets_that_divide_samples_by_worker_find_no_worker_info() -> None:
    def samples() -> Iterable[int]:
        assert get_worker_info() is None
        return shard(range(12))

    assert samples_of(steps_of(StreamDataset(samples), workers=2)) == [[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]]


# --- data sets that are refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: number,
        lambda number: (torch.full((2,), number), str(number)),
        lambda number: {"x": np.full(2, number), "labels": torch.tensor(number, dtype=torch.bfloat16)},
    ],
    ids=["number", "tuple", "dict"],
)
def test_the_same_samples_in_two_lanes_are_refused(make: Any, batch_size: int, workers: int) -> None:
    steps = steps_of(unsharded(make), batch_size=batch_size, workers=workers, warn=lambda text: None)
    with pytest.raises(DataError, match=r"the same samples for lane 0 and lane 1; .*`yield from paceline\.shard"):
        next(iter(steps))


def test_one_lane_and_samples_that_are_all_equal_need_no_shards() -> None:
    assert len(list(steps_of(unsharded(), lanes=1))) == 5
    reported: list[str] = []
    assert len(list(steps_of(unsharded(lambda number: torch.ones(2)), warn=reported.append))) == 5
    assert [text.partition(":")[0] for text in reported] == ["the data set does not call paceline.shard"]


def test_a_lane_without_samples_is_named() -> None:
    with pytest.raises(DataError, match=r"no samples for lane 2 of 3 in epoch 1; .* or use fewer lanes"):
        next(iter(steps_of(Numbers(2))))


def test_a_data_set_that_has_shrunk_since_the_run_was_saved_is_refused() -> None:
    stream_position = next(iter(steps_of(Numbers(50)))).stream_position
    with pytest.raises(DataError, match="fewer samples in epoch 1 than before the run was resumed at step 3"):
        next(iter(steps_of(Numbers(20), step=3, stream_position=stream_position, warn=lambda text: None)))
