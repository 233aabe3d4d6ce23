"""Your loop: a mean teacher. Few samples have labels; for all others the student follows an average of itself.

python loop_mean_teacher.py [PROCESSES]
"""

import copy
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import paceline


def get_dataset():
    """Points of two half moons; 1 of 20 has a label, the others have -1."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(640) % 2
    angle = torch.rand(640, generator=generator) * torch.pi
    x = torch.where(label == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(label == 0, angle.sin(), 0.5 - angle.sin())
    points = torch.stack((x, y), dim=1) + 0.1 * torch.randn(640, 2, generator=generator)
    return torch.utils.data.TensorDataset(points, torch.where(torch.arange(640) % 20 < 2, label, -1), label)


def get_model():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def train(model, train_loader, val_loader, device, num_epochs, run):
    teacher = copy.deepcopy(run.model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.track(optimizer=optimizer, teacher=teacher)  # the teacher is in every checkpoint, too
    for _ in run.epochs(num_epochs):
        for points, labels, _ in train_loader:
            noise = 0.1 * torch.randn(2, *points.shape, device=device)  # the same on any number of processes
            student = model(points + noise[0])
            labelled = cross_entropy(student, labels, ignore_index=-1, reduction="sum") / len(labels)
            consistency = mse_loss(student.softmax(1), teacher(points + noise[1]).softmax(1))
            run.backward(labelled + consistency)
            if run.step(optimizer):
                for average, weight in zip(teacher.parameters(), run.model.parameters(), strict=True):
                    average.lerp_(weight.detach(), 0.05)
            run.log(consistency=consistency)
        correct = sum((teacher(points).argmax(1) == label).sum().item() for points, _, label in val_loader)
        run.log(teacher_accuracy=run.sum(correct) / run.sum(len(val_loader.dataset)))


result = paceline.Trainer(
    name="loop-mean-teacher",
    model_fn=get_model,
    dataset_fn=get_dataset,
    train_fn=train,
    batch_size=32,
    lanes=2,
    num_epochs=10,
    procs=int(sys.argv[1]) if sys.argv[1:] else 2,
).start()
print(f"hash {result.weights_sha256}")
