"""MNIST: 70,000 handwritten digits of 28 × 28 pixels, a network of two linear layers, the managed loop.

Data: Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits", the four idx files,
compressed or unpacked, in `$PACELINE_HOME/datasets/mnist` or in another folder. Fashion-MNIST has the same format:

    paceline data get mnist
    paceline train mnist --procs 2
    paceline train mnist dataset_args.name=fashion-mnist dataset_args.root=/data/fashion-mnist
"""

from torch import nn

from paceline import datasets

source = {"name": "mnist"}  # the arguments of get_dataset; the test images are read with them, too


def get_dataset(name="mnist", **options):
    """Return the 60,000 training images as bytes, and their classes."""
    global source
    source = {"name": name, **options}
    return datasets.read(**source, train=True)


def get_test_dataset():
    """Return the 10,000 test images."""
    return datasets.read(**source, train=False)


def get_model(hidden=256):
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))
