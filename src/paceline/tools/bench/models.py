"""The workloads of a benchmark: two small models, and random data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

# Whole numbers of batches on 1, 2, 4 or 8 ranks. A quarter of CIFAR-10's images, to save memory.
MNIST_SAMPLES, CIFAR_SAMPLES = 51_200, 12_800


@dataclass(frozen=True)
class Workload:
    """A model, its data and its settings. It is trained with Adam on cross entropy."""

    title: str
    model_fn: Callable[[], nn.Module]
    dataset_fn: Callable[[], TensorDataset]
    samples: int  # in the data set
    batch_size: int
    lr: float
    steps: dict[str, int]  # the default number to measure, for each type of device


class ShortcutBlock(nn.Module):
    """A convolution with BatchNorm and ReLU beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


def perceptron() -> nn.Module:
    """A perceptron with the layers 784-256-10."""
    return nn.Sequential(nn.Linear(28 * 28, 256), nn.ReLU(), nn.Linear(256, 10))


def residual_network(channels: int = 32, blocks: int = 10) -> nn.Module:
    """A residual network without bottlenecks, at 16 × 16 pixels in most of its layers."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *(ShortcutBlock(channels) for _ in range(blocks)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 8 * 8, channels),
        nn.ReLU(),
        nn.Linear(channels, 10),
    )


def mnist_samples() -> TensorDataset:
    """Noise in the shape of MNIST, flattened."""
    return _noise(MNIST_SAMPLES, 28 * 28)


def cifar_samples() -> TensorDataset:
    """Noise in the shape of CIFAR-10."""
    return _noise(CIFAR_SAMPLES, 3, 32, 32)


def _noise(size: int, *shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, *shape, generator=generator)
    return TensorDataset(images, torch.randint(10, (size,), generator=generator))


class OneByOne(Dataset[Any]):
    """The same samples with `__getitem__` only, as in a data set that reads files."""

    def __init__(self, samples: TensorDataset) -> None:
        self.tensors = samples.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


WORKLOADS = {
    "mnist": Workload(
        "MLP 784-256-10, batch 64", perceptron, mnist_samples, MNIST_SAMPLES, batch_size=64, lr=1e-3,
        steps={"cpu": 1000, "cuda": 2000},
    ),
    "cifar": Workload(
        "residual CNN, 10 blocks × 32 channels, batch 128", residual_network, cifar_samples, CIFAR_SAMPLES,
        batch_size=128, lr=1e-3, steps={"cpu": 40, "cuda": 500},
    ),
}  # fmt: skip
