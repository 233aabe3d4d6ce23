"""Easy samples first: the fraction of an epoch, and samples that depend on the epoch alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from paceline import Sum
from paceline.config import Config, Pacing
from paceline.data.curriculum import Curriculum, fraction_at, make_curriculum
from paceline.data.epoch_order import paced, shuffled
from paceline.data.feed import Feed
from paceline.data.lanes import LaneSampler, RankLanes
from paceline.data.sources import SplitSubset
from paceline.errors import ConfigError, DataError
from paceline.worker.evaluate import Evaluator
from support.worlds import world_of

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("name", "fractions"),
    [
        ("linear", [0.2, 0.4, 0.6, 0.8, 1, 1]),
        ("root", [0.2, 0.5292, 0.7211, 0.8718, 1, 1]),
        ("step", [0.2] * 4 + [1, 1]),
    ],
)
def test_the_fraction_grows_from_start_to_1(name: Any, fractions: list[float]) -> None:
    pacing = Pacing(start=0.2, epochs=4, name=name)
    assert [fraction_at(epoch, pacing) for epoch in range(6)] == pytest.approx(fractions, abs=1e-4)


def test_an_epoch_uses_the_easiest_samples_equally_often() -> None:
    curriculum = Curriculum([5, 1, 4, 2, 3, 0, 9, 8, 7, 6], Pacing(start=0.3, epochs=2))
    seen = Counter(curriculum.choose(np.random.default_rng(0).permutation(10), 0).tolist())
    assert seen.keys() == {5, 1, 3}
    assert sorted(seen.values()) == [3, 3, 4]
    assert sorted(curriculum.choose(np.arange(10), 2).tolist()) == list(range(10))


def test_at_least_one_sample_is_used_and_equal_ones_keep_their_order() -> None:
    curriculum = Curriculum([1.0] * 5, Pacing(start=1e-6, epochs=1))
    assert curriculum.choose(np.arange(5), 0).tolist() == [0] * 5
    assert curriculum.choose(np.arange(5), 1).tolist() == [0, 1, 2, 3, 4]


def test_lanes_follow_the_curriculum_also_in_a_resumed_run() -> None:
    curriculum = Curriculum(np.arange(40)[::-1], Pacing(start=0.25, epochs=2))
    options: dict[str, Any] = {"seed": 1, "size": 40, "batch_size": 4, "rank_lanes": RankLanes(2, 1, 0)}
    order = paced(shuffled(1, 40), curriculum)
    whole = list(LaneSampler(**options, steps=range(15), order=order))
    later = list(LaneSampler(**options, steps=range(7, 15), order=order))
    assert later == whole[14:]
    first = [index for lane in whole[:10] for index in lane.indices]
    assert set(first) == set(range(30, 40))
    assert set(Counter(first).values()) == {4}
    assert whole != list(LaneSampler(**options, steps=range(15)))


def test_difficulty_comes_from_a_function_or_from_a_column(make_config: MakeConfig) -> None:
    pandas = pytest.importorskip("pandas")
    samples = [3, 1, 2, 0]
    by_function = make_curriculum(make_config(curriculum={"epochs": 1}, difficulty_fn=lambda sample: sample), samples)
    frame = pandas.DataFrame({"hard": samples})
    by_column = make_curriculum(make_config(curriculum={"epochs": 1, "column": "hard"}, df=frame), samples)
    for made in (by_function, by_column):
        assert made is not None
        assert made.choose(np.arange(4), 1).tolist() == [3, 1, 2, 0]
    part = SplitSubset(samples, seed=0, positions=range(3))
    of_part = make_curriculum(make_config(curriculum={"epochs": 1, "column": "hard"}, df=frame), part)
    assert of_part is not None
    ranked = of_part.choose(np.arange(3), 1).tolist()
    assert [part[index] for index in ranked] == sorted(part[index] for index in range(3))
    assert make_curriculum(make_config(), samples) is None


def test_mistakes_are_named(make_config: MakeConfig) -> None:
    pandas = pytest.importorskip("pandas")
    sources = "give difficulty_fn, curriculum.column or by: loss"
    for several in ({"epochs": 1}, {"column": "hard", "by": "loss"}):
        with pytest.raises(ConfigError, match=sources):
            make_config(curriculum=several, num_epochs=2)
    with pytest.raises(ConfigError, match=r"curriculum\.by=loss ranks the samples after the first epoch"):
        make_config(curriculum={"by": "loss"})
    with pytest.raises(ConfigError, match="difficulty_fn belongs to a curriculum"):
        make_config(difficulty_fn=len)
    with pytest.raises(DataError, match="difficulty_fn must return a number for each sample"):
        make_curriculum(make_config(curriculum={"epochs": 1}, difficulty_fn=lambda sample: "hard"), [1, 2])
    short = make_config(curriculum={"epochs": 1, "column": "hard"}, df=pandas.DataFrame({"hard": [1]}))
    with pytest.raises(DataError, match="has 1 rows for 2 samples"):
        make_curriculum(short, [1, 2])
    other = make_config(curriculum={"epochs": 1, "column": "easy"}, df=pandas.DataFrame({"hard": [1, 2]}))
    with pytest.raises(DataError, match="is not a column of df"):
        make_curriculum(other, [1, 2])


def test_the_config_of_a_curriculum_is_written(make_config: MakeConfig) -> None:
    config = make_config(curriculum={"epochs": 3, "start": 0.5}, difficulty_fn=len)
    assert "curriculum:\n  start: 0.5\n  epochs: 3\n" in config.to_yaml()


# --- by loss --------------------------------------------------------------------------------------------------------


def test_by_loss_the_second_epoch_is_the_first_of_the_pacing_and_nan_is_last() -> None:
    losses = torch.tensor([0.5, float("nan"), 0.1, float("inf"), float("nan"), 0.1])
    curriculum = Curriculum(losses, Pacing(by="loss", start=1 / 3, epochs=1), first_epoch=1)
    assert curriculum.choose(np.arange(4), 1).tolist() == [2, 5, 2, 5]
    assert curriculum.choose(np.arange(6), 2).tolist() == [2, 5, 0, 3, 1, 4]


class Doubled(torch.nn.Module):
    """In evaluation twice its input; while it trains nothing that could be ranked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), 1) if self.training else 2 * x


def evaluator(make_config: MakeConfig, **options: Any) -> Evaluator:
    data = TensorDataset(torch.arange(5.0)[:, None], torch.tensor([[0.0], [2.0], [4.0], [5.0], [8.0]]))
    config = make_config(curriculum={"by": "loss"}, num_epochs=2, batch_size=2, loss_fn=mse_loss, **options)
    world = world_of()
    return Evaluator(Feed(data, config, world), config, world)


def test_every_sample_has_its_own_loss_in_the_order_of_the_data_set(make_config: MakeConfig) -> None:
    rounds, model = [], Doubled()
    losses = evaluator(make_config).losses(model, lambda done, total: rounds.append((done, total)))
    assert losses.tolist() == [0, 0, 0, 1, 0]
    assert rounds == [(1, 3), (2, 3), (3, 3)]
    assert model.training


def weighted(output: torch.Tensor, target: torch.Tensor) -> Sum:
    weights = (target > 0).float()
    return Sum(((output + 1 - target).square() * weights).sum(), weights.sum())


def test_a_loss_may_be_a_sum_and_a_count_and_nothing_counted_is_nan(make_config: MakeConfig) -> None:
    measured = evaluator(make_config)
    measured.forward.loss_fn = weighted
    assert measured.losses(Doubled(), lambda *_: None).tolist() == pytest.approx([np.nan, 1, 1, 4, 1], nan_ok=True)
    measured.try_losses(Doubled())


def test_losses_that_no_sample_has_by_itself_are_refused_before_training(make_config: MakeConfig) -> None:
    measured = evaluator(make_config)
    measured.try_losses(Doubled())
    measured.forward.loss_fn = lambda output, target: output.var(0, correction=0).sum()
    with pytest.raises(DataError, match="returns 0 for every single sample, as if it compared them"):
        measured.try_losses(Doubled())
    measured.forward.loss_fn = lambda output, target: target.sum() * 0 + 3.0  # equal, and so is their mean
    measured.try_losses(Doubled())


def test_outputs_without_a_row_for_each_sample_are_refused(make_config: MakeConfig) -> None:
    class Summed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.raises(DataError, match=r"a row for each of 2 samples, not a tensor of shape \(\)"):
        evaluator(make_config).try_losses(Summed())
