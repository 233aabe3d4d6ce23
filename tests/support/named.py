"""One function for each key of a config that takes a function, under the name of the key."""

from __future__ import annotations

from typing import Any

import torch

from support.configs import dataset, loss, model

model_fn, dataset_fn, loss_fn = model, dataset, loss


def val_dataset_fn() -> list[int]:
    return [1, 2]


def collate_fn(samples: list[Any]) -> Any:
    return torch.tensor(samples)


def step_fn(model: Any, batch: Any) -> Any:
    return model(batch).sum()


def evaluate_fn(model: Any, batch: Any) -> Any:
    return {"loss": model(batch).mean()}


def predict_fn(model: Any, batch: Any) -> Any:
    return model(batch)


def optimizer_fn(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def scheduler_fn(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def order_fn(epoch: int, size: int) -> range:
    return range(size)


def sample_weights(dataset: Any) -> list[float]:
    return [1.0] * len(dataset)
