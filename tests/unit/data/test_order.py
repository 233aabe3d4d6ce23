from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.epoch_order import shuffled
from paceline.data.order import CHUNK, Indices, indices_at, indices_of, uniform_at

SEEDS = st.integers(-(2**63), 2**64)
EPOCHS = st.integers(-1, 10**9)


def whole(size: int, *, seed: int = 0, epoch: int = 0) -> Indices:
    return indices_at(seed=seed, epoch=epoch, size=size, positions=np.arange(size))


# --- a permutation, at any place, in no memory --------------------------------------------------------------


@given(size=st.integers(1, 3000), seed=SEEDS, epoch=EPOCHS)
@settings(max_examples=60, deadline=None)
def test_every_index_is_used_exactly_once_per_epoch(size: int, seed: int, epoch: int) -> None:
    assert sorted(whole(size, seed=seed, epoch=epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [*range(1, 40), 99, 100, 101, 1023, 1024, 1025, 65_537])
def test_every_index_is_used_once_at_the_edges_of_the_grid(size: int) -> None:
    assert np.array_equal(np.sort(whole(size, seed=size, epoch=3)), np.arange(size))


@given(data=st.data(), size=st.integers(1, 2000), seed=SEEDS, epoch=EPOCHS)
@settings(max_examples=40, deadline=None)
def test_some_positions_have_the_same_indices_as_in_the_whole_order(
    data: st.DataObject, size: int, seed: int, epoch: int
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=30))
    alone = indices_at(seed=seed, epoch=epoch, size=size, positions=positions)
    assert alone.tolist() == whole(size, seed=seed, epoch=epoch)[np.asarray(positions, dtype=int)].tolist()


def test_the_indices_have_the_shape_of_the_positions() -> None:
    order = whole(12, seed=5)
    square = indices_at(seed=5, epoch=0, size=12, positions=np.arange(12).reshape(3, 4))
    single = indices_at(seed=5, epoch=0, size=12, positions=7)
    assert square.tolist() == order.reshape(3, 4).tolist()
    assert single.shape == ()
    assert int(single) == order[7]


def test_the_end_of_a_billion_samples_needs_no_table() -> None:
    size, positions = 10**9, np.arange(10**9 - 4096, 10**9)
    indices_at(seed=1, epoch=0, size=10, positions=[0])  # so that nothing is measured that happens only once
    tracemalloc.start()
    try:
        indices = indices_at(seed=1, epoch=0, size=size, positions=positions)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert len(set(indices.tolist())) == len(positions)
    assert 0 <= indices.min() <= indices.max() < size


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size={size} must be at least 1"):
        indices_at(seed=0, epoch=0, size=size, positions=[])


@pytest.mark.parametrize(("positions", "reach"), [([3, 10], "3 to 10"), ([-1, 4], "-1 to 4")])
def test_positions_outside_the_epoch_are_an_error(positions: list[int], reach: str) -> None:
    with pytest.raises(ValueError, match=rf"positions range from {reach}; they must be in 0\.\.9"):
        indices_at(seed=0, epoch=0, size=10, positions=positions)


# --- the order is part of what a run is: it never changes between versions ----------------------------------


@pytest.mark.parametrize(
    ("seed", "epoch", "size", "positions", "indices"),
    [
        (0, 0, 10, range(10), [7, 1, 0, 4, 5, 6, 2, 3, 8, 9]),
        (0, 1, 10, range(10), [9, 5, 0, 6, 4, 7, 3, 2, 8, 1]),
        (2024, 7, 1797, [0, 1, 2, 3, 895, 1796], [1334, 1064, 106, 1130, 1036, 307]),
        (-5, -1, 10**12, [0, 1, 10**12 - 1], [724875554580, 402745160077, 12698411158]),
    ],
)
def test_the_order_is_the_same_in_every_version(
    seed: int, epoch: int, size: int, positions: range | list[int], indices: list[int]
) -> None:
    assert indices_at(seed=seed, epoch=epoch, size=size, positions=list(positions)).tolist() == indices


# --- many spans at once -------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(0, 40), max_size=30), seed=SEEDS, epoch=EPOCHS)
@settings(max_examples=40, deadline=None)
def test_spans_have_the_same_indices_together_and_alone(lengths: list[int], seed: int, epoch: int) -> None:
    ends = np.cumsum([0, *lengths]).tolist()
    spans = [range(first, last) for first, last in pairwise(ends)]
    size = max(1, ends[-1])
    together = list(indices_of(iter(spans), partial(shuffled(seed, size), epoch)))
    alone = [indices_at(seed=seed, epoch=epoch, size=size, positions=list(span)).tolist() for span in spans]
    assert together == alone


def test_spans_that_reach_over_several_chunks_give_the_whole_order() -> None:
    size, length = 2 * CHUNK + 123, 1000
    spans = [range(first, min(first + length, size)) for first in range(0, size, length)]
    together = list(indices_of(spans, partial(shuffled(3, size), 2)))
    assert [len(indices) for indices in together] == [len(span) for span in spans]
    assert list(chain.from_iterable(together)) == whole(size, seed=3, epoch=2).tolist()


def test_spans_are_taken_only_as_they_are_needed() -> None:
    taken = []

    def spans() -> Iterator[range]:
        for first in range(0, 100 * CHUNK, CHUNK):
            taken.append(first)
            yield range(first, first + CHUNK)

    next(indices_of(spans(), partial(shuffled(0, 100 * CHUNK), 0)))
    assert len(taken) == 1


# --- as good as a random permutation: fixed seeds, limits at about one in a thousand or rarer ---------------

SIZES = [4096, 5000, 9973, 10_000]  # a power of two, not a square, a prime, a square


def correlation(first: Indices, second: Indices) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def cycle_lengths(order: Indices) -> list[int]:
    following, lengths = order.tolist(), []
    unseen = set(range(len(following)))
    while unseen:
        length, place = 0, next(iter(unseen))
        while place in unseen:
            unseen.remove(place)
            place = following[place]
            length += 1
        lengths.append(length)
    return lengths


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_in_the_order_are_uncorrelated(size: int) -> None:
    order = whole(size, seed=11)
    assert abs(correlation(order[:-1], order[1:])) < 4 / math.sqrt(size)
    # The distance from one index to the next, round the circle, is anything as often as anything else.
    counts = np.bincount((np.diff(order) % size) * 50 // size, minlength=50)
    expected = (size - 1) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 89  # chi-square, 49 degrees of freedom


@pytest.mark.parametrize("size", SIZES)
def test_indices_are_uncorrelated_with_their_positions(size: int) -> None:
    assert abs(correlation(np.arange(size), whole(size, seed=12))) < 4 / math.sqrt(size)


@pytest.mark.parametrize("size", SIZES)
def test_epochs_and_seeds_are_uncorrelated_with_each_other(size: int) -> None:
    orders = [whole(size, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    pairs = [(a, b) for n, a in enumerate(orders) for b in orders[:n]]
    assert max(abs(correlation(a, b)) for a, b in pairs) < 4.5 / math.sqrt(size)
    # Two random permutations agree in one place on average.
    agreements = [int((a == b).sum()) for a, b in pairs]
    assert max(agreements) <= 7
    assert abs(np.mean(agreements) - 1) < 4 / math.sqrt(len(pairs))


def test_seed_and_epoch_are_not_interchangeable() -> None:
    pairs = [(0, 1), (1, 0), (1, 23), (12, 3), (2, 1), (1, 2)]
    assert len({tuple(whole(50, seed=seed, epoch=epoch)) for seed, epoch in pairs}) == len(pairs)


def test_fixed_points_are_as_many_as_in_random_permutations() -> None:
    fixed = [int((whole(101, seed=seed) == np.arange(101)).sum()) for seed in range(800)]
    assert abs(np.mean(fixed) - 1) < 4 / math.sqrt(800)
    assert abs(fixed.count(0) / 800 - math.exp(-1)) < 4 * math.sqrt(0.3679 * 0.6321 / 800)


def test_cycles_are_as_many_and_as_long_as_in_random_permutations() -> None:
    size, orders = 500, 200
    lengths = [cycle_lengths(whole(size, seed=seed, epoch=1)) for seed in range(orders)]
    harmonic = sum(1 / n for n in range(1, size + 1))
    variance = harmonic - sum(1 / n**2 for n in range(1, size + 1))
    assert abs(np.mean([len(cycles) for cycles in lengths]) - harmonic) < 4 * math.sqrt(variance / orders)
    # The longest cycle of a random permutation holds 0.6243 of it on average, with a deviation of 0.192.
    longest = [max(cycles) / size for cycles in lengths]
    assert abs(np.mean(longest) - 0.6243) < 4 * 0.192 / math.sqrt(orders)


@pytest.mark.parametrize(
    ("size", "orders", "limit"), [(3, 900, 20.5), (4, 1200, 49.7), (5, 1800, 173.6)], ids=["3", "4", "5"]
)
def test_small_sizes_take_all_permutations_equally_often(size: int, orders: int, limit: float) -> None:
    counts = Counter(tuple(whole(size, seed=seed).tolist()) for seed in range(orders))
    permutations = math.factorial(size)
    expected = orders / permutations
    never_seen = (permutations - len(counts)) * expected
    assert never_seen + sum((count - expected) ** 2 / expected for count in counts.values()) < limit


@pytest.mark.parametrize("size", [7, 9, 25])
def test_even_and_odd_permutations_are_equally_frequent_at_odd_squares(size: int) -> None:
    orders = 400
    odd = sum((size - len(cycle_lengths(whole(size, seed=seed)))) % 2 for seed in range(orders))
    assert abs(odd / orders - 0.5) < 4 * 0.5 / math.sqrt(orders)


def test_random_numbers_depend_on_seed_epoch_and_position_alone() -> None:
    draws = uniform_at(seed=3, epoch=2, positions=range(1000))
    assert uniform_at(seed=3, epoch=2, positions=[999, 4]).tolist() == draws[[999, 4]].tolist()
    assert uniform_at(seed=3, epoch=2, positions=[0, 1]).tolist() == [0.8360018144115686, 0.7703204475367607]
    others = [uniform_at(seed=3, epoch=3, positions=range(1000)), uniform_at(seed=4, epoch=2, positions=range(1000))]
    for other in others:
        assert abs(np.corrcoef(draws, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.1


def test_random_numbers_are_uniform() -> None:
    draws = uniform_at(seed=0, epoch=0, positions=range(100_000))
    assert 0 <= draws.min() < 1e-4
    assert 1 - 1e-4 < draws.max() < 1
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-squared with 99 degrees of freedom: 1 in 10,000
