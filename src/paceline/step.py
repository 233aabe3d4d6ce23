"""One optimizer step over this rank's lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.loader import Lane, to_device
from paceline.errors import UnusedParameters
from paceline.metrics import sum_and_count
from paceline.randomness import seed_generators
from paceline.reduce import SumReduction, reduce_bucket
from paceline.replica import Replica
from paceline.world import World


class Stepper:
    """Takes the lanes of a step through forward, backward, reduction and update."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        *,
        lr_factor: Callable[[int], float],
        clip_norm: float | None,
        lanes_per_rank: int,
        seed: int,
        world: World,
    ) -> None:
        self.replica, self.optimizer, self.loss_fn = replica, optimizer, loss_fn
        self.lr_factor, self.clip_norm, self.seed, self.world = lr_factor, clip_norm, seed, world
        self.lanes_per_rank = lanes_per_rank
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.trainable = sum(p.numel() for p in replica.module.parameters() if p.requires_grad)
        self.reduction = SumReduction(world.size)
        replica.register_comm_hook(self.reduction, reduce_bucket)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, as of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def take(self, step: int, lanes: Sequence[Lane]) -> torch.Tensor:
        """One update. Returns the loss's sum and count for each lane of this rank, on the device. All ranks."""
        self.optimizer.zero_grad(set_to_none=True)
        self.reduction.start_step()
        totals = torch.zeros(self.lanes_per_rank, 2, device=self.world.device)
        counts_itself = False
        for position, lane in enumerate(lanes):
            is_last = position == len(lanes) - 1
            with nullcontext() if is_last else self.replica.no_sync():
                total, count, counts_itself = self._ride(lane)
            if lane.samples:
                totals[position, 0], totals[position, 1] = total, count
            if position == 0:
                statistics = self._buffers() if len(lanes) > 1 else []
        # BatchNorm's statistics follow the first lane of a rank; rank 0's, which is lane 0, are the ones that count.
        for buffer, kept in zip(self.replica.module.buffers(), statistics, strict=bool(statistics)):
            buffer.copy_(kept)
        if self.reduction.reduced != self.trainable:
            raise UnusedParameters(self.replica.without_gradient())
        if counts_itself:
            self._divide_by_count(totals[:, 1].sum(), lanes[0].step_samples)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.lr_factor(step)
        self.optimizer.step()
        return totals

    def _ride(self, lane: Lane) -> tuple[torch.Tensor, Any, bool]:
        """Forward and backward of one lane: the loss's sum, its count, and whether the loss counted by itself."""
        batch = to_device(lane.data, self.world.device)
        seed_generators(self.seed, "forward", lane.step, lane.lane)
        output, target = run_model(self.replica, batch)
        value = self.loss_fn(output, target)
        total, count = sum_and_count(value, len(lane.indices), "loss_fn")
        weight = (1.0 if lane.samples else 0.0) / lane.step_samples
        (total * weight).backward()  # type: ignore[no-untyped-call]
        return total.detach(), count, isinstance(value, (tuple, list))

    def _divide_by_count(self, count: torch.Tensor, step_samples: int) -> None:
        """Gradients so far are of the sum over samples; make them of the sum over what the loss counted. All ranks."""
        dist.all_reduce(count)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(step_samples / count)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.replica.module.buffers()]


def run_model(model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
    """The model's output and the target: `(*inputs, target)` of a tuple, `labels` of a dict."""
    if isinstance(batch, dict):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return model(**inputs), batch.get("labels")
    *inputs, target = batch
    return model(*inputs), target
