"""The same samples in two places, found by digests of the first ones."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from paceline.errors import DataError


def claim_of(samples: Sequence[Any]) -> int:
    """A digest of samples, to find the same ones elsewhere; 0 where they are all alike, as in made-up data."""
    digests = [_digest_of(sample) for sample in samples]
    if len(set(digests)) < 2:
        return 0
    return int.from_bytes(blake2b(b"".join(digests), digest_size=8).digest(), "little") >> 1


def compare_claims(seen: dict[int, int], what: str, claims: Iterable[tuple[int, int]]) -> None:
    """Raise if two places have claimed the same samples; `seen` keeps who has claimed what."""
    for place, claim in claims:
        if claim and seen.setdefault(claim, place) != place:
            raise DataError(
                f"the data set yields the same samples for {what} {seen[claim]} and {what} {place}; let __iter__ give "
                f"each its own: `yield from paceline.shard(samples)`, or choose by `index, count = paceline.shard()`"
            )


def _digest_of(sample: Any) -> bytes:
    digest = blake2b(digest_size=16)
    for piece in _bytes_of(sample):
        digest.update(piece)
    return digest.digest()


def _bytes_of(sample: Any) -> Iterator[bytes]:
    if isinstance(sample, torch.Tensor) and sample.layout is torch.strided:
        yield f"{sample.dtype} {tuple(sample.shape)}".encode()
        yield sample.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(sample, np.ndarray) and not sample.dtype.hasobject:
        yield f"{sample.dtype} {sample.shape}".encode()
        yield sample.tobytes()
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield repr(key).encode()
            yield from _bytes_of(value)
    elif isinstance(sample, (tuple, list)):
        yield str(len(sample)).encode()
        for value in sample:
            yield from _bytes_of(value)
    else:
        try:
            yield pickle.dumps(sample)
        except Exception:  # noqa: BLE001 - any object may raise anything; its words have to do
            yield repr(sample).encode()
