"""Models and optimizers with every kind of state, and a checkpoint written as several ranks would write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.files import files_of_rank, split_into_files, write_values
from paceline.checkpoint.host_buffers import HostBuffers
from paceline.checkpoint.state import CheckpointState
from paceline.engine.ema import Ema
from paceline.engine.muon import Muon
from paceline.run import tensor_files


class Tied(nn.Module):
    """An embedding that shares its weights with the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(self.first(x.abs().long().sum(1) % 7)))


class WithExtraState(nn.Module):
    """A layer with an extra state: nested values that contain a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.extra: dict[str, Any] = {"words": ["a", ("b", 3)], "scale": torch.zeros(2), 7: None}

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 3, padding=1), nn.Flatten())
    return model.to(memory_format=torch.channels_last)


class WithBuffers(nn.Module):
    """Buffers of dtypes and shapes that need care."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("low_precision", torch.randn(3).bfloat16())
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("wide_complex", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("not_saved", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class ListOptimizer(torch.optim.Optimizer):
    """Keeps tensors in lists, tuples and dicts, as LBFGS and second-order methods do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1), "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("past", []).append(parameter.grad.clone())
                state["pair"] = (parameter.grad.clone(), {"n": len(state["past"]), "sum": parameter.grad.sum()})
                parameter.data.sub_(parameter.grad, alpha=0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied, "batchnorm": normed, "channels last": channels_last, "extra state": WithExtraState,
    "buffers": WithBuffers,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "two groups": lambda parameters: torch.optim.Adam(
        [{"params": [first], "lr": 0.5} if not n else {"params": [first]} for n, first in enumerate(parameters)]
    ),
    "lists": ListOptimizer,
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "fused momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "muon": Muon,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None = None, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if ema is not None:
            ema.update()
    if isinstance(model, WithExtraState):
        model.extra = {"words": ["c", ("d", 4)], "scale": torch.randn(2), 7: None}


def write(state: CheckpointState, folder: Path, world_size: int = 1) -> list[tensor_files.FileRecord]:
    """Write a state as `world_size` ranks would."""
    folder.mkdir(exist_ok=True)
    written = [write_values(folder, state)]
    for rank in range(world_size):
        copied = HostBuffers().copy(state, files_of_rank(rank, world_size, split_into_files(state)))()
        written += [tensor_files.write_tensors(folder / file, tensors) for file, tensors in copied.items()]
    return written
