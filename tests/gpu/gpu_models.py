"""Models for images of 3 × 8 × 8, whose steps depend on more than weights: dropout, buffers, a teacher."""

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


class Teacher(nn.Module):
    """A student, and a frozen teacher that follows it in each forward: in its own memory, or in new memory."""

    def __init__(self, in_new_memory: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(192, 32), nn.BatchNorm1d(32)) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.last, self.in_new_memory = nn.Linear(32, 2), in_new_memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.in_new_memory:
                    ours.data = 0.9 * ours.data + 0.1 * theirs.data
                else:
                    ours.mul_(0.9).add_(theirs, alpha=0.1)
            goal = self.teacher(x)
        features = self.student(x)
        output: torch.Tensor = self.last(features + 0.3 * (goal - features))
        return output
