"""The loader of the user's own loop, for data sets with a length."""

from __future__ import annotations

import pytest

from paceline.data.epoch_loader import EpochSampler, epoch_loader
from paceline.data.epoch_order import shuffled
from paceline.data.order import indices_at
from paceline.errors import DataError
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
