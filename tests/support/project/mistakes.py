"""Calls that an editor must mark: pyright finds an error in each line that ends with a comment, and in no other."""

import torch
from main import Batch, Net, Points
from torch import Tensor, nn

from paceline import Callback, Run, Trainer, load


def number(output: Tensor, target: Tensor) -> float:
    return (output - target).square().mean().item()


def no_data() -> None: ...


def no_loaders(model: Net, num_epochs: int) -> None: ...


def wants_text(model: nn.Module, batch: Batch) -> str:
    return "loss"


adam = torch.optim.Adam(Net().parameters())
Trainer(bath_size=4)  # typo
Trainer(epochs=5)  # of another library
Trainer(num_epochs="5")  # type
Trainer(precision="fp8")  # word
Trainer(schedule="cosin")  # word
Trainer(schedule={"name": "cosine", "warmup": 5})  # key of a section
Trainer(checkpoint={"evry_steps": 5})  # key of a section
Trainer(checkpoint={"async": "no"})  # type in a section
Trainer(log={"every_steps": "often"})  # type in a section
Trainer(optimizer=adam)  # object
Trainer(dataset_fn=no_data)  # returns None
Trainer(loss_fn=nn.CrossEntropyLoss)  # class
Trainer(loss_fn=number)  # returns a float
Trainer(step_fn=wants_text)  # returns a text
Trainer(train_fn=no_loaders)  # arguments
Trainer(callbacks=[Net()])  # no callback
Trainer(Net, Points, None, None, 4, 5, "name")  # position
load("runs/x").predict(rows=5)  # typo


class Wrong(Callback):
    def on_stop(self, run: Run) -> None:  # arguments
        run.stop()  # argument
