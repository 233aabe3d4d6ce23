"""Your loop: contrastive learning. The negatives of a sample are the samples of all processes.

python loop_contrastive.py [PROCESSES]
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import paceline

PROCESSES = int(sys.argv[1]) if sys.argv[1:] else 2


class Points(torch.utils.data.Dataset):
    """Points with their number, by which a sample is found among those of all processes."""

    def __init__(self):
        self.points = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return index, self.points[index]


def get_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))


def train(model, train_loader, val_loader, device, num_epochs, run):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for numbers, points in train_loader:
            noise = 0.1 * torch.randn(2, *points.shape, device=device)
            first, second = (normalize(model(points + each)) for each in noise)
            candidates = run.gather(second, with_grad=True)  # gradients return to the process that has the sample
            targets = (numbers[:, None] == run.gather(numbers)[None]).int().argmax(dim=1)
            loss = cross_entropy(first @ candidates.T / 0.2, targets)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss)


# The negatives of a sample are part of the loss, and their number is that of the processes times batch_size. So this
# run has one lane for each process, and another number of processes is another run: it ends with other weights.
result = paceline.Trainer(
    name="loop-contrastive",
    model_fn=get_model,
    dataset_fn=Points,
    train_fn=train,
    batch_size=64 // PROCESSES,
    num_epochs=5,
    val_fraction=0,
    procs=PROCESSES,
).start()
print(f"{PROCESSES} processes: {result.weights_sha256}")
