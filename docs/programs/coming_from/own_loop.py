import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from paceline import Trainer


def get_dataset():
    points = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


def get_model():
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))


def train(model, train_loader, val_loader, device, num_epochs, run):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        model.train()
        for x, y in train_loader:
            with run.autocast():
                loss = cross_entropy(model(x), y)
            run.backward(loss)
            run.step(optimizer, clip_norm=1.0)
            run.log(loss=loss)
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in val_loader:
                correct += (model(x).argmax(dim=1) == y).sum().item()
        run.log(accuracy=run.sum(correct) / run.sum(len(val_loader.dataset)))


result = Trainer(
    model_fn=get_model,
    dataset_fn=get_dataset,
    train_fn=train,
    batch_size=32,
    lanes=2,
    num_epochs=5,
    procs=2,
).start()
print(f"accuracy {result.metrics['accuracy']:.4f}")
