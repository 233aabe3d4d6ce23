"""One linear layer: read this first to understand DDP.

Each rank runs `train` below with its own copy of the model; all copies start with the same weights. Each rank's
`train_loader` yields a different share of the samples. `loss.backward()` averages the gradients over the ranks, so
`optimizer.step()` makes the same update on every rank, and all copies stay identical.

    paceline train linear --procs 2                                    # local processes
    torchrun --nproc_per_node=2 -m paceline train linear               # the same under torchrun
    paceline train linear model_args.input_size=50 dataset_args.length=5000
"""

import torch
from torch import nn
from torch.utils.data import Dataset


class RandomDataset(Dataset):
    """`length` random points of `input_size` features; the class is the sign of their sum."""

    def __init__(self, input_size=10, length=1000):
        generator = torch.Generator().manual_seed(0)  # the same points on every rank
        self.points = torch.randn(length, input_size, generator=generator)
        self.classes = (self.points.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.classes[index]


def get_model(input_size=10):
    return nn.Linear(input_size, 2)


def train(model, train_loader, val_loader, device, num_epochs):
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(num_epochs):
        total = 0.0
        for points, classes in train_loader:  # this rank's share, shuffled again each epoch
            optimizer.zero_grad()
            loss = loss_fn(model(points.to(device)), classes.to(device))
            loss.backward()  # averages the gradients over the ranks
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f} on this rank's share")
    return total / len(train_loader)
