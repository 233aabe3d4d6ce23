"""The training mode of each module of a model, which evaluations and callbacks may change only while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def keeping_modes(model: torch.nn.Module) -> Iterator[None]:
    """A context that restores the training or evaluation mode of each module at its end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
