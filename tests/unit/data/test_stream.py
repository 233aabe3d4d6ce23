"""Shards of an iterable data set, and one pass over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import shard
from paceline.data.shard import DataShard
from paceline.data.stream import ShardReader
from support.datasets import StreamDataset

from .streams import Numbers


def test_outside_of_a_run_shard_returns_all_samples() -> None:
    assert shard() == (0, 1)
    assert list(shard("abcde")) == list("abcde")


def call_shard_often() -> Iterator[int]:
    for number in range(10):
        index, count = shard()
        if number % count == index:
            yield number


@pytest.mark.parametrize("samples", [lambda: shard(range(10)), call_shard_often], ids=["once", "often"])
def test_a_shard_is_every_nth_sample_whenever_the_data_set_calls_shard(samples: Any) -> None:
    readers = [ShardReader(StreamDataset(samples), DataShard(k, 3), common=(0,), own=(0, k)) for k in range(3)]
    taken = [[], [], []]
    for _ in range(4):  # alternating, so that a shard which is set only once would be read by another reader
        for mine, reader in zip(taken, readers, strict=True):
            mine += reader.take(1)
    assert taken == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert shard() == (0, 1)


def test_samples_shuffled_before_the_call_are_sharded_without_loss() -> None:
    readers = [ShardReader(Numbers(10, shuffles=True), DataShard(k, 3), common=(0, "x"), own=(0, k)) for k in range(3)]
    taken = [reader.take(9) for reader in readers]
    assert sorted(sample[0] for samples in taken for sample in samples) == list(range(10))
    drawn = [value for samples in taken for sample in samples for value in sample[2:]]
    assert len(set(drawn)) == len(drawn)  # each shard draws different numbers


def test_an_unsharded_data_set_draws_different_numbers_after_the_first_sample() -> None:
    noise = StreamDataset(lambda: iter(random.random, None))
    first, second = (ShardReader(noise, DataShard(k, 2), common=(0,), own=(0, k)).take(4) for k in range(2))
    assert not set(first[1:]) & set(second)
    assert len(set(first)) == 4
