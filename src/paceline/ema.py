"""The exponential moving average of the weights, which evaluation and the result use instead of the last weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Ema:
    """Follows a model: after each step, average = decay × average + (1 − decay) × weights."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._average = [p.detach().clone() for p in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this step in."""
        torch._foreach_lerp_(self._average, self._weights, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model holds the averages inside, and its own weights again after."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weights, average in zip(self._weights, self._average, strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)
