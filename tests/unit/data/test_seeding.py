"""Generators that are keyed for a while."""

from __future__ import annotations

import random

import numpy as np
import torch

from paceline.data.seeding import keyed_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_numbers_depend_on_the_key_inside_and_continue_outside() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    expected = drawn(), drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    first = drawn()
    with keyed_generators(0, "model"):
        inside = drawn()
    assert (first, drawn()) == expected
    with keyed_generators(0, "model"):
        assert drawn() == inside
    assert inside not in expected
