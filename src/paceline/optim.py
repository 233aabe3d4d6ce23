"""Optimizers by name, and the learning rate as a pure function of the step."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any

import torch

from paceline.config import Config, Schedule
from paceline.errors import ConfigError


def make_optimizer(config: Config, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The user's `optimizer_fn(model)`, or the optimizer that the config names, over the trainable parameters."""
    if config.optimizer_fn is not None:
        optimizer = config.function("optimizer_fn")(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer_fn returned a {type(optimizer).__name__}; it must return an Optimizer")
        return optimizer
    options = dict(config.optimizer.model_extra or {})
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make: Any = optimizers()[config.optimizer.name.lower()]
    made: torch.optim.Optimizer = make(trainable, lr=config.optimizer.lr, **options)
    return made


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of torch.optim, by its name in small letters."""
    found = {name.lower(): value for name, value in vars(torch.optim).items() if inspect.isclass(value)}
    return {n: v for n, v in found.items() if issubclass(v, torch.optim.Optimizer) and n != "optimizer"}


def problems_with(name: str, options: dict[str, Any]) -> list[str]:
    """What is wrong with an optimizer's name and further keys, one sentence each."""
    known = optimizers()
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        return [f"optimizer.name={name!r} is not an optimizer of torch.optim; {hint}"]
    accepted = [p for p in inspect.signature(known[name.lower()]).parameters if p != "params"]
    problems = []
    for key in options:
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean optimizer.{near[0]}?" if near else f"it takes {', '.join(accepted)}"
            problems.append(f"optimizer.{key} is not an argument of {known[name.lower()].__name__}; {hint}")
    return problems


def lr_at(step: int, base: float, schedule: Schedule, total_steps: int | None) -> float:
    """The learning rate of the update that takes `step` to `step + 1` (pure)."""
    if step < schedule.warmup_steps:
        return base * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return base
    assert total_steps is not None, "a schedule with an end needs to know where that is"
    done = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    down = 1 - done if schedule.name == "linear" else (1 + math.cos(math.pi * done)) / 2
    return base * (schedule.final + (1 - schedule.final) * down)
