"""Losses and metrics as sums and counts, so that they can be added up over batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.errors import ConfigError

Metric = Callable[[Any, Any], Any]
SumAndCount = tuple[torch.Tensor, torch.Tensor | int | float]


def accuracy(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Right answers: the largest of several logits, or the sign of a single one."""
    if output.shape == (*target.shape, 1):
        output = output.squeeze(-1)
    if output.ndim == target.ndim:
        right = (output > 0) == (target > 0.5)
    else:
        # The classes come last, or second as cross_entropy has them.
        right = output.argmax(-1 if output.shape[:-1] == target.shape else 1) == target
    return right.sum(), right.numel()


def mse(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Squared error."""
    return (output.reshape(target.shape) - target).square().sum(), target.numel()


def mae(output: torch.Tensor, target: torch.Tensor) -> SumAndCount:
    """Absolute error."""
    return (output.reshape(target.shape) - target).abs().sum(), target.numel()


NAMED: dict[str, Metric] = {"accuracy": accuracy, "mse": mse, "mae": mae}


def make_metrics(metrics: Sequence[str] | dict[str, Any]) -> dict[str, Metric]:
    """Metrics by name: built in, or the user's function(output, target)."""
    return dict(metrics) if isinstance(metrics, dict) else {name: NAMED[name] for name in metrics}


def sum_and_count(value: Any, samples: int, source: str) -> SumAndCount:
    """What a loss or metric returned, as a sum and a count: (sum, count) as it is, a mean times the samples."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ConfigError(f"{source} returned {len(value)} values; it must return a mean or (sum, count)")
        total = torch.as_tensor(value[0])
        return total.float() if total.is_floating_point() and total.element_size() < 4 else total, value[1]
    mean = torch.as_tensor(value)
    if mean.is_floating_point():
        mean = mean.float() if mean.element_size() < 4 else mean  # 8 bits are too few for a sum
    if mean.numel() != 1:
        raise ConfigError(
            f"{source} returned a tensor of shape {tuple(mean.shape)}; it must return a mean or (sum, count)"
        )
    return mean.reshape(()) * samples, samples
