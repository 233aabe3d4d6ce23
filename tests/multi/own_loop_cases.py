"""Own loops with `run` for the exactness matrix, and a program that trains one of them: it is killed and resumed."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from paceline import Run, Sum, current_run


def validate(model: torch.nn.Module, val_loader: Any) -> dict[str, float]:
    """The accuracy over all ranks, each sample counted once."""
    run = current_run()
    model.eval()
    correct = seen = 0
    with torch.no_grad():
        for x, y in val_loader:
            correct += int((model(x).argmax(1) == y).sum())
            seen += len(y)
    model.train()
    return {"accuracy": run.sum(correct) / run.sum(seen)}


def train_simply(model, train_loader, val_loader, device, num_epochs, run: Run):
    """The managed loop written by hand: one loss and one optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x), y))
            run.step(optimizer)
        run.log(**validate(model, val_loader))


def train_with_everything(model, train_loader, val_loader, device, num_epochs, run: Run):
    """A scheduler, clipping, autocast, logged values, numbers of the user's own, random numbers and run.save."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=run.total_steps)
    run.track(optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(num_epochs):
        noise = torch.rand(()).item()  # equal on all ranks
        for x, y in train_loader:
            with run.autocast():
                output = model(x)
            loss = functional.cross_entropy(output.float(), y) * (1 + noise)
            run.backward(loss)
            if run.step(optimizer, clip_norm=0.5):
                scheduler.step()
                run.state["updates"] = run.state.get("updates", 0) + 1
            run.log(doubled=2 * loss, size=len(y))
        if epoch == 1:
            run.save()
        run.log(**validate(model, val_loader), updates=run.state["updates"])


def train_with_two_losses(model, train_loader, val_loader, device, num_epochs, run: Run):
    """Two backward passes for each batch; then, in some steps, only one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            run.backward(functional.cross_entropy(model(x), y))
            if run.step_number % 3:
                run.backward(0.1 * model(x).square().mean())
            run.step(optimizer)
        run.log(**validate(model, val_loader))


def train_with_sums(model, train_loader, val_loader, device, num_epochs, run: Run):
    """A loss that is divided by a sum of weights over the whole step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            weights = 1.0 + y
            run.backward(Sum((functional.cross_entropy(model(x), y, reduction="none") * weights).sum(), weights.sum()))
            run.step(optimizer)


def train_two_networks(model, train_loader, val_loader, device, num_epochs, run: Run):
    """A second model with buffers of its own, which only the user's code knows, and an average of the weights."""
    critic = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.05)
    run.track(critic=critic, optimizer=optimizer)
    for _ in run.epochs(num_epochs):
        for x, y in train_loader:
            output = model(x)
            score = critic(output).squeeze(1)
            target = y.to(score.dtype)
            loss = functional.cross_entropy(output, y) + functional.binary_cross_entropy_with_logits(score, target)
            run.backward(loss)
            run.step(optimizer)
        with run.ema_weights():
            run.log(**validate(model, val_loader))
