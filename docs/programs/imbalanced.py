"""Imbalanced classes: one sample in twenty is positive. With `sample_weights`, every second draw is.

python imbalanced.py [processes]
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Trainer


def get_dataset(size=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(size, generator=generator) < 0.05).long()
    points = torch.randn(size, 2, generator=generator) + 1.2 * labels[:, None]
    return TensorDataset(points, labels)


def equal_classes(dataset):
    """A weight for each sample: both classes are drawn equally often."""
    labels = dataset.tensors[1]
    return 1.0 / labels.bincount()[labels]


def recall(output, target):
    """The share of positive samples that are found: a sum and a count, so that the mean over batches is exact."""
    positive = target == 1
    return (output.argmax(1) == 1)[positive].sum(), positive.sum().item()


def train(sample_weights):
    return Trainer(
        model_fn=lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
        dataset_fn=get_dataset,
        val_dataset_fn=lambda: get_dataset(seed=1),
        loss_fn=nn.functional.cross_entropy,
        metrics={"recall": recall},
        optimizer={"name": "adamw", "lr": 1e-2},
        sample_weights=sample_weights,
        batch_size=25,
        global_batch_size=100,
        num_epochs=3,
        threads=1,
        procs=int(sys.argv[1]) if len(sys.argv) > 1 else 1,
    ).start()


plain, balanced = train(None), train(equal_classes)
print(f"recall without weights {plain.metrics['recall']:.2f}, with weights {balanced.metrics['recall']:.2f}")
print(f"hash {balanced.weights_sha256}")
