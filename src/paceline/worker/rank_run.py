"""`RankRun`: what a `Run` can do in any loop: sums and means over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.callbacks.run import Run
from paceline.world import World


@dataclass(kw_only=True, eq=False)
class RankRun(Run):
    """The run of one rank."""

    world: World

    def sum(self, value: Any) -> Any:
        """The sum of a number or tensor over all ranks, in rank order. All ranks."""
        if not isinstance(value, torch.Tensor):
            return sum(self.world.gather_objects(value))
        present = value.detach().to(self.device)
        if not present.is_floating_point():
            return torch.stack(self.world.gather_equal(present.long())).sum(dim=0)
        return torch.stack(self.world.gather_equal(present.double())).sum(dim=0).to(value.dtype)

    def mean(self, value: Any, weight: float = 1) -> Any:
        """The mean of a number or tensor over all ranks, weighted by `weight`. All ranks."""
        if isinstance(weight, torch.Tensor):
            weight = weight.item()
        return self.sum(value * weight) / self.sum(weight)

    def gather(self, tensor: torch.Tensor, *, with_grad: bool = False) -> torch.Tensor:
        """The rows of all ranks in rank order; `with_grad` sends gradients back to the rank of each row. All ranks."""
        rows = tensor[None] if tensor.ndim == 0 else tensor
        rows = rows.to(self.device)
        if with_grad:
            return GatherWithGradient.apply(rows, self.world)  # type: ignore[no-any-return, no-untyped-call]
        return torch.cat(self.world.gather_rows(rows.detach()))


class GatherWithGradient(torch.autograd.Function):
    """The rows of all ranks; the gradient of a row is the sum of the gradients that all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, world: World) -> torch.Tensor:
        """All ranks."""
        parts = world.gather_rows(rows)
        ctx.world, ctx.start, ctx.rows = world, sum(map(len, parts[: world.rank])), len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """All ranks."""
        total = gradients[0].contiguous().clone()
        if ctx.world.size > 1:
            dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.rows], None
