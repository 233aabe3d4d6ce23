"""Handwritten digits: 1,797 images of 8 × 8 pixels, a small convolutional network, the managed loop.

Data: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998,
https://doi.org/10.24432/C50P49, licensed CC BY 4.0. `digits.npz` holds its test set, grey levels 0–16 as bytes.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def get_dataset():
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images = torch.from_numpy(digits["images"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(digits["labels"]).long()
    return TensorDataset(images, labels)


def get_model(channels=32, dropout=0.25):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * channels * 16, 10),
    )
