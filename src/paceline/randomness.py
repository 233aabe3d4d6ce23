"""Random generators keyed by what they are for, so that the same work draws the same numbers wherever it runs."""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np


def seed_for(*key: int | str) -> int:
    """A 63-bit seed from any mixture of names and numbers, such as (seed, "lane", step, lane)."""
    text = " ".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(*key: int | str) -> None:
    """Key the global generators of torch (every device), numpy and `random`."""
    import torch

    seed = seed_for(*key)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
