"""Evaluation: each sample counted exactly once, and the same numbers at any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.loader import to_device
from paceline.metrics import Metric, sum_and_count
from paceline.step import run_model
from paceline.world import World


class Evaluator:
    """Measures a model on a data set that is spread over the ranks batch by batch."""

    def __init__(self, loader: DataLoader[Any], loss_fn: Metric, metrics: dict[str, Metric], world: World) -> None:
        self.loader, self.world = loader, world
        self.measures = {"val_loss": loss_fn, **metrics}

    @torch.no_grad()
    def measure(self, model: torch.nn.Module, on_batch: Callable[[int, int], None]) -> dict[str, float]:
        """The mean of the loss and of each metric over all samples. All ranks."""
        was_training = model.training
        model.eval()
        rows = [torch.zeros(0, len(self.measures), 2, dtype=torch.float64, device=self.world.device)]
        for done, (batch, indices) in enumerate(zip(self.loader, self.loader.batch_sampler, strict=True)):  # type: ignore[arg-type]
            output, target = run_model(model, to_device(batch, self.world.device))
            rows.append(self._row(output, target, samples=len(indices))[None])
            on_batch(done + 1, len(self.loader))
        model.train(was_training)
        # One row a batch, put in the order of the batches before they are added: the sum does not know the ranks.
        sums = torch.cat(self.world.gather(torch.cat(rows))).sum(0).tolist()
        return {
            name: total / count if count else math.nan for name, (total, count) in zip(self.measures, sums, strict=True)
        }

    def _row(self, output: Any, target: Any, samples: int) -> torch.Tensor:
        row = torch.zeros(len(self.measures), 2, dtype=torch.float64, device=self.world.device)
        for position, (name, measure) in enumerate(self.measures.items()):
            row[position, 0], row[position, 1] = sum_and_count(measure(output, target), samples, name)
        return row
