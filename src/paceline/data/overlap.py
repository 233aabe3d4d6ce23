"""Detects shards of an iterable data set that yield the same samples, by digests of their first samples."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from paceline.data.trees import leaves_in
from paceline.errors import DataError


def digest_of_samples(samples: Sequence[Any]) -> int:
    """A positive digest of samples; 0 if all are equal, as in synthetic data, so that they cannot be compared."""
    digests = [_digest_of(sample) for sample in samples]
    if len(set(digests)) < 2:
        return 0
    return int.from_bytes(blake2b(b"".join(digests), digest_size=8).digest(), "little") >> 1


def check_samples_differ(seen: dict[int, int], what: str, digests: Iterable[tuple[int, int]]) -> None:
    """Raise if two shards, given as (index, digest), have the same samples; `seen` keeps the index of each digest."""
    for index, digest in digests:
        if digest and seen.setdefault(digest, index) != index:
            raise DataError(
                f"the data set yields the same samples for {what} {seen[digest]} and {what} {index}; make __iter__ "
                "yield different samples: `yield from paceline.shard(samples)`, or select them by "
                "`index, count = paceline.shard()`"
            )


def _digest_of(sample: Any) -> bytes:
    digest = blake2b(digest_size=16)
    for path, leaf in leaves_in(sample):
        digest.update(repr(path).encode())
        for piece in _bytes_of(leaf):
            digest.update(piece)
    return digest.digest()


def _bytes_of(leaf: Any) -> Iterator[bytes]:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        yield f"{leaf.dtype} {tuple(leaf.shape)}".encode()
        yield leaf.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        yield f"{leaf.dtype} {leaf.shape}".encode()
        yield leaf.tobytes()
    else:
        try:
            yield pickle.dumps(leaf)
        except Exception:  # noqa: BLE001 - pickling an object of any class may raise anything
            yield repr(leaf).encode()
