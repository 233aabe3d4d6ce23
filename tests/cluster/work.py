"""What the hosts train: everything that a checkpoint must hold, and a sample at which the run can be held."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES, HELD, VISIT = 83, 5, 3


class Images(Dataset):
    """Random images; at the third visit of one sample, over all attempts of the run, it waits while `hold` is there."""

    def __init__(self, size: int = SAMPLES, is_held: bool = True) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(size, 1, 6, 6, generator=generator)
        self.labels = (self.images.mean(dim=(1, 2, 3)) > 0).long()
        self.is_held = is_held

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_held and index == HELD:
            with Path("visits").open("ab", buffering=0) as file:
                file.write(b"x")
                visit = file.tell()
            if visit == VISIT:
                Path("held").touch()
                while Path("hold").exists():
                    time.sleep(0.02)
        return self.images[index] + 0.1 * torch.randn(1, 6, 6), self.labels[index]


def make_training() -> Images:
    return Images()


def make_validation() -> Images:
    return Images(61, is_held=False)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 2)
    )
