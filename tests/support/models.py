"""Small models whose state needs care: tied weights, BatchNorm, buffers, an extra state; and a loss with a buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Tied(nn.Module):
    """An embedding that shares its weights with the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x.abs().long().sum(1) % 7)))


class WithExtraState(nn.Module):
    """A layer with an extra state: nested values that contain a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.extra: dict[str, Any] = {"words": ["a", ("b", 3)], "scale": torch.zeros(2), 7: None}

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


def normed(width: int = 4) -> nn.Module:
    """Two layers with BatchNorm between them, from 3 numbers to 2."""
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))


def channels_last() -> nn.Module:
    """A convolution of one pixel whose filters are in the memory format `channels_last`."""
    model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


class WithBuffers(nn.Module):
    """Buffers of dtypes and shapes that need care."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("low_precision", torch.randn(3).bfloat16())
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("wide_complex", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("not_saved", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class PartlyUsed(nn.Module):
    """Has a second layer that its forward does not use."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


class RunningLoss(nn.Module):
    """A loss in units of its own running mean, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(1.0))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output, target)
        self.mean.lerp_(loss.detach(), 0.1)
        return loss / self.mean
