"""Random generators keyed by their purpose, so that the same work uses the same random numbers on any rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np


def seed_for(*key: int | str) -> int:
    """A 63-bit seed from any mixture of names and numbers, such as (seed, "lane", step, lane)."""
    text = " ".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(*key: int | str) -> None:
    """Key the global generators of torch (the CPU's and the current GPU's), numpy and `random`."""
    import torch

    seed = seed_for(*key)
    # Not torch.manual_seed: until CUDA is initialised it stores every call, with its stack, in order to repeat it.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_states() -> tuple[Any, ...]:
    """The states of the generators that `seed_generators` keys."""
    import torch

    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return np.random.get_state(), random.getstate(), torch.default_generator.get_state(), device


def restore_generators(states: tuple[Any, ...]) -> None:
    """Set the states that `generator_states` returned."""
    import torch

    numpy, python, host, device = states
    np.random.set_state(numpy)
    random.setstate(python)
    torch.default_generator.set_state(host)
    if device is not None:
        torch.cuda.set_rng_state(device)


@contextmanager
def keyed_generators(*key: int | str) -> Iterator[None]:
    """Key the generators inside the block, and restore their states after it."""
    before = generator_states()
    seed_generators(*key)
    try:
        yield
    finally:
        restore_generators(before)
