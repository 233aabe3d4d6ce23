"""The order of the samples in each epoch: shuffled, easy samples first, drawn by weights, or the user's own.

An order is a function of the epoch and of positions in it, without state: a run resumes at any step, and any rank
computes only the samples of its lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from paceline.config import Config
from paceline.data.curriculum import Curriculum
from paceline.data.order import Indices, indices_at, uniform_at
from paceline.data.seeding import keyed_generators
from paceline.data.sources import is_stream
from paceline.data.weights import Weights, training_weights
from paceline.errors import DataError
from paceline.world import World

Order: TypeAlias = Callable[[int, Indices], Indices]  # (epoch, positions) → the indices of the samples there


def make_order(config: Config, training: Any, world: World, *, epoch: int = 0) -> Order:
    """The order of the training samples for a config; `epoch` is the first epoch. All ranks."""
    if config.sample_weights is not None:
        weights = training_weights(config, training)
        if len(set(world.gather_objects(sha256(weights.tobytes()).hexdigest()))) > 1:
            raise DataError("sample_weights differ between the ranks; compute them only from the data set")
        return WeightedOrder(weights, config.seed)
    if config.order_fn is None:
        return shuffled(config.seed, len(training))
    given = GivenOrder(config.function("order_fn"), config.seed, len(training))
    given.check(min(epoch, config.num_epochs - 1), world)  # after the last step there is no further epoch
    return given


def needs_length(config: Config, training: Any) -> None:
    """Raise if a config requires an order of an iterable data set."""
    for key in ("sample_weights", "order_fn"):
        if getattr(config, key) is not None and is_stream(training):
            raise DataError(f"{key} needs a data set with a length; order the samples of an iterable data set yourself")


def shuffled(seed: int, size: int) -> Order:
    """Every sample once per epoch, in a different order in each epoch."""
    return lambda epoch, positions: indices_at(seed=seed, epoch=epoch, size=size, positions=positions)


def paced(order: Order, curriculum: Curriculum | None) -> Order:
    """The order, restricted to the samples that the curriculum, if any, allows in each epoch."""
    if curriculum is None:
        return order
    return lambda epoch, positions: curriculum.choose(order(epoch, positions), epoch)


class WeightedOrder:
    """Samples drawn with replacement; the probability of each is its share of the sum of all weights."""

    def __init__(self, weights: Weights, seed: int) -> None:
        self._sums, self._seed = np.cumsum(weights), seed  # numpy adds sequentially, on any machine

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        total = self._sums[-1]
        draws = uniform_at(seed=self._seed, epoch=epoch, positions=positions) * total
        # Because of rounding, a product may equal the total, where there is no sample.
        chosen: Indices = np.searchsorted(self._sums, np.minimum(draws, np.nextafter(total, 0)), side="right")
        return chosen


class GivenOrder:
    """The order that the user's `order_fn(epoch, size)` returns for an epoch."""

    def __init__(self, function: Callable[[int, int], Any], seed: int, size: int) -> None:
        self._function, self._seed, self._size = function, seed, size
        self._epoch, self._indices = -1, np.zeros(0, dtype=np.int64)

    def __call__(self, epoch: int, positions: Indices) -> Indices:
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._call(epoch)
        return self._indices[positions]

    def check(self, epoch: int, world: World) -> None:
        """Raise if `order_fn` fails, or returns a different order on another rank or in another call. All ranks."""
        try:
            first, again = (sha256(self._call(epoch).tobytes()).hexdigest() for _ in range(2))
            problem = None if first == again else "returns a different order when it is called again for an epoch"
        except DataError as error:
            first, problem = "", str(error).removeprefix("order_fn ")
        # All ranks raise the same error, so no rank waits for another.
        results = world.gather_objects((first, problem))
        problems = [found for _, found in results if found]
        if len({digest for digest, _ in results}) > 1:
            problems.append("returns different orders on different ranks")
        if problems:
            hint = "" if ";" in problems[0] else "; compute it from its arguments, or from the global generators"
            raise DataError(f"order_fn {problems[0]}{hint}")

    def _call(self, epoch: int) -> Indices:
        """The indices of an epoch, checked; random numbers in `order_fn` are those of the epoch."""
        size = self._size
        with keyed_generators(self._seed, "order", epoch):
            given = self._function(epoch, size)
        if hasattr(given, "detach"):  # a tensor, possibly on a GPU
            given = given.detach().cpu()
        try:
            indices = np.asarray(given if hasattr(given, "__array__") else list(given))
        except (TypeError, ValueError):
            indices = np.zeros(0)
        if indices.shape != (size,) or indices.dtype.kind not in "iu":
            raise DataError(
                f"order_fn returned {_described(given, indices)} for epoch {epoch}; it must return {size} integers, "
                "one for each position of the epoch"
            )
        if indices.min() < 0 or indices.max() >= size:
            raise DataError(
                f"order_fn returned indices from {indices.min()} to {indices.max()} for epoch {epoch}; they must be "
                f"in 0..{size - 1}"
            )
        return indices.astype(np.int64)


def _described(given: Any, indices: np.ndarray[Any, Any]) -> str:
    if indices.ndim != 1 or not indices.size:
        return f"a {type(given).__name__}"
    return f"{len(indices)} numbers of type {indices.dtype}"
