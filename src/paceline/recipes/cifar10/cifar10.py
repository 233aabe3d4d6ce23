"""CIFAR-10: 60,000 colour photographs of 32 × 32 pixels in ten classes, a plain residual network, the managed loop.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, the archive of binary files,
compressed or unpacked, in `$PACELINE_HOME/datasets/cifar10` or in another folder:

    paceline data get cifar10
    paceline train cifar10 --procs 2
    paceline train cifar10 dataset_args.root=/data/cifar10
"""

from torch import nn

from paceline import datasets

folder = None  # the root given to get_dataset; the test images are read from it, too


def get_dataset(root=None):
    """Return the 50,000 training images as bytes, and their classes."""
    global folder
    folder = root
    return datasets.read("cifar10", train=True, root=root)


def get_test_dataset():
    """Return the 10,000 test images."""
    return datasets.read("cifar10", train=False, root=folder)


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
    """A convolution whose input is added to its output."""

    def __init__(self, channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        nn.init.kaiming_normal_(self.convolution.weight, nonlinearity="relu")
        nn.init.constant_(self.norm.weight, 0.2)  # close to the identity, so that ten blocks in a row can be trained

    def forward(self, x):
        return self.norm(self.convolution(x)).relu() + x
