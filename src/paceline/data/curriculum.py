"""Easy samples first: the samples that an epoch may use, as a function of the epoch only.

The number of samples in an epoch and their keyed order stay the same. While an epoch uses only a part of the data, it
repeats the samples of that part, each equally often (counts differ by at most one).
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
    """The samples sorted by difficulty, and the number that each epoch may use."""

    def __init__(self, difficulties: Any, pacing: Pacing, *, first_epoch: int = 0) -> None:
        """`difficulties` are numbers, one per sample; equal samples keep the order of the data set.

        NaN counts as harder than any number. `first_epoch` is the epoch that uses `pacing.start`.
        """
        self._ranked = np.argsort(np.asarray(difficulties, dtype=np.float64), kind="stable")
        self._pacing, self._first_epoch = pacing, first_epoch

    def choose(self, indices: Indices, epoch: int) -> Indices:
        """The samples that replace the samples in the epoch's order."""
        return self._ranked[indices % self.samples_in(epoch)]

    def samples_in(self, epoch: int) -> int:
        """The number of samples that an epoch may use (pure)."""
        return max(1, round(fraction_at(epoch - self._first_epoch, self._pacing) * len(self._ranked)))


def fraction_at(epoch: int, pacing: Pacing) -> float:
    """The fraction of the data that an epoch may use: `start` in the first, 1 after `epochs` (pure)."""
    done, start = min(epoch / pacing.epochs, 1.0), pacing.start
    if pacing.name == "linear":
        return start + (1 - start) * done
    if pacing.name == "root":
        return float((start**2 + (1 - start**2) * done) ** 0.5)
    return start if done < 1 else 1.0


def make_curriculum(config: Config, training: Any) -> Curriculum | None:
    """The curriculum of a config, if it is known before training; each rank calls difficulty_fn for all samples."""
    if config.curriculum is None:
        return None
    if is_stream(training):
        raise DataError("curriculum needs a data set with a length; order the samples of an iterable data set yourself")
    if config.curriculum.by == "loss":
        return None
    if config.difficulty_fn is None:
        return Curriculum(_column(config, training), config.curriculum)
    difficulty_of = config.function("difficulty_fn")
    seed_generators(config.seed, "difficulty")  # random samples must not differ between ranks
    difficulties = [difficulty_of(training[index]) for index in range(len(training))]
    try:
        return Curriculum([float(number) for number in difficulties], config.curriculum)
    except (TypeError, ValueError) as error:
        raise DataError(f"difficulty_fn must return a number for each sample: {error}") from None


def _column(config: Config, training: Any) -> Any:
    """The difficulties of the training samples, from a column of the table."""
    assert config.curriculum is not None
    name, table, size = config.curriculum.column, table_of(config.df), len(getattr(training, "base", training))
    if table is None or name not in table:
        raise DataError(f"curriculum.column={name} is not a column of df; name a column, or set difficulty_fn")
    if len(table) != size:
        raise DataError(f"curriculum.column={name} has {len(table)} rows for {size} samples; set difficulty_fn instead")
    values = table[name].to_numpy()
    return values[original_indices(training, range(len(training)))] if isinstance(training, SplitSubset) else values
