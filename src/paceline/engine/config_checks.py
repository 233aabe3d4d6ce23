"""Checks of a config that need torch: names of optimizers and metrics, and the loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.config import Config
from paceline.engine.losses import NAMED
from paceline.engine.optimizers import problems_with


def unknown_names(config: Config) -> Iterator[str]:
    """One sentence for each optimizer, argument of an optimizer, or metric that does not exist."""
    section = config.optimizer.model_dump(exclude_unset=True)
    yield from problems_with(config.optimizer.name, config.optimizer.model_extra or {}, section, config.origin)
    for name in config.metrics if isinstance(config.metrics, list) else ():
        if name not in NAMED:
            yield f"metrics={name!r} is not known; use {', '.join(NAMED)}, or {{{name}: function}}"


def unsuitable_loss(config: Config) -> Iterator[str]:
    """One sentence for each reason why the loss would not train as intended."""
    loss = config.loss_fn
    takes_probabilities = loss is torch.nn.functional.binary_cross_entropy or isinstance(loss, torch.nn.BCELoss)
    if takes_probabilities and isinstance(config.metrics, list) and "accuracy" in config.metrics:
        yield (
            "metrics=accuracy uses the sign of a logit, but loss_fn=binary_cross_entropy expects probabilities; "
            "use binary_cross_entropy_with_logits, and no sigmoid in the model"
        )
    if isinstance(loss, torch.nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        yield (
            "loss_fn has trainable weights, which the optimizer would not update; make them a part of the model, or "
            "freeze them with requires_grad_(False)"
        )
