"""CIFAR-10: 60,000 colour photographs of 32 × 32 pixels in ten classes, a plain residual network, the managed loop.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, the archive of binary files,
`cifar-10-binary.tar.gz`. Unpack it into `$PACELINE_HOME/datasets/cifar10`, or say where it is:

    paceline train cifar10 --procs 2
    paceline train cifar10 dataset_args.root=/data/cifar10
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import errors

RECORDS, BYTES = 10_000, 1 + 3 * 32 * 32  # of a file, and of a record: the class, then red, green and blue pixels
folder = Path(os.environ.get("PACELINE_HOME", "shared_data"), "datasets", "cifar10")


def get_dataset(root=None):
    """The 50,000 training images as bytes, and their classes; the test images are looked for beside them."""
    global folder
    folder = Path(root or folder)
    return read([f"data_batch_{number}.bin" for number in range(1, 6)])


def get_test_dataset():
    """The 10,000 test images."""
    return read(["test_batch.bin"])


def read(names):
    inner = folder / "cifar-10-batches-bin"
    paths = [(inner if inner.is_dir() else folder) / name for name in names]
    for path in paths:
        size = path.stat().st_size if path.is_file() else None
        if size != RECORDS * BYTES:
            wrong = "does not exist" if size is None else f"has {size:,} bytes, not {RECORDS * BYTES:,}"
            raise errors.DataError(
                f"{path.resolve()} {wrong}; unpack CIFAR-10's cifar-10-binary.tar.gz into {folder.resolve()}, "
                "or say where it is by PACELINE_HOME or dataset_args.root"
            )
    table = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, BYTES)
    images = torch.from_numpy(table[:, 1:].reshape(-1, 3, 32, 32))
    return TensorDataset(images, torch.from_numpy(table[:, 0].astype(np.int64)))


class NetResDeep(nn.Module):
    """A convolution, `blocks` residual blocks of equal width, and a linear layer."""

    def __init__(self, channels=32, blocks=10):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels * 8 * 8, 10)

    def forward(self, images):
        x = self.pool(self.first(images).relu())
        return self.head(self.pool(self.blocks(x)).flatten(1))


class ResidualBlock(nn.Module):
    """What comes in, and what a convolution makes of it."""

    def __init__(self, channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        nn.init.kaiming_normal_(self.convolution.weight, nonlinearity="relu")
        nn.init.constant_(self.norm.weight, 0.2)  # a block begins close to the identity, so that ten in a row learn

    def forward(self, x):
        return self.norm(self.convolution(x)).relu() + x
