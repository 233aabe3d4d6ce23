"""The exponential moving average of the weights, which evaluation and the result use instead of the last weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Ema:
    """Follows a model: after each step, average = decay × average + (1 − decay) × weights."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = list(named)
        self._weights: list[torch.Tensor] = list(named.values())
        # At least fp32: a small change of 16-bit weights would be rounded away.
        self._average = [p.detach().to(_wide(p.dtype), copy=True) for p in self._weights]

    def averages(self) -> dict[str, torch.Tensor]:
        """The averages by parameter name; these are not copies, since a checkpoint is restored into them."""
        return dict(zip(self._names, self._average, strict=True))

    @torch.no_grad()
    def update(self, is_bad: torch.Tensor | None = None) -> None:
        """Add the weights of this step to the average, unless `is_bad` is 1.0 on the device."""
        weights = [each.to(average.dtype) for each, average in zip(self._weights, self._average, strict=True)]
        if is_bad is None:
            torch._foreach_lerp_(self._average, weights, 1 - self.decay)
            return
        steps = torch._foreach_sub(weights, self._average)
        torch._foreach_mul_(steps, (1 - is_bad) * (1 - self.decay))
        torch._foreach_add_(self._average, steps)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the averages as its weights."""
        pairs = list(zip(self._weights, self._average, strict=True))
        # Averages that lose digits in the dtype of the model are copied.
        wide = [(average, average.clone()) for weights, average in pairs if weights.dtype != average.dtype]
        self._swap()
        try:
            yield
        finally:
            self._swap()
            for average, kept in wide:
                average.copy_(kept)

    @torch.no_grad()
    def _swap(self) -> None:
        for weights, average in zip(self._weights, self._average, strict=True):
            kept = weights.clone()
            weights.copy_(average)
            average.copy_(kept)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
