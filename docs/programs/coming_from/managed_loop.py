import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Trainer


def get_dataset():
    points = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


def get_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))


result = Trainer(
    model_fn=get_model,
    dataset_fn=get_dataset,
    loss_fn=nn.functional.cross_entropy,
    metrics=["accuracy"],
    optimizer={"name": "adamw", "lr": 1e-2},
    schedule="cosine",
    clip_norm=1.0,
    batch_size=32,
    lanes=2,
    num_epochs=5,
    procs=2,
).start()
print(f"accuracy {result.metrics['accuracy']:.4f}")
