"""Easy samples first: which of them an epoch may use, as a function of the epoch alone.

An epoch has as many samples as ever, in its keyed order. While only a part of the data is in, its samples come several
times, each as often as the others, give or take one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.config import Config, Pacing
from paceline.data.order import Indices
from paceline.data.seeding import seed_generators
from paceline.data.sources import SplitSubset, is_stream, original_indices, table_of
from paceline.errors import DataError


class Curriculum:
    """The samples by their difficulty, and how many of them an epoch may use."""

    def __init__(self, difficulties: Any, pacing: Pacing, *, first_epoch: int = 0) -> None:
        """`difficulties` are numbers, one a sample; where two are equal, the order of the data set decides.

        NaN is harder than anything. `first_epoch` is the one that uses `pacing.start`.
        """
        self._ranked = np.argsort(np.asarray(difficulties, dtype=np.float64), kind="stable")
        self._pacing, self._first_epoch = pacing, first_epoch

    def choose(self, indices: Indices, epoch: int) -> Indices:
        """The samples in place of those that the epoch's order has."""
        return self._ranked[indices % self.samples_in(epoch)]

    def samples_in(self, epoch: int) -> int:
        """How many samples an epoch may use (pure)."""
        return max(1, round(fraction_at(epoch - self._first_epoch, self._pacing) * len(self._ranked)))


def fraction_at(epoch: int, pacing: Pacing) -> float:
    """The share of the data that an epoch may use: `start` in the first, everything after `epochs` (pure)."""
    done, start = min(epoch / pacing.epochs, 1.0), pacing.start
    if pacing.name == "linear":
        return start + (1 - start) * done
    if pacing.name == "root":
        return float((start**2 + (1 - start**2) * done) ** 0.5)
    return start if done < 1 else 1.0


def make_curriculum(config: Config, training: Any) -> Curriculum | None:
    """The curriculum of a config, if it is known before training: every sample is asked for its difficulty once."""
    if config.curriculum is None:
        return None
    if is_stream(training):
        raise DataError("curriculum needs a data set with a length; order the samples of an iterable one yourself")
    if config.curriculum.by == "loss":
        return None
    if config.difficulty_fn is None:
        return Curriculum(_column(config, training), config.curriculum)
    of = config.function("difficulty_fn")
    seed_generators(config.seed, "difficulty")  # samples may be random, but not differ between ranks
    difficulties = [of(training[index]) for index in range(len(training))]
    try:
        return Curriculum([float(number) for number in difficulties], config.curriculum)
    except (TypeError, ValueError) as error:
        raise DataError(f"difficulty_fn must give a number for each sample: {error}") from None


def _column(config: Config, training: Any) -> Any:
    """The difficulties in a column of the table."""
    assert config.curriculum is not None
    name, table, size = config.curriculum.column, table_of(config.df), len(getattr(training, "base", training))
    if table is None or name not in table:
        raise DataError(f"curriculum.column={name} is not a column of df; give another one, or a difficulty_fn")
    if len(table) != size:
        raise DataError(
            f"curriculum.column={name} has {len(table)} rows for {size} samples; give a difficulty_fn instead"
        )
    values = table[name].to_numpy()
    return values[original_indices(training, range(len(training)))] if isinstance(training, SplitSubset) else values
