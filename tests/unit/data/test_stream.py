"""Iterable data sets, in a world of one rank."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline import shard
from paceline.data.lanes import Lane
from paceline.data.overlap import digest_of_samples
from paceline.data.shard import DataShard
from paceline.data.stream import ShardReader
from paceline.data.stream_loader import StreamLoader
from paceline.data.stream_steps import StreamSteps
from paceline.errors import DataError
from paceline.observe.progress import Progress
from paceline.world import World

ALONE = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")


class Numbers(IterableDataset):
    """The numbers below `size`, each with a random one from every generator."""

    def __init__(self, size: int = 30, shuffles: bool = False) -> None:
        self.size, self.shuffles, self.epoch = size, shuffles, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float, float, float]]:
        numbers = list(range(self.size))
        if self.shuffles:
            random.shuffle(numbers)
        for number in shard(numbers):
            yield number, self.epoch, random.random(), np.random.rand(), torch.rand(()).item()


class ByHand:
    """Lanes whose lengths are chosen, without torch's base class."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        index, count = shard()
        assert count == len(self.lengths)
        yield from (100 * index + number for number in range(self.lengths[index]))


def turns_of(dataset: Any, **options: Any) -> StreamSteps:
    defaults: dict[str, Any] = {
        "seed": 3, "batch_size": 4, "lanes": 3, "workers": 0, "epochs": 1, "max_steps": None, "step": 0,
        "stream_position": (0, 0), "world": ALONE, "progress": Progress(), "warn": lambda text: pytest.fail(text),
    }  # fmt: skip
    return StreamSteps(dataset, **{**defaults, **options})


def plain(turns: Any) -> list[Any]:
    """Turns as things that can be compared."""

    def listed(data: Any) -> Any:
        return data.tolist() if isinstance(data, torch.Tensor) else [column.tolist() for column in data]

    def about(lane: Lane) -> tuple[Any, ...]:
        return lane.lane, lane.samples, lane.step_samples, lane.indices, listed(lane.data)

    return [
        (turn.step, turn.epoch, turn.ends_epoch, turn.ends_run, turn.stream_position, *map(about, turn.lanes))
        for turn in turns
    ]


def samples_of(turns: Any) -> list[list[list[int]]]:
    """The first column of each lane of each step."""
    return [[(lane.data[0] if isinstance(lane.data, list) else lane.data).tolist() for lane in t.lanes] for t in turns]


# --- shard ----------------------------------------------------------------------------------------------------------


def test_outside_of_a_run_one_reader_has_everything() -> None:
    assert shard() == (0, 1)
    assert list(shard("abcde")) == list("abcde")


class AsksOften(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        for number in range(10):
            index, count = shard()
            if number % count == index:
                yield number


@pytest.mark.parametrize("dataset", [lambda: shard(range(10)), AsksOften().__iter__], ids=["once", "often"])
def test_shares_are_every_nth_sample_whenever_the_data_set_asks(dataset: Any) -> None:
    class Late(IterableDataset):
        def __iter__(self) -> Iterator[int]:  # a generator: nothing runs before the first `next`
            yield from dataset()

    readings = [ShardReader(Late(), DataShard(k, 3), common=(0,), own=(0, k)) for k in range(3)]
    taken = [[], [], []]
    for _ in range(4):  # in turns, so that a share which is set only once would be another's
        for mine, reading in zip(taken, readings, strict=True):
            mine += reading.take(1)
    assert taken == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert shard() == (0, 1)


def test_what_is_shuffled_before_it_is_shared_is_shared_without_loss() -> None:
    readings = [ShardReader(Numbers(10, shuffles=True), DataShard(k, 3), common=(0, "x"), own=(0, k)) for k in range(3)]
    taken = [reading.take(9) for reading in readings]
    assert sorted(sample[0] for share in taken for sample in share) == list(range(10))
    drawn = [value for share in taken for sample in share for value in sample[2:]]
    assert len(set(drawn)) == len(drawn)  # and each share draws numbers of its own


def test_a_data_set_that_does_not_ask_draws_numbers_of_its_own_after_the_first_sample() -> None:
    class Noise(IterableDataset):
        def __iter__(self) -> Iterator[float]:
            while True:
                yield random.random()

    first, second = (ShardReader(Noise(), DataShard(k, 2), common=(0,), own=(0, k)).take(4) for k in range(2))
    assert not set(first[1:]) & set(second)
    assert len(set(first)) == 4


# --- the managed loop -----------------------------------------------------------------------------------------------


def test_every_sample_comes_once_and_the_last_step_knows_that_it_is_the_last() -> None:
    turns = list(turns_of(Numbers(30), epochs=2))
    assert [(t.step, t.epoch, t.ends_epoch, t.ends_run) for t in turns] == [
        (0, 0, False, False), (1, 0, False, False), (2, 0, True, False),
        (3, 1, False, False), (4, 1, False, False), (5, 1, True, True),
    ]  # fmt: skip
    for epoch in (turns[:3], turns[3:]):
        assert sorted(n for step in samples_of(epoch) for lane in step for n in lane) == list(range(30))
        assert sum(turn.lanes[0].step_samples for turn in epoch) == 30
    assert [lane.data[1].unique().tolist() for lane in turns[4].lanes] == [[1], [1], [1]]  # set_epoch


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dataset", [Numbers(31, shuffles=True), ByHand(5, 17, 9)], ids=["shuffled", "uneven"])
def test_workers_change_nothing(dataset: Any, workers: int) -> None:
    alone = plain(turns_of(dataset, epochs=3))
    assert plain(turns_of(dataset, epochs=3, workers=workers)) == alone


def test_more_workers_than_lanes_are_not_started() -> None:
    turns = iter(turns_of(Numbers(), lanes=1, workers=2))
    next(turns)
    assert len(multiprocessing.active_children()) == 1


def test_lanes_that_end_early_are_empty_and_do_not_count() -> None:
    turns = list(turns_of(ByHand(5, 11, 3)))
    assert [[(lane.lane, lane.samples) for lane in turn.lanes] for turn in turns] == [
        [(0, 3), (1, 4), (2, 3)],  # of 5 samples 3 and 2, not 4 and 1
        [(0, 2), (1, 4)],
        [(1, 3)],
    ]
    assert [turn.lanes[0].step_samples for turn in turns] == [10, 6, 3]
    assert [lane.indices for lane in turns[1].lanes] == [[3, 4], [4, 5, 6, 7]]


def test_a_rank_without_samples_rides_its_last_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2, with lane 1 of 2; what rank 0 says is made up here."""

    class Other:
        def __init__(self, world: World) -> None:
            self.step = 0

        def begin(self, *numbers: int) -> None:
            self.numbers = list(numbers)

        def end(self) -> list[int]:
            self.step += 1
            return [4, self.step == 3, 0, 0, 0, *self.numbers[5:]]

    monkeypatch.setattr("paceline.data.stream_steps.Exchange", Other)
    world = World(rank=1, local_rank=1, size=2, device=torch.device("cpu"), backend="gloo")
    turns = list(turns_of(ByHand(99, 6), lanes=2, world=world))
    assert [(turn.lanes[0].lane, turn.lanes[0].samples, turn.lanes[0].step_samples) for turn in turns] == [
        (1, 4, 8), (1, 2, 6), (1, 0, 4),
    ]  # fmt: skip
    assert turns[2].lanes[0].data.tolist() == turns[1].lanes[0].data.tolist() == [104, 105]
    assert turns[2].lanes[0].indices == [4, 5]
    assert [turn.ends_epoch for turn in turns] == [False, False, True]


@pytest.mark.parametrize("size", [4, 5, 8, 9, 10, 13])
def test_no_lane_ends_with_a_single_sample(size: int) -> None:
    sizes = [turn.lanes[0].samples for turn in turns_of(Numbers(size), lanes=1)]
    assert sum(sizes) == size
    assert all(2 <= n <= 4 for n in sizes)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 7])
def test_a_run_goes_on_with_the_samples_that_it_had_not_seen(at: int, workers: int) -> None:
    dataset, told = Numbers(50, shuffles=True), []
    whole = list(turns_of(dataset, epochs=2))
    assert len(whole) == 10
    position = whole[at - 1].stream_position
    progress = Progress(phase="training")
    rest = turns_of(
        dataset,
        epochs=2,
        step=at,
        stream_position=position,
        warn=told.append,
        workers=workers,
        progress=progress,
    )
    assert plain(rest) == plain(whole[at:])
    assert progress.phase == "training"
    steps = at % 5
    assert [f"{steps} steps of epoch {at // 5 + 1}, up to {4 * steps} samples" in text for text in told] == [True]


def test_a_run_that_goes_on_with_an_epoch_reads_nothing_of_the_last_one() -> None:
    epochs = []

    class Watched(Numbers):
        def __iter__(self) -> Iterator[Any]:
            epochs.append(self.epoch)
            return super().__iter__()

    whole = list(turns_of(Numbers(50), epochs=2))
    assert plain(turns_of(Watched(50), epochs=2, step=5, stream_position=whole[4].stream_position)) == plain(whole[5:])
    assert epochs == [1, 1, 1]


def test_a_lane_that_had_ended_before_still_has_its_last_batch() -> None:
    whole = list(turns_of(ByHand(3, 20, 3)))
    rest = list(turns_of(ByHand(3, 20, 3), step=3, stream_position=whole[2].stream_position, warn=lambda text: None))
    assert plain(rest) == plain(whole[3:])


def test_max_steps_ends_the_run_in_the_middle_and_more_of_them_go_on_there() -> None:
    whole = list(turns_of(Numbers(50), epochs=2))
    short = list(turns_of(Numbers(50), epochs=2, max_steps=3))
    assert [(turn.ends_epoch, turn.ends_run) for turn in short] == [(False, False), (False, False), (True, True)]
    assert short[-1].stream_position == (0, 0)
    rest = turns_of(Numbers(50), epochs=2, step=3, stream_position=short[-1].stream_position, warn=lambda text: None)
    assert plain(rest) == plain(whole[3:])


def test_data_sets_that_share_by_workers_find_none() -> None:
    class ByWorkers(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            assert get_worker_info() is None
            yield from shard(range(12))

    assert samples_of(turns_of(ByWorkers(), workers=2)) == [[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]]


# --- what is refused ------------------------------------------------------------------------------------------------


class Unshared(IterableDataset):
    def __init__(self, make: Any = lambda number: torch.tensor([number])) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.make, range(20))


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
    turns = turns_of(Unshared(make), batch_size=batch_size, workers=workers, warn=lambda text: None)
    with pytest.raises(DataError, match=r"the same samples for lane 0 and lane 1; .*`yield from paceline\.shard"):
        next(iter(turns))


def test_one_lane_and_samples_that_are_all_alike_need_no_shares() -> None:
    assert len(list(turns_of(Unshared(), lanes=1))) == 5
    told: list[str] = []
    assert len(list(turns_of(Unshared(lambda number: torch.ones(2)), warn=told.append))) == 5
    assert [text.partition(":")[0] for text in told] == ["the data set does not call paceline.shard"]


def test_claims_are_equal_where_samples_are() -> None:
    assert digest_of_samples([torch.zeros(2), torch.ones(2)]) == digest_of_samples([torch.zeros(4)[::2], torch.ones(2)])
    assert digest_of_samples([torch.zeros(2), torch.ones(2)]) != digest_of_samples([torch.zeros(2), torch.ones(1, 2)])
    assert digest_of_samples([{"a": 1}, {"a": 2}]) != digest_of_samples([{"a": 1}, {"b": 2}])
    wave, sparse = torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()
    assert digest_of_samples([wave.conj(), sparse]) == digest_of_samples([wave.conj(), sparse])
    assert digest_of_samples([wave.conj(), sparse]) != digest_of_samples([wave.conj(), 2 * sparse])
    assert digest_of_samples([lambda: 1, 2]) > 0  # what does not pickle has words
    assert digest_of_samples([1]) == digest_of_samples([]) == digest_of_samples([1, 1]) == 0


def test_a_lane_without_samples_is_named() -> None:
    with pytest.raises(DataError, match=r"no samples for lane 2 of 3 in epoch 1; .* or use fewer lanes"):
        next(iter(turns_of(Numbers(2))))


def test_a_data_set_that_has_shrunk_since_the_run_was_saved_is_refused() -> None:
    stream_position = next(iter(turns_of(Numbers(50)))).stream_position
    with pytest.raises(DataError, match="fewer samples in epoch 1 than before the run was resumed at step 3"):
        next(iter(turns_of(Numbers(20), step=3, stream_position=stream_position, warn=lambda text: None)))


# --- the user's own loop --------------------------------------------------------------------------------------------


def loader_of(dataset: Any, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4, "seed": 3, "workers": 0, "world": ALONE, "on_batch": lambda *args: None,
        "warn": lambda text: pytest.fail(text),
    }  # fmt: skip
    return StreamLoader(dataset, **{**defaults, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_every_sample_once_an_epoch_and_tells_how_far_it_is(workers: int) -> None:
    told: list[tuple[int, int, int]] = []
    loader = loader_of(Numbers(21, shuffles=True), workers=workers, on_batch=lambda *args: told.append(args))
    epochs = [[(n, e) for numbers, e, *_ in loader for n, e in zip(numbers.tolist(), e.tolist(), strict=True)]
              for _ in range(3)]  # fmt: skip
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [(n, number) for n in range(21)]
    assert len({tuple(n for n, _ in epoch) for epoch in epochs}) == 3
    assert [e for e, _, _ in told] == [0] * 6 + [1] * 6 + [2] * 6
    assert sum(samples for _, _, samples in told) == 63
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_chosen_by_hand_reaches_the_data_set(workers: int) -> None:
    loader = loader_of(Numbers(8), workers=workers)
    seen = []
    for epoch in (5, 5, 2):
        loader.sampler.set_epoch(epoch)
        seen.append({e for _, epochs, *_ in loader for e in epochs.tolist()})
    assert seen == [{5}, {5}, {2}]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_workers_that_read_the_same_samples_are_refused(batch_size: int) -> None:
    with pytest.raises(DataError, match="the same samples for shard 0 and shard 1; "):
        list(loader_of(Unshared(), workers=2, batch_size=batch_size))
    assert len(list(loader_of(Unshared(lambda number: 1), workers=2))) == 10


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="no samples for rank 0 of 1"):
        list(loader_of(Numbers(0)))


def test_the_epoch_ends_when_one_rank_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        """Rank 1, which has three batches of two samples an epoch."""

        def __init__(self, world: World) -> None:
            self.calls = 0

        def begin(self, *numbers: int) -> None:
            self.mine = numbers

        def end(self) -> list[int]:
            self.calls += 1
            return [self.mine[0], 2 * (self.calls % 4 != 0), self.mine[2], 0]

    monkeypatch.setattr("paceline.data.stream_loader.Exchange", Other)
    world = World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo")
    told: list[str] = []
    loader = loader_of(Numbers(40), world=world, warn=told.append)
    assert [len(list(loader)) for _ in range(2)] == [3, 3]
    assert told == [
        "epoch 1 ends after 3 batches, because rank 1 has no more samples; "
        "at least 4 samples of other ranks are not used"
    ]
