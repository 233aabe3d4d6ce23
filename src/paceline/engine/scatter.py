"""Sums of which each rank needs a part: with a sharded optimizer, those of the gradients of its own parameters.

A reduce-scatter sends half of what an all-reduce sends. The parts of the ranks have different sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from paceline.engine.flat import slots_in, starts_of
from paceline.engine.integer_sum import Gradients, IntegerSum, Scratch
from paceline.world import World


class OwnerOrder:
    """The indices of some gradients, sorted by the rank that needs their sum."""

    def __init__(self, indices: Iterable[int], owners: Sequence[int], world: World) -> None:
        self.indices = sorted(indices, key=lambda index: owners[index])
        counts = [sum(owners[index] == rank for index in self.indices) for rank in range(world.size)]
        self._bounds = [0, *itertools.accumulate(counts)]
        self.first = self._bounds[world.rank]  # of this rank's gradients
        self.mine = self.indices[self.first : self._bounds[world.rank + 1]]

    def sizes(self, starts: Sequence[int]) -> list[int]:
        """The elements of each rank, if the gradients start there in a flat tensor."""
        bounds = [starts[bound] for bound in self._bounds]
        return [end - start for start, end in itertools.pairwise(bounds)]


class ReduceScatter:
    """Sums gradients over the ranks, each for its owner alone. The other ranks' gradients have any contents after."""

    def __init__(self, world: World, group: dist.ProcessGroup | None, scratch: Scratch) -> None:
        self._world, self._group, self._scratch = world, group, scratch

    def integers(self, total: IntegerSum, integers: torch.Tensor, sums: Gradients, order: OwnerOrder) -> None:
        """Write the sums of the integers of `total`, which has the gradients in this order. All ranks."""
        self._sum(integers, order.sizes(total.starts))
        if order.mine:
            total.write([sums[index] for index in order.mine], order.first)

    def floats(self, sums: Gradients, order: OwnerOrder, dtype: torch.dtype) -> None:
        """Replace gradients by their sums, computed in this format. All ranks."""
        like = [sums[index] for index in order.indices]
        starts = starts_of(like, 1)
        flat = self._scratch.take("floats", starts[-1], dtype, like[0].device)
        slots = slots_in(flat, like, starts)
        torch._foreach_copy_(slots, like)
        self._sum(flat, order.sizes(starts))
        if order.mine:
            torch._foreach_copy_([sums[index] for index in order.mine], slots[order.first :][: len(order.mine)])

    def _sum(self, tensor: torch.Tensor, sizes: list[int]) -> None:
        """Replace this rank's part of a flat tensor by its sum over the ranks. All ranks."""
        parts = list(torch.split(tensor, sizes))
        mine = parts[self._world.rank]
        if self._world.backend != "gloo":  # NCCL groups one reduction for each rank if the sizes differ
            dist.reduce_scatter(mine, parts, group=self._group)
        elif tensor.device.type == "cpu":
            self._exchange(parts)
        else:  # Gloo sends from host memory
            on_host = [part.cpu() for part in parts]
            self._exchange(on_host)
            mine.copy_(on_host[self._world.rank])

    def _exchange(self, parts: Sequence[torch.Tensor]) -> None:
        """Send each rank its part, and add those of the other ranks to this rank's. All ranks.

        Gloo's `reduce_scatter` is an all-reduce, and its `reduce` sends more than this does.
        """
        rank, count, mine = self._world.rank, self._world.size, parts[self._world.rank]
        received = self._scratch.take("received", len(mine), mine.dtype, mine.device)
        for distance in range(1, count):  # in each turn, every rank sends to one and receives from one
            target, source = (rank + distance) % count, (rank - distance) % count
            work = [dist.isend(parts[target], target, group=self._group)] if len(parts[target]) else []
            if len(mine):
                work.append(dist.irecv(received, source, group=self._group))
            for each in work:
                each.wait()  # type: ignore[union-attr]
            mine.add_(received)
