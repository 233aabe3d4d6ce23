"""Your loop: LBFGS, which evaluates the loss several times in a step. Each process has its part of the whole data.

python loop_lbfgs.py [PROCESSES]
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import paceline

PROCESSES = int(sys.argv[1]) if sys.argv[1:] else 2


def get_dataset():
    x = torch.linspace(-3, 3, 256)[:, None]
    return torch.utils.data.TensorDataset(x, x.sin())


def get_model():
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model, train_loader, val_loader, device, num_epochs, run):
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:  # one batch: all samples of this process

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()  # as in plain DDP, the gradients are averaged over the processes
                return run.mean(loss.detach())  # the line search must see the same number on all processes

            loss = optimizer.step(closure)
            run.log(loss=loss)


# Plain loss.backward() averages over the processes, without lanes: the last bits depend on their number.
result = paceline.Trainer(
    name="loop-lbfgs",
    model_fn=get_model,
    dataset_fn=get_dataset,
    train_fn=train,
    batch_size=256 // PROCESSES,
    num_epochs=5,
    val_fraction=0,
    procs=PROCESSES,
).start()
print(f"{PROCESSES} processes: {result.weights_sha256}")
