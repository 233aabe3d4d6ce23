from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import Config
from paceline.data.epoch_order import GivenOrder, WeightedOrder, make_order, needs_length, shuffled
from paceline.data.lanes import LaneSampler, RankLanes
from paceline.errors import DataError
from support.datasets import StreamDataset
from support.worlds import world_of

MakeConfig = Callable[..., Config]
HERE = world_of()


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    order = WeightedOrder(np.array([0.0, 1.0, 3.0, 0.0, 6.0, 0.0]), seed=1)
    counts = Counter(order(0, np.arange(10_000)).tolist())
    assert set(counts) == {1, 2, 4}  # none without weight
    assert [counts[index] / 10_000 for index in (1, 2, 4)] == pytest.approx([0.1, 0.3, 0.6], abs=0.015)
    assert counts != Counter(order(1, np.arange(10_000)).tolist())


def test_a_draw_depends_on_seed_epoch_and_position_alone() -> None:
    weights = np.random.default_rng(0).random(50)
    whole = WeightedOrder(weights, seed=1)(3, np.arange(200))
    assert WeightedOrder(weights, seed=1)(3, np.array([150, 7])).tolist() == whole[[150, 7]].tolist()
    assert WeightedOrder(weights, seed=2)(3, np.arange(200)).tolist() != whole.tolist()


def test_a_draw_that_rounds_to_the_total_is_a_sample_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.epoch_order.uniform_at", lambda **_: np.array([0.0, np.nextafter(1, 0)]))
    for weights in ([0.0, 0.1, 0.7, 0.0], [0.0, 1e-300, 3e-300, 0.0], [0.0, 5e-324, 5e-324, 0.0]):
        assert WeightedOrder(np.array(weights), seed=0)(0, np.arange(2)).tolist() == [1, 2]


def test_lanes_of_several_ranks_and_of_a_resumed_run_draw_the_same_samples() -> None:
    options: dict[str, Any] = {"seed": 1, "size": 43, "batch_size": 4}
    order = WeightedOrder(np.arange(43.0), seed=1)
    whole = list(LaneSampler(**options, steps=range(9), rank_lanes=RankLanes(4, 1, 0), order=order))
    halves = [
        lane
        for rank in (0, 1)
        for lane in LaneSampler(**options, steps=range(4, 9), rank_lanes=RankLanes(4, 2, rank), order=order)
    ]
    assert sorted((lane.step, lane.lane, lane.indices) for lane in halves) == [
        (lane.step, lane.lane, lane.indices) for lane in whole if lane.step >= 4
    ]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, iter])
def test_the_users_order_may_be_a_list_an_array_or_a_tensor(kind: Any) -> None:
    order = GivenOrder(lambda epoch, size: kind([epoch, 2, 2, 0]), seed=0, size=4)
    order.check(1, HERE)
    assert order(1, np.array([0, 3, 1])).tolist() == [1, 0, 2]
    assert order(3, np.array([0, 3, 1])).tolist() == [3, 0, 2]


def test_the_users_order_is_asked_for_once_an_epoch() -> None:
    asked = []
    order = GivenOrder(lambda epoch, size: asked.append(epoch) or range(size), seed=0, size=4)  # type: ignore[func-returns-value]
    for epoch in (0, 0, 0, 1, 1):
        order(epoch, np.arange(2))
    assert asked == [0, 1]


@pytest.mark.parametrize(
    "shuffle",
    [lambda size: torch.randperm(size), lambda size: np.random.permutation(size)],
    ids=["torch", "numpy"],
)
def test_random_orders_are_keyed_by_seed_and_epoch(shuffle: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    orders = [GivenOrder(lambda epoch, size: shuffle(size), seed=seed, size=40) for seed in (0, 0, 1)]
    first, same, other = (order(2, np.arange(40)).tolist() for order in orders)
    orders[0].check(2, HERE)
    assert first == same != other
    assert sorted(first) == list(range(40))
    assert torch.rand(1) == expected  # the generators are left as they were


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([0, 1, 2], "returned 3 numbers of type int64 for epoch 7; it must return 4 integers, one for each position"),
        ([0.0, 1.0, 2.0, 3.0], "returned 4 numbers of type float64 for epoch 7; it must return 4 integers"),
        ([[0, 1], [2, 3]], "returned a list for epoch 7; it must return 4 integers"),
        (None, "returned a NoneType for epoch 7; it must return 4 integers"),
        ([0, 1, 2, 4], r"returned indices from 0 to 4 for epoch 7; they must be in 0\.\.3"),
        ([-1, 1, 2, 3], r"returned indices from -1 to 3 for epoch 7; they must be in 0\.\.3"),
    ],
)
def test_an_order_that_is_none_is_refused(given: Any, problem: str) -> None:
    order = GivenOrder(lambda epoch, size: given, seed=0, size=4)
    for use in (lambda: order(7, np.arange(1)), lambda: order.check(7, HERE)):
        with pytest.raises(DataError, match=f"order_fn {problem}"):
            use()


def test_an_order_with_state_of_its_own_is_refused() -> None:
    generator = np.random.default_rng(0)
    order = GivenOrder(lambda epoch, size: generator.permutation(size), seed=0, size=40)
    with pytest.raises(
        DataError,
        match="order_fn returns a different order when it is called again for an epoch; compute it from its arguments, "
        "or from the global generators",
    ):
        order.check(0, HERE)


@pytest.mark.parametrize(
    "keys",
    [{"sample_weights": len}, {"order_fn": lambda epoch, size: range(size), "val_fraction": 0}],
    ids=["sample_weights", "order_fn"],
)
def test_an_iterable_data_set_has_no_order_of_ours(make_config: MakeConfig, keys: dict[str, Any]) -> None:
    stream = StreamDataset(lambda: range(3))
    with pytest.raises(DataError, match=f"{next(iter(keys))} needs a data set with a length"):
        needs_length(make_config(**keys), stream)


def test_without_a_key_samples_are_shuffled(make_config: MakeConfig) -> None:
    order, positions = make_order(make_config(seed=4), range(30), HERE), np.arange(30)
    assert order(2, positions).tolist() == shuffled(4, 30)(2, positions).tolist()
