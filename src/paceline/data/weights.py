"""The weights by which training samples are drawn: from a column, an array, or a function of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.config import Config
from paceline.data.seeding import keyed_generators
from paceline.data.sources import SplitSubset, table_of
from paceline.errors import DataError

Weights: TypeAlias = npt.NDArray[np.float64]

FORMS = "set a column of df, one number for each sample, or a function of the data set"


def training_weights(config: Config, training: Any) -> Weights:
    """The weights of the training samples; `sample_weights` has one for each sample of the whole data set."""
    dataset = training.base if isinstance(training, SplitSubset) else training
    weights = _numbers(_given(config, dataset))
    if len(weights) != len(dataset):
        raise DataError(f"sample_weights has {len(weights)} numbers for {len(dataset)} samples; give one per sample")
    if isinstance(training, SplitSubset):
        weights = weights[training.base_index_array(np.arange(len(training)))]
    with np.errstate(over="ignore"):
        total = weights.sum()
    if not 0 < total < np.inf:
        raise DataError(f"sample_weights of the training samples sum to {total}; use positive, finite weights")
    return weights


def weight_problems(config: Config) -> Iterator[str]:
    """The problems with `sample_weights` that are known before the data set is created."""
    given = config.sample_weights
    if given is None or callable(given):
        return
    if isinstance(given, str):
        if ":" in given:  # a function that is not found, which has been reported
            return
        if config.df is None:
            yield f"sample_weights={given!r} names a column, but there is no df; {FORMS}"
        elif hasattr(config.df, "columns") and given not in config.df.columns:
            yield f"sample_weights={given!r} is not a column of df; {FORMS}"
        return
    try:
        _numbers(given)
    except DataError as error:
        yield str(error)


def _given(config: Config, dataset: Any) -> Any:
    given = config.sample_weights
    if callable(given):
        with keyed_generators(config.seed, "weights"):  # random weights must not differ between ranks
            return given(dataset)
    if not isinstance(given, str):
        return given
    table = table_of(config.df)
    if table is None or given not in table:
        raise DataError(f"sample_weights={given!r} is not a column of df; {FORMS}")
    return table[given]


def _numbers(given: Any) -> Weights:
    """The weights as an array, checked."""
    if hasattr(given, "detach"):  # a tensor, perhaps on a GPU
        given = given.detach().cpu().double()
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.zeros(())
    if weights.ndim != 1:
        raise DataError(f"sample_weights is a {type(given).__name__} without one number for each sample; {FORMS}")
    bad = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
    if bad.size:
        raise DataError(
            f"sample_weights has {weights[bad[0]]:g} for sample {bad[0]}; weights must be finite and not negative"
        )
    if not weights.any():
        raise DataError("sample_weights has no positive weight; add some")
    return weights
