"""The order of samples: (seed, epoch, position) → index, by a keyed permutation (pure).

The permutation is a Feistel network over a grid of a × b cells, a·b ≥ size: in each round one coordinate is
shifted by a keyed hash of the other. A cell past the end is permuted again until it is inside; there are fewer than b
such cells, so this is rare. No table is built: any position of any epoch costs the same and needs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from hashlib import shake_128
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 16  # even; with 12, sizes of 5 and 6 still show a bias over 30,000 epochs
GOLDEN = 0x9E3779B97F4A7C15  # the step between the states of SplitMix64
CHUNK = 8192  # positions computed at once, which spreads numpy's cost per call over many batches


def indices_at(*, seed: int, epoch: int, size: int, positions: npt.ArrayLike) -> Indices:
    """The indices of the samples at `positions` in this epoch's order."""
    where = np.asarray(positions, dtype=np.int64)
    if size < 1:
        raise ValueError(f"size={size} must be at least 1")
    if where.size and (where.min() < 0 or where.max() >= size):
        raise ValueError(f"positions range from {where.min()} to {where.max()}; they must be in 0..{size - 1}")
    columns = math.isqrt(size - 1) + 1
    columns += columns % 2  # if both sides were odd, every shift would be an even permutation
    rows = -(-size // columns)
    keys = _round_keys(seed, epoch)
    cells = _permute(where.astype(np.uint64).ravel(), rows, columns, keys)
    outside = np.flatnonzero(cells >= size)
    while outside.size:
        cells[outside] = _permute(cells[outside], rows, columns, keys)
        outside = outside[cells[outside] >= size]
    return cells.astype(np.int64).reshape(where.shape)


def uniform_at(*, seed: int, epoch: int, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) for each position of an epoch: a keyed hash of the position, with 53 bits."""
    words = (np.asarray(positions, dtype=np.int64).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    digest = shake_128(f"paceline draws {seed} {epoch}".encode()).digest(8)
    words += np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    _mix(words, np.empty_like(words))
    numbers: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def indices_of(
    spans: Iterable[range], at: Callable[[Indices], Indices], convert: Callable[[Indices], Any] = np.ndarray.tolist
) -> Iterator[Any]:
    """The indices of each span of positions; `at` computes them for many spans at once.

    `convert` converts the indices of many spans to a list or a tensor; the indices of a span are a slice of it.
    """
    remaining = iter(spans)
    while True:
        chunk: list[range] = []
        length = 0
        while length < CHUNK and (span := next(remaining, None)) is not None:
            chunk.append(span)
            length += len(span)
        if not chunk:
            return
        positions = np.concatenate([np.arange(span.start, span.stop) for span in chunk])
        indices = convert(at(positions))
        first = 0
        for span in chunk:
            yield indices[first : first + len(span)]
            first += len(span)


def _permute(cells: Words, rows: int, columns: int, keys: list[np.uint64]) -> Words:
    row, column = np.divmod(cells, np.uint64(columns))
    buffers = np.empty_like(row), np.empty_like(row)  # allocating in each round would take most of the time
    for even_key, odd_key in zip(keys[::2], keys[1::2], strict=True):
        _shift(row, by=column, key=even_key, modulus=np.uint64(rows), buffers=buffers)
        _shift(column, by=row, key=odd_key, modulus=np.uint64(columns), buffers=buffers)
    moved: Words = row * np.uint64(columns) + column
    return moved


def _shift(value: Words, *, by: Words, key: np.uint64, modulus: np.uint64, buffers: tuple[Words, Words]) -> None:
    """Shift `value`, in place, by a keyed hash of `by`."""
    offset, other = buffers
    np.add(by, key, out=offset)
    _mix(offset, other)
    # The hash's upper 32 bits, scaled to 0..modulus-1 by a multiplication; `%` is five times slower.
    np.right_shift(offset, np.uint64(32), out=offset)
    np.multiply(offset, modulus, out=offset)
    np.right_shift(offset, np.uint64(32), out=offset)
    np.add(value, offset, out=value)
    # Unsigned: the subtraction turns a value below the modulus into a huge number, so the minimum keeps the value.
    np.minimum(value, np.subtract(value, modulus, out=other), out=value)


def _mix(x: Words, other: Words) -> None:
    """The finaliser of SplitMix64, in place: every input bit reaches every output bit. Overflow is intended."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.bitwise_xor(x, np.right_shift(x, np.uint64(shift), out=other), out=x)
        if factor != 1:
            np.multiply(x, np.uint64(factor), out=x)


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    digest = shake_128(f"paceline order {seed} {epoch}".encode()).digest(8 * ROUNDS)
    return list(np.frombuffer(digest, dtype="<u8").astype(np.uint64))
