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
from paceline.run.checked_files import FileRecord
from support.models import Tied, WithBuffers, WithExtraState, channels_last, normed


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


def write(state: CheckpointState, folder: Path, world_size: int = 1) -> list[FileRecord]:
    """Write a state as `world_size` ranks would."""
    folder.mkdir(exist_ok=True)
    written = [write_values(folder, state)]
    for rank in range(world_size):
        copied = HostBuffers().copy(state, files_of_rank(rank, world_size, split_into_files(state)))()
        written += [tensor_files.write_tensors(folder / file, tensors) for file, tensors in copied.items()]
    return written
