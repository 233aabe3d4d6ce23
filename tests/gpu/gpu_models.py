"""Models for images of 3 × 8 × 8, whose steps depend on more than weights: dropout, and buffers."""

from __future__ import annotations

import torch
from torch import nn


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 2),
    )  # fmt: skip


class Remembering(nn.Module):
    """Reads buffers that its forward changes: the vectors of a spectral norm, and a mean of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(192, 32))
        self.norm, self.last = nn.BatchNorm1d(32), nn.Linear(32, 2)
        self.register_buffer("mean", torch.zeros(192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        output: torch.Tensor = self.last(torch.relu(self.norm(self.first(x - self.mean))))
        if self.training:
            self.mean.lerp_(x.detach().nan_to_num().mean(0), 0.1)
        return output
