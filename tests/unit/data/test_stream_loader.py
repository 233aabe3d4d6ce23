"""The loader of the user's own loop for iterable data sets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paceline.data.stream_loader import StreamLoader
from paceline.errors import DataError
from support.worlds import fake_world

from .streams import ALONE, Numbers, unsharded


def loader_of(dataset: Any, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4, "seed": 3, "workers": 0, "world": ALONE, "on_batch": lambda *args: None,
        "warn": lambda text: pytest.fail(text),
    }  # fmt: skip
    return StreamLoader(dataset, **{**defaults, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_yields_every_sample_once_per_epoch_and_reports_its_batches(workers: int) -> None:
    reported: list[tuple[int, int, int]] = []
    loader = loader_of(Numbers(21, shuffles=True), workers=workers, on_batch=lambda *args: reported.append(args))
    epochs = [[(n, e) for numbers, e, *_ in loader for n, e in zip(numbers.tolist(), e.tolist(), strict=True)]
              for _ in range(3)]  # fmt: skip
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [(n, number) for n in range(21)]
    assert len({tuple(n for n, _ in epoch) for epoch in epochs}) == 3
    assert [e for e, _, _ in reported] == [0] * 6 + [1] * 6 + [2] * 6
    assert sum(samples for _, _, samples in reported) == 63
    with pytest.raises(TypeError):
        len(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_reaches_the_data_set(workers: int) -> None:
    loader = loader_of(Numbers(8), workers=workers)
    seen = []
    for epoch in (5, 5, 2):
        loader.sampler.set_epoch(epoch)
        seen.append({e for _, epochs, *_ in loader for e in epochs.tolist()})
    assert seen == [{5}, {5}, {2}]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_workers_that_read_the_same_samples_are_refused(batch_size: int) -> None:
    with pytest.raises(DataError, match="the same samples for shard 0 and shard 1; "):
        list(loader_of(unsharded(), workers=2, batch_size=batch_size))
    assert len(list(loader_of(unsharded(lambda number: 1), workers=2))) == 10


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="no samples for rank 0 of 1"):
        list(loader_of(Numbers(0)))


def test_the_epoch_ends_when_one_rank_has_no_more_samples() -> None:
    """Rank 1 is made up: it has three batches of two samples an epoch."""
    call, reported = itertools.count(1), list[str]()
    world = fake_world(size=2, exchanged=lambda *mine: [mine[0], 2 * (next(call) % 4 != 0), mine[2], 0])
    loader = loader_of(Numbers(40), world=world, warn=reported.append)
    assert [len(list(loader)) for _ in range(2)] == [3, 3]
    assert reported == [
        "epoch 1 ends after 3 batches, because rank 1 has no more samples; "
        "at least 4 samples of other ranks are not used"
    ]
